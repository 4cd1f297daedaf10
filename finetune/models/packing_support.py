"""Which models keep the documents of a flat row apart, from the configuration alone, before any weight is loaded."""

import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from finetune.compat.transformers_private import is_stateful, takes_flash_attention, takes_registered_attention
from finetune.config.refusals import packing_problems
from finetune.models.attention import FLASH, PACKED

_ISOLATED_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types in which bounds keep documents apart; others mix, compress or chunk along the whole row."""
_SINKS = {"deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"}
"""Model types whose softmax has a learned sink, which no configuration key shows."""
_OTHER_CALL = {"doge", "nemotron"}
"""Model types that do not hand the bounds of documents on to attention, or hand on a mask of their own."""
_WINDOW_IN_MASK = {"phimoe"}
"""Model types whose sliding window is only in the mask, and not passed to attention."""


def attention_for(
    config: PreTrainedConfig, attention: str, *, packing: bool, dtype: torch.dtype, own_code: bool
) -> tuple[str, bool]:
    """The name for ``attn_implementation``, and whether rows that are not packed lie end to end, without padding.

    They do wherever the attention that they need is at hand, unless another is asked for.

    Args:
        attention: as ``model.attention``.
        packing: whether rows are packed, which needs that attention.
        dtype: in which the model computes.
        own_code: whether code that comes with a model may be run.
    """
    chosen = PACKED if attention == "auto" else attention
    lacking = problems(config, attention=chosen, dtype=dtype, capability=own_capability(), own_code=own_code)
    return attention if lacking and not packing else chosen, not lacking


def caps_scores(config: PreTrainedConfig) -> bool:
    """Whether attention has a cap, as in Gemma 2. PyTorch's scaled_dot_product_attention has none, and transformers up
    to 5.20 chooses it all the same."""
    return getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None


def own_capability() -> tuple[int, int] | None:
    """Compute capability of the GPU that this process will use; None where there is none."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def problems(
    config: PreTrainedConfig,
    *,
    attention: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    own_code: bool = False,
) -> list[str]:
    """Why documents cannot be packed for a model, as sentences, before its weights are loaded.

    Args:
        attention: the name for ``attn_implementation``.
        dtype: in which the model computes.
        capability: the GPU's compute capability, (8, 0) for Ampere; None where there is no GPU.
        own_code: whether code that comes with a model may be run.
    """
    off = "or set data.packing to false"
    if attention not in (PACKED, *FLASH):
        return [
            f"With attention {attention}, packed documents would attend to each other, or need a mask of the row's "
            f"length squared; choose {', '.join((PACKED, *FLASH))}, {off}."
        ]
    text = config.get_text_config(decoder=True)
    name = f"The model type {text.model_type}"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return [
            f"{name} is not one of transformers' causal language models, so packing may be unsafe; "
            f"choose another model, {off}."
        ]
    if own_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return [f"{name} comes with code of its own, which may not keep documents apart; choose another model, {off}."]
    if text.model_type in _OTHER_CALL:
        return [f"{name} does not tell attention where documents begin; choose another model, {off}."]
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    settings = text.to_dict()
    found = []
    takes = takes_registered_attention if attention == PACKED else takes_flash_attention
    if not takes(architecture):
        found.append(f"{name} does not support attention {attention}; choose another model, {off}.")
    mixing = sorted(set(settings.get("layer_types") or []) - _ISOLATED_LAYERS)
    if is_stateful(architecture) or mixing:
        kinds = f" ({', '.join(mixing)})" if mixing else ""
        found.append(f"{name} has layers{kinds} that mix packed documents; choose a model of attention layers, {off}.")
    # of its kind, also one that is used as a decoder: RoBERTa's and its like count positions in their own way
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.is_encoder_decoder:
        found.append(f"{name} is or has an encoder, which packing does not support; choose a decoder, {off}.")
    if text.model_type in _WINDOW_IN_MASK and settings["sliding_window"] is not None:
        found.append(f"{name} does not pass its sliding window to attention; set sliding_window to null, {off}.")
    if found:
        return found  # the rest is about attention layers, which this model may not even have
    if capability is not None:
        key_size = (
            settings.get("qk_head_dim") or settings.get("head_dim") or text.hidden_size // text.num_attention_heads
        )
        value_size = settings.get("v_head_dim") or key_size
        sizes = sorted({key_size, value_size, settings.get("global_head_dim") or key_size})
        if attention == PACKED and key_size != value_size:
            found.append(
                f"{name} has keys of size {key_size} and values of size {value_size}, where packed attention takes "
                f"equal ones on a GPU; choose flash_attention_2, {off}."
            )
        if any(size > 256 or size % 8 for size in sizes):
            found.append(
                f"{name} has attention heads of size {', '.join(map(str, sizes))}; on a GPU packing takes multiples "
                f"of 8 up to 256: choose another model, {off}."
            )
        if dtype == torch.float32:
            found.append(
                f"Packed attention computes in bf16 or fp16 on a GPU, not in fp32; set mixed_precision to bf16, {off}."
            )
        found += packing_problems(capability)
    elif attention in FLASH:
        found.append(f"Attention {attention} needs a GPU, but none was found; choose {PACKED}, {off}.")
    if attention == PACKED:
        found += [f"{name} {reason}." for reason in _not_computed(settings, on_gpu=capability is not None)]
    return found


def why_not_spread(
    config: PreTrainedConfig, *, dtype: torch.dtype, capability: tuple[int, int] | None, own_code: bool = False
) -> list[str]:
    """Why the positions of a row cannot be spread over processes, as clauses; arguments as for ``problems``."""
    lacking = problems(config, attention=PACKED, dtype=dtype, capability=capability, own_code=own_code)
    return [re.split(r"[;:] (?=choose|use|set)", each)[0] for each in lacking]  # what they advise is not enough here


def reads_both_ways(model: PreTrainedModel) -> bool:
    """Whether a model shows each token those that follow it, as BERT and its kind do unless they are told."""
    config = model.config
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False


def heads_of(config: PreTrainedConfig) -> tuple[int, int]:
    """Attention heads of queries, and of keys and values."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 1
    return heads, getattr(text, "num_key_value_heads", None) or heads


def _not_computed(settings: dict[str, Any], *, on_gpu: bool) -> Iterator[str]:
    """Clauses on features that ``packed_attention`` lacks."""
    if settings.get("attn_logit_softcapping") is not None:
        yield "caps attention logits, which packed attention lacks; use flash_attention_2, or set data.packing to false"
    if settings["model_type"] in _SINKS:
        yield "has attention sinks, which packed attention lacks; use flash_attention_3, or set data.packing to false"
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob") if on_gpu else ():
        if settings.get(name):
            yield (
                f"has {name} {settings[name]}, which packed attention cannot apply on a GPU; set it to 0 in the "
                "model's configuration, or set data.packing to false"
            )
