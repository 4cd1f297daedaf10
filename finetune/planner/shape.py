"""A model's shape, computed from its config.json: every parameter is counted, none is loaded."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from finetune.errors import InputError, refuse_if_any
from finetune.planner import families
from finetune.planner.families import COMMON, FAMILIES, SIZES_OF_NESTED, Family
from finetune.planner.fields import Fields
from finetune.planner.model_shape import Linear, ModelShape, Norm
from finetune.planner.trained import AdapterParameters, adapter_parameters, trained_parameters

__all__ = [
    "AdapterParameters",
    "Linear",
    "ModelShape",
    "Norm",
    "adapter_parameters",
    "shape_of",
    "trained_parameters",
]

NESTED = {"gemma3": "gemma3_text"}
"""Multimodal model types, and the family of the language model that lies under ``text_config``."""


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes. Missing fields mean what they mean to transformers.

    Layers of a mixture are assumed to be mixtures all; of a multimodal model the language model is described.

    Raises:
        InputError: with a sentence for each thing that is wrong.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in NESTED:
        return _nested_shape(config, NESTED[model_type])
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(
            f"config.json: model_type is {model_type!r}; there are formulas for {', '.join(sorted(FAMILIES))}. "
            "`finetune plan --trace` supports any causal language model of transformers."
        )
    return _shape(model_type, FAMILIES[model_type], Fields(config, {**COMMON, **FAMILIES[model_type].defaults}))


def _nested_shape(config: Mapping[str, Any], family: str) -> ModelShape:
    """The language model of a multimodal one: what concerns both stands beside its text_config."""
    text = config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise InputError(f"config.json: text_config is {text!r}; it must be the language model's configuration.")
    shared = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
    # whether weights are tied is decided by the outer configuration alone
    inner = {key: value for key, value in (text or {}).items() if key != "tie_word_embeddings"}
    values = {**inner, **{key: config[key] for key in shared if config.get(key) is not None}}
    defaults = {**COMMON, **FAMILIES[family].defaults, **SIZES_OF_NESTED[family]}
    shape = _shape(family, FAMILIES[family], Fields(values, defaults))
    return replace(shape, not_counted=("vision_config",))


def _shape(model_type: str, family: Family, fields: Fields) -> ModelShape:
    hidden, layers, heads = (fields.number(n) for n in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    vocabulary, intermediate = fields.number("vocab_size"), fields.number(family.expert_field)
    kv_heads = fields.optional_number("num_key_value_heads") or heads
    head_dim = fields.number("head_dim") if fields.is_set("head_dim") else max(1, hidden // heads)
    experts = fields.number("num_local_experts", "num_experts") if family.is_mixture else 1
    window = families.window(family, fields)
    shape = ModelShape(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        tied=fields.flag("tie_word_embeddings"),
        linears=families.linears(
            family,
            fields,
            hidden=hidden,
            intermediate=intermediate,
            query=heads * head_dim,
            key=kv_heads * head_dim,
            experts=experts,
        ),
        norms=families.norms(family, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        final_norm=hidden,
        positions=fields.optional_number("max_position_embeddings"),
        activation=fields.text(family.activation_field),
        sliding_window=window,
        windowed_layers=families.windowed_layers(family, fields, layers) if window else 0,
        experts=experts,
        experts_per_token=fields.number("num_experts_per_tok") if family.is_mixture else 1,
        attention_softcap=families.is_squashed(family, fields, "attn_logit_softcapping"),
        logits_softcap=families.is_squashed(family, fields, "final_logit_softcapping"),
        stored_dtype_bytes=fields.stored_dtype_bytes(),
        published_bits=fields.published_bits(),
    )
    refuse_if_any([*fields.problems.values(), *_contradictions(shape, fields)])
    return shape


def _contradictions(shape: ModelShape, fields: Fields) -> list[str]:
    """Numbers that contradict each other, as sentences."""
    found = []
    if fields.are_sound("num_attention_heads", "num_key_value_heads") and shape.heads % shape.kv_heads:
        found.append(
            f"config.json: num_attention_heads {shape.heads} is not a multiple of num_key_value_heads "
            f"{shape.kv_heads}; use the model's published config.json."
        )
    divided = fields.are_sound("hidden_size", "num_attention_heads") and not fields.is_set("head_dim")
    if divided and shape.hidden % shape.heads:
        found.append(
            f"config.json: hidden_size {shape.hidden} is not a multiple of num_attention_heads {shape.heads}; set "
            "head_dim, or use the model's published config.json."
        )
    if fields.are_sound("num_local_experts", "num_experts") and shape.experts_per_token > shape.experts:
        found.append(
            f"config.json: num_experts_per_tok {shape.experts_per_token} exceeds the {shape.experts} experts; "
            "use the model's published config.json."
        )
    if shape.experts > 1 and (fields.values.get("mlp_only_layers") or fields.values.get("decoder_sparse_step", 1) != 1):
        found.append(
            "config.json: mlp_only_layers or decoder_sparse_step makes only some layers mixtures of experts, "
            "for which there are "
            "no formulas; use `finetune plan --trace`."
        )
    return found
