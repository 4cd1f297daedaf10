"""The model that one of several GPUs computes which split its layers: the same, with fewer heads and less width.

Its step is traced in the place of the whole model's. Example: of a model of 8 heads of 16, 4 of keys and values, an MLP
of 128 and 512 tokens, each of two GPUs has one of 4 heads of 16, 2 of keys and values, an MLP of 64 and 256 tokens.
"""

from collections.abc import Mapping
from typing import Any

DIVIDED = (
    *("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
"""Keys of a config.json whose numbers are shared."""
OF_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Those that name tokens, which a part may not have."""


def part_config(config: Mapping[str, Any], sizes: Mapping[str, int], parts: int) -> dict[str, Any]:
    """The contents of a config.json for one of so many parts.

    Args:
        sizes: of the whole model, by ``DIVIDED`` and ``head_dim``, with those that its file leaves to defaults.
    """
    split = {key: max(1, size // parts) for key, size in sizes.items() if key in DIVIDED}
    if sizes["vocab_size"] % parts:  # then embedding and head are whole
        del split["vocab_size"]
    return {**config, **split, "head_dim": sizes["head_dim"], **dict.fromkeys(OF_TOKENS)}
