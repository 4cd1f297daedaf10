"""A tiny configuration of each type of causal language model in transformers, made from its own defaults."""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "dtype": "float32",
}
WIDTHS = {
    **dict.fromkeys(("n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "lru_width"), 64),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "n_inner", "d_inner", "ffn_hidden_size", "block_ff_dim"), 128),
    **dict.fromkeys(("intermediate_size_mlp", "encoder_ffn_dim"), 128),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("n_positions", "n_ctx"), 256),
    **dict.fromkeys(("encoder_layers", "num_buckets"), 1),
}
EXPERTS = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_layer_end_index"), 1),
    **dict.fromkeys(("moe_layer_start_index", "zero_expert_num"), 0),
}
PARTS_OF_HEADS = {
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "v_head_dim", "qk_head_dim", "global_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank",), 32),
    **dict.fromkeys(("index_n_heads", "num_global_key_value_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("sliding_window", "attention_window_size", "head_size"), 16),
    "index_topk": 64,
}
OF_STATES = {
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_head_dim", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_expand", "linear_num_key_heads"), 2),
    "linear_num_value_heads": 4,
}
BESIDE = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}
OWN: dict[str, dict[str, Any]] = {
    **{kind: {"num_key_value_heads": 4} for kind in ("axk2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "kimi_linear": {"num_experts_per_token": 2, "num_expert_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes that must fit one another otherwise."""
SMALL = SIZES | WIDTHS | EXPERTS | PARTS_OF_HEADS | OF_STATES | BESIDE


def described(kind: str) -> dict[str, Any]:
    """What a config.json says of a model of this type, with two layers, of different kinds where it has some, and
    without dropout; a model within another is as small."""
    return {"model_type": kind, **_shrunk(CONFIG_MAPPING[kind]()), **OWN.get(kind, {})}


def _shrunk(default: PreTrainedConfig) -> dict[str, Any]:
    known = default.to_dict()
    layers = known.get("num_hidden_layers") or 2
    found: dict[str, Any] = {}
    for name, value in known.items():
        if isinstance(value, float) and "drop" in name:
            found[name] = 0.0
        elif name == "head_dim" and "qk_rope_head_dim" in known:
            continue  # which is that of the other
        elif name in default.sub_configs:
            within = getattr(default, name)
            found[name] = within and {"model_type": within.model_type, **_shrunk(within)}
        elif name in SMALL and not isinstance(value, dict):
            found[name] = SMALL[name]
        elif isinstance(value, list) and name.endswith("layer_types"):
            found[name] = [value[0], next((each for each in value if each != value[0]), value[0])]
        elif isinstance(value, list) and len(value) == layers > 2:
            found[name] = value[:2]
    renamed = {name: SIZES[name] for name in default.attribute_map if name in SIZES}
    return found | renamed | {name: SIZES[name] for name in ("pad_token_id", "eos_token_id", "bos_token_id", "dtype")}
