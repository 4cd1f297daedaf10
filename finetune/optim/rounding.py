"""Unbiased rounding of fp32 to bf16, and the local part of a sharded tensor."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from finetune.seeds import seed_of

CHUNK_ELEMENTS = 2**24
"""Elements of bf16 weights that are updated at a time: the update takes up to 34 bytes of each for a moment."""


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this process holds; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def number_parameters(numbers: dict[torch.Tensor, int], groups: Iterable[dict[str, Any]]) -> None:
    """Give each parameter of an optimizer's groups a number, in the order in which they come. It is kept: DeepSpeed
    has an optimizer step one group at a time, and the noise of two groups must not be the same."""
    for group in groups:
        for parameter in group["params"]:
            numbers.setdefault(parameter, len(numbers))


def rounding_noise(seed: int, step: int, number: int, device: torch.device) -> torch.Generator:
    """Random numbers to round weights in an optimizer step, from that of the first one: none need be saved."""
    return torch.Generator(device).manual_seed(seed_of(seed, step, number))


def round_stochastically(values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """fp32 to bf16, rounded up or down with the probability that keeps the expectation.

    bf16 is the upper half of the bits of fp32: adding a uniform number below 2^16 and cutting the lower half off
    carries into the upper half with just that probability.

    Example: 1 + 2^-9 has the bits 3f80 4000, a quarter of the way from 1 (3f80) to the next bf16, 1 + 2^-7 (3f81).
    A number from 0 to ffff carries over 4000 in one case of four: three values of four become 1, one 1.0078125, and
    their mean is 1.001953125. Rounding to nearest would give 1 each time, and lose the update.

    NaN stays NaN: CUDA's has the bits 7fff ffff, which a carry would make -0 of.
    """
    bits = torch.randint(1 << 16, values.shape, generator=random, dtype=torch.int32, device=values.device)
    rounded = bits.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    return rounded.masked_fill_(values.isnan(), math.nan).to(torch.bfloat16)
