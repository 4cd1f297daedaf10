"""The kernel of ``rounded_adamw``, in Triton.

bf16 is the upper half of the bits of fp32, so numbers are read and written as integers of 16 bits. The random numbers
of an element are a function of the seed and its place (Philox; Salmon et al., SC 2011): 16 bits are added before
the lower half is cut off, as ``rounding.round_stochastically`` does it.
"""

import torch
import triton
import triton.language as tl

ELEMENTS = 1024
"""Of a program."""


def launch(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    rate: float,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    seed: int,
) -> None:
    """See ``rounded_adamw.adamw_rounded``."""
    bits = [each.view(torch.int16) for each in (weight, gradient, first, second)]
    scales = 1 - rate * decay, rate / (1 - beta1**step), 1 / (1 - beta2**step)
    with torch.cuda.device_of(weight):
        _step[(triton.cdiv(weight.numel(), ELEMENTS),)](
            *bits, weight.numel(), *scales, beta1, beta2, eps, seed, ELEMENTS=ELEMENTS
        )


@triton.jit(do_not_specialize=["seed"])
def _step(  # type: ignore[no-untyped-def]
    weight_pointer,
    gradient_pointer,
    first_pointer,
    second_pointer,
    elements,
    kept,
    rate,
    unbiased,
    beta1,
    beta2,
    eps,
    seed,
    ELEMENTS: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = places < elements
    gradient = _exact(tl.load(gradient_pointer + places, there, 0))
    first = _exact(tl.load(first_pointer + places, there, 0))
    first += (1 - beta1) * (gradient - first)
    second = _exact(tl.load(second_pointer + places, there, 0))
    second = beta2 * second + (1 - beta2) * gradient * gradient
    weight = kept * _exact(tl.load(weight_pointer + places, there, 0))
    weight -= rate * first / (tl.sqrt(unbiased * second) + eps)
    of_weight, of_first, of_second, _ = tl.randint4x(seed, places)
    tl.store(weight_pointer + places, _rounded(weight, of_weight), there)
    tl.store(first_pointer + places, _rounded(first, of_first), there)
    tl.store(second_pointer + places, _rounded(second, of_second), there)


@triton.jit
def _exact(bits):  # type: ignore[no-untyped-def]
    return (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(value, noise):  # type: ignore[no-untyped-def]
    is_number = value == value  # noise would make -0 of NaN
    bits = value.to(tl.uint32, bitcast=True) + tl.where(is_number, noise.to(tl.uint32) & 0xFFFF, 0)
    return (bits >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
