"""The kernels of ``fp8``, in Triton."""

import torch
import triton
import triton.language as tl

TILE = 64
"""Rows and columns that a program of the transposition reads."""
LONGEST = 65536
"""Numbers of a row that a program can hold."""


def rows(x_TK: torch.Tensor, factors_K: torch.Tensor | None, out_TK: torch.Tensor, scales_T1: torch.Tensor) -> None:
    """See ``fp8.rounded_rows``."""
    block = triton.next_power_of_2(x_TK.shape[1])
    with torch.cuda.device_of(x_TK):
        _rows[(x_TK.shape[0],)](
            *(x_TK, x_TK if factors_K is None else factors_K, out_TK, scales_T1, x_TK.shape[1]),
            HAS_FACTORS=factors_K is not None,
            BLOCK=block,
            num_warps=min(16, max(4, block // 1024)),
        )


def transposed(weight_OI: torch.Tensor, scales_O1: torch.Tensor, out_IO: torch.Tensor) -> None:
    """See ``fp8.rounded_transposed``."""
    outputs, inputs = weight_OI.shape
    with torch.cuda.device_of(weight_OI):
        _transposed[(triton.cdiv(outputs, TILE), triton.cdiv(inputs, TILE))](
            weight_OI, scales_O1, out_IO, outputs, inputs, TILE=TILE
        )


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    x_pointer, factors_pointer, out_pointer, scales_pointer, columns, HAS_FACTORS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    there = places < columns
    x = tl.load(x_pointer + row * columns + places, there, 0).to(tl.float32)
    if HAS_FACTORS:
        x *= tl.load(factors_pointer + places, there, 0)
    scale = tl.maximum(tl.max(tl.abs(x)), 1e-12) / 448.0
    tl.store(out_pointer + row * columns + places, (x / scale).to(tl.float8e4nv), there)
    tl.store(scales_pointer + row, scale)


@triton.jit
def _transposed(weight_pointer, scales_pointer, out_pointer, outputs, inputs, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    output = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    there = (output < outputs)[:, None] & (column < inputs)[None, :]
    weight = tl.load(weight_pointer + output[:, None] * inputs + column[None, :], there, 0).to(tl.float32)
    scale = tl.load(scales_pointer + output, output < outputs, 1)
    found = tl.trans((weight / scale[:, None]).to(tl.float8e4nv))
    tl.store(out_pointer + column[:, None] * outputs + output[None, :], found, tl.trans(there))
