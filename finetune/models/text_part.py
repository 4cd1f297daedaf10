"""The part of a model that rows of text reach: what encodes images or sounds beside it learns nothing from them."""

from collections.abc import Iterable
from typing import Any

import torch


def unreached(model: Any) -> list[str]:
    """Names of modules beside the decoder that have weights, such as ``model.vision_tower``; none of most models.

    Args:
        model: for causal language modelling, of transformers; its weights may be on the meta device.
    """
    used = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    base = model.base_model  # what is beside it belongs to the head
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    outside = [name for name, parameter in base.named_parameters() if parameter not in used]
    return sorted({prefix + name.partition(".")[0] for name in outside})


def is_within(name: str, parts: Iterable[str]) -> bool:
    """Whether a module or a parameter belongs to one of these modules, by their names."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """The part whose layers rows of text pass; the model itself where it does not say."""
    decoder = getattr(model, "get_decoder", None)
    return model if decoder is None else decoder() or model
