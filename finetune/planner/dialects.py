"""What the modules of a model family compute otherwise than Llama's, as far as memory depends on it.

Read off ``transformers/models/*/modeling_*.py``; ``tests/test_plan_tape.py`` and ``tests/test_plan_memory.py`` hold
each family against the modules of the installed transformers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dialect:
    """What sets a family's modules apart from Llama's."""

    weighs_in_fp32: bool = False
    """Norms multiply by their weight before they leave fp32."""
    adds_one: bool = False
    """Norms multiply by one more than their weight."""
    scales_embedding: bool = False
    """By a number that lies in a buffer."""
    scales_branches: bool = False
    """Embedding, attention and MLP are each multiplied by a plain number."""
    scales_logits: bool = False
    rotates_in_fp32: bool = False
    """Queries and keys are rotated by angles in fp32, and brought back."""
    rotations: int = 1
    """Sets of angles: windowed layers have their own."""
    joins_rotated: bool = False
    """The rotated part of a head is joined with one that is not, which lays heads out one after the other."""
    attends_eagerly: bool = False
    """Attention scores are computed as they are written: they are squashed, which no fused kernel does."""
    narrows_shares: bool = False
    """The router's shares are brought back from fp32."""


LLAMA = Dialect()
_GEMMA = {"weighs_in_fp32": True, "adds_one": True, "scales_embedding": True}
DIALECTS = {
    "granite": Dialect(scales_branches=True, scales_logits=True),
    "gemma": Dialect(**_GEMMA),
    "gemma2": Dialect(**_GEMMA, attends_eagerly=True),
    "gemma3_text": Dialect(**_GEMMA, rotations=2),
    "phi3": Dialect(joins_rotated=True),
    "olmo2": Dialect(weighs_in_fp32=True, rotates_in_fp32=True),
    "qwen3_moe": Dialect(narrows_shares=True),
    "olmo3": Dialect(weighs_in_fp32=True, rotates_in_fp32=True, rotations=2),
}
"""By model type; the others are as Llama."""


def dialect_of(model_type: str) -> Dialect:
    return DIALECTS.get(model_type, LLAMA)
