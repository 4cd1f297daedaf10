"""Bytes of an optimizer's state, as ``optim.optimizer`` makes it."""

from dataclasses import dataclass

EIGHT_BIT_MOMENTS = {"adamw_8bit": 2, "paged_adamw_8bit": 2, "lion_8bit": 1}
SCALE_BYTES = 4 / 256
"""Of 8-bit state: an fp32 number for 256 elements (arXiv:2110.02861)."""


@dataclass(frozen=True)
class Trained:
    """One trained tensor, or the part of it that a process steps on."""

    elements: int
    rows: int
    """Of a matrix; 1 for a norm or a bias."""
    width: int
    """Bytes of an element of the weight that is stepped on."""


def state_tensors(optimizer: str, weights: str, trained: Trained, *, averages: bool = False) -> list[float]:
    """Bytes of each tensor that the optimizer remembers of a weight, on the GPU, and of its average if that is kept."""
    return _moments(optimizer, weights, trained) + ([4.0 * trained.elements] if averages else [])


def _moments(optimizer: str, weights: str, trained: Trained) -> list[float]:
    n, is_matrix = trained.elements, trained.rows > 1
    if optimizer == "adamw":
        counter = [] if weights == "bf16" else [4.0]
        return [float(n * trained.width)] * 2 + counter
    if optimizer == "paged_adamw_8bit":  # moves to the host when the GPU is full, and is none of the allocator's memory
        return []
    if moments := EIGHT_BIT_MOMENTS.get(optimizer):
        if not is_matrix:
            return [4.0 * n] * moments
        return [n * 1.0, n * SCALE_BYTES] * moments
    if optimizer == "adafactor":
        return [4.0 * trained.rows, 4.0 * (n / trained.rows)] if is_matrix else [4.0 * n]
    return []
