"""The part of a model that rows of text reach: what encodes images or sounds beside it learns nothing from them."""

from collections.abc import Iterable
from typing import Any

import torch


def unreached(model: Any) -> list[str]:
    """Names of modules beside the decoder that have weights, such as ``model.vision_tower``; none of most models.

    Args:
        model: for causal language modelling, of transformers; its weights may be on the meta device.
    """
    base = model.base_model
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    return sorted({prefix + name.partition(".")[0] for name in _beside_text(model)})


def train_alone(model: Any, skeleton: Any, dtype: torch.dtype | None = None) -> None:
    """Freeze what rows of text do not reach and what a model freezes itself, before optimizer and strategy see it.

    It would get no gradient: DDP waits for one of every trained weight, and ZeRO steps with zeros, so that weight decay
    alone would change it.

    Args:
        model: as for ``unreached``, without an adapter; ZeRO-3 may have partitioned its weights.
        skeleton: the same as transformers builds it; reading weights sets ``requires_grad`` on all of them.
        dtype: of trained weights, where all have one: models keep some in fp32 beside bf16, which FSDP2 does not take
            and ZeRO does not keep.
    """
    for parameter in _beside_text(model).values():
        parameter.requires_grad_(False)
    known = dict(model.named_parameters())
    for name, parameter in skeleton.named_parameters():
        if not parameter.requires_grad:
            known[name].requires_grad_(False)
    for parameter in known.values():
        if dtype and parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


INSIDE = {
    "phi4_multimodal": ("embed_tokens_extend",),
    "git": ("image_encoder", "visual_projection", "img_temporal_embedding"),
}
"""Of types of models, by their names in the decoder, encoders that lie in the decoder itself."""


def _beside_text(model: Any) -> dict[str, torch.nn.Parameter]:
    """Weights beside decoder and head, by their names in the base model."""
    decoder = decoder_of(model)
    inside = INSIDE.get(model.config.model_type, ())
    used = {each for name, each in decoder.named_parameters() if not is_within(name, inside)}
    used |= {*model.get_output_embeddings().parameters()}
    # what is beside the base model belongs to the head
    return {name: each for name, each in model.base_model.named_parameters() if each not in used}


def is_within(name: str, parts: Iterable[str]) -> bool:
    """Whether a module or a parameter belongs to one of these modules, by their names."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def decoder_of(model: Any) -> Any:
    """The part whose layers rows of text pass; the model itself where it does not say."""
    if not hasattr(model, "get_decoder"):
        return model
    decoder = model.get_decoder() or model
    # ModernBERT's decoder calls its output head that, and get_decoder takes it for the decoder
    return model.base_model if decoder is model.get_output_embeddings() else decoder
