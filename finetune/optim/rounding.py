"""Unbiased rounding of fp32 to bf16, and the local part of a sharded tensor."""

import torch
from torch.distributed.tensor import DTensor

from finetune.seeds import seed_of

CHUNK_ELEMENTS = 2**24
"""Elements of bf16 weights that are updated at a time: the update takes up to 34 bytes of each for a moment."""


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this process holds; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rounding_noise(seed: int, step: int, device: torch.device) -> torch.Generator:
    """Random numbers to round the weights of an optimizer step: from seed and step alone, so none need be saved."""
    return torch.Generator(device).manual_seed(seed_of(seed, step))


def round_stochastically(values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """fp32 to bf16, rounded up or down with the probability that keeps the expectation.

    bf16 is the upper half of the bits of fp32: adding a uniform number below 2^16 and cutting the lower half off
    carries into the upper half with just that probability.

    Example: 1 + 2^-9 has the bits 3f80 4000, a quarter of the way from 1 (3f80) to the next bf16, 1 + 2^-7 (3f81).
    A number from 0 to ffff carries over 4000 in one case of four: three values of four become 1, one 1.0078125, and
    their mean is 1.001953125. Rounding to nearest would give 1 each time, and lose the update.
    """
    noise = torch.randint(1 << 16, values.shape, generator=random, dtype=torch.int32, device=values.device)
    bits = values.view(torch.int32) + noise
    return (bits & -(1 << 16)).view(torch.float32).to(torch.bfloat16)
