"""The model families whose shape is known, each as what sets it apart from Llama.

Read off ``transformers/models/*/configuration_*.py`` and ``modeling_*.py``; ``tests/test_plan_shape.py`` holds each
against the modules and the default values of the installed transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.planner.fields import Fields
from finetune.planner.model_shape import Linear, Norm

BEFORE = ("input_layernorm", "post_attention_layernorm")
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
BEFORE_AND_AFTER = (*BEFORE, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Family:
    """What sets a family apart from Llama."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes where a field is missing, beside ``COMMON``. A field that is neither here nor there is
    required, or, if it is a choice, not known to this family."""
    activation_field: str = "hidden_act"
    norms: tuple[str, ...] = BEFORE
    """Names of the norms over the hidden size."""
    query_norm: Literal["none", "per_head", "whole"] = "none"
    """Norms of queries and keys: of each head, or of all heads together."""
    attention_bias: Literal["asked", "query_key_value", "none"] = "asked"
    """asked: by the field attention_bias, for all four matrices."""
    is_fused: bool = False
    """Query, key and value are one linear layer, gate and up another."""
    is_mixture: bool = False
    """Its MLPs are experts, of which a router chooses."""
    expert_field: str = "intermediate_size"
    """Of the experts' intermediate size."""
    is_windowed: Callable[[int, Fields], bool] | None = None
    """Whether layer ``i`` attends within the window, where ``layer_types`` does not say. None: all do."""


COMMON: Mapping[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
}
WINDOW_OF_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
GELU = "gelu_pytorch_tanh"
GEMMA_2 = {
    "hidden_activation": GELU,
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family({"mlp_bias": False}),
    "granite": Family({"mlp_bias": False}),
    "smollm3": Family(
        {
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
        },
        is_windowed=lambda i, fields: (i + 1) % fields.number("no_rope_layer_interval") == 0,
    ),
    "mistral": Family(
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}, attention_bias="none"
    ),
    "qwen2": Family(
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, **WINDOW_OF_QWEN},
        attention_bias="query_key_value",
        is_windowed=lambda i, fields: i >= fields.number("max_window_layers", least=0),
    ),
    "qwen3": Family(
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, **WINDOW_OF_QWEN},
        query_norm="per_head",
        is_windowed=lambda i, fields: i >= fields.number("max_window_layers", least=0),
    ),
    "gemma": Family(
        {
            "hidden_act": GELU,
            "tie_word_embeddings": True,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
        }
    ),
    "gemma2": Family(
        {
            **GEMMA_2,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        activation_field="hidden_activation",
        norms=BEFORE_AND_AFTER,
        is_windowed=lambda i, fields: i % 2 == 0,
    ),
    "gemma3_text": Family(
        {**GEMMA_2, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
        activation_field="hidden_activation",
        norms=BEFORE_AND_AFTER,
        query_norm="per_head",
        is_windowed=lambda i, fields: (i + 1) % fields.number("sliding_window_pattern") != 0,
    ),
    "phi3": Family({"max_position_embeddings": 4096, "sliding_window": None}, attention_bias="none", is_fused=True),
    "olmo2": Family({}, norms=AFTER, query_norm="whole"),
    "olmo3": Family(
        {"sliding_window": 4096},
        norms=AFTER,
        query_norm="whole",
        is_windowed=lambda i, fields: (i + 1) % 4 != 0,
    ),
    "mixtral": Family(
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        attention_bias="none",
        is_mixture=True,
    ),
    "qwen3_moe": Family(
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
        },
        query_norm="per_head",
        is_mixture=True,
        expert_field="moe_intermediate_size",
    ),
}

SIZES_OF_NESTED: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "vocab_size": 262208,
    }
}
"""Sizes that a multimodal configuration leaves out of its text_config where they are the family's own."""


def linears(
    family: Family, fields: Fields, *, hidden: int, intermediate: int, query: int, key: int, experts: int
) -> tuple[Linear, ...]:
    """Linear layers of a decoder layer, in the order of their use.

    Args:
        query: elements of all query heads together.
        key: elements of all key heads together.
    """
    all_biased = family.attention_bias == "asked" and fields.flag("attention_bias")
    biased = all_biased or family.attention_bias == "query_key_value"
    mlp_bias = "mlp_bias" in family.defaults and fields.flag("mlp_bias")
    attention: tuple[tuple[str, int, int, bool], ...] = (
        ("q_proj", hidden, query, biased),
        ("k_proj", hidden, key, biased),
        ("v_proj", hidden, key, biased),
    )
    mlp: tuple[tuple[str, int, int], ...] = (("gate_proj", hidden, intermediate), ("up_proj", hidden, intermediate))
    if family.is_fused:
        attention = (("qkv_proj", hidden, query + 2 * key, biased),)
    if family.is_fused or family.is_mixture:
        mlp = (("gate_up_proj", hidden, 2 * intermediate),)
    attention += (("o_proj", query, hidden, all_biased),)
    mlp += (("down_proj", intermediate, hidden),)
    attending = tuple(Linear(name, i, o, bias, inside="self_attn") for name, i, o, bias in attention)
    if not family.is_mixture:
        return (*attending, *(Linear(name, i, o, mlp_bias, inside="mlp") for name, i, o in mlp))
    router = Linear("gate", hidden, experts, is_module=False, inside="mlp")
    stacked = (Linear(n, i, o, copies=experts, is_module=False, inside="mlp.experts") for n, i, o in mlp)
    return (*attending, router, *stacked)


def norms(family: Family, *, hidden: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Norm, ...]:
    """Norms of a decoder layer."""
    over_hidden = tuple(Norm(name, hidden) for name in family.norms)
    pair = (("q_norm", heads), ("k_norm", kv_heads))
    if family.query_norm == "per_head":
        return (*over_hidden, *(Norm(name, head_dim, count, inside="self_attn") for name, count in pair))
    if family.query_norm == "whole":
        return (*over_hidden, *(Norm(name, count * head_dim, 1, inside="self_attn") for name, count in pair))
    return over_hidden


def window(family: Family, fields: Fields) -> int | None:
    """Positions that windowed layers attend to; None where no layer is windowed."""
    if "sliding_window" not in family.defaults:
        return None
    size = fields.optional_number("sliding_window")
    return None if "use_sliding_window" in family.defaults and not fields.flag("use_sliding_window") else size


def windowed_layers(family: Family, fields: Fields, layers: int) -> int:
    """How many layers attend within the window."""
    if family.is_windowed is None:
        return layers
    if (kinds := fields.names("layer_types", layers)) is not None:
        return kinds.count("sliding_attention")
    return sum(family.is_windowed(i, fields) for i in range(layers))


def is_squashed(family: Family, fields: Fields, name: str) -> bool:
    """Whether the family knows a soft cap, and the model has one."""
    return name in family.defaults and fields.values.get(name, family.defaults[name]) is not None
