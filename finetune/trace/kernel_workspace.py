"""Memory that CUDA's kernels take for themselves while they run, where it is too large to be left out.

On a CPU other kernels stand in for them: their results and what they save for the backward pass are the same, not what
they take inside. Sources: ``mha_bwd`` and ``mha_varlen_bwd`` in PyTorch's
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (FlashAttention 2; nondeterministic), ``_safe_softmax``
in its transformers/attention.cpp and ``isinf`` in TensorCompare.cpp, and bitsandbytes 0.50, backends/cuda/ops.py. Not
counted: workspaces of cuBLAS, which are kept for the whole run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

BLOCK_ROWS = 128
"""Query rows to which FlashAttention rounds up what it accumulates."""
FUSED_4BIT_ROWS = 512
"""Up to so many rows bitsandbytes may multiply by 4-bit weights without dequantising them first (on sm90: 512 at
most); above them it always does where an H100 or H200 computes."""


@dataclass(frozen=True)
class Workspace:
    """Bytes that a kernel takes beside its arguments and results."""

    bytes: int
    padding: int = 0
    """More, for rows that are rounded up."""
    documents: int = 0
    """Of packed rows, each of which is padded."""

    @property
    def total(self) -> int:
        return self.bytes + self.padding


NOTHING = Workspace(0)


def inside(operation: str, args: Sequence[Any], returned: Any) -> Workspace:
    """What the kernel of an operation takes.

    Args:
        operation: its name in PyTorch, with the namespace.
        args: its arguments; tensors may be fake.
        returned: its results.
    """
    if operation == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        query, key = args[1], args[2]
        rows, heads, positions, _ = query.shape
        padding = rows * (_up(positions, BLOCK_ROWS) - positions)
        return _attention_backward(query, key, heads, key.shape[1], rows * positions, padding)
    if operation == "torch_attn::_varlen_attn_backward":
        query, key, bounds = args[1], args[2], args[6]
        tokens, heads, _ = query.shape
        documents = bounds.shape[0] - 1
        return _attention_backward(query, key, heads, key.shape[1], tokens, BLOCK_ROWS * documents, documents)
    if operation == "bitsandbytes::gemm_4bit":
        inputs, (rows, columns), block_elements = args[0], args[2], args[4]
        if inputs.numel() // inputs.shape[-1] <= FUSED_4BIT_ROWS:
            return NOTHING
        # the weights in 16 bits, and their scales in fp32, before and after the offset of double quantisation
        return Workspace(int(rows * columns * inputs.element_size() + 2 * 4 * rows * columns // block_elements))
    if operation == "bitsandbytes::int8_scaled_mm":
        return Workspace(int(4 * returned.numel()))  # products in int32
    if operation == "aten::isinf":
        return Workspace(args[0].numel() * args[0].element_size())  # absolute values, to compare
    if operation == "aten::_safe_softmax":
        return Workspace(
            returned.numel() * (returned.element_size() + 1)
        )  # an unsafe one, and a mask of what is masked
    return NOTHING


def _attention_backward(
    query: torch.Tensor, key: torch.Tensor, heads: int, key_heads: int, rows: int, padding: int, documents: int = 0
) -> Workspace:
    """``dq_accum`` and ``softmax_d`` in fp32; of grouped keys and values, gradients for every query head."""
    width = query.shape[-1]
    of_row = 4 * heads * (_up(width, 32 if width <= 128 else 64) + 1)
    expanded = 2 * key.numel() // key_heads * heads * key.element_size() if key_heads != heads else 0
    return Workspace(rows * of_row + expanded, padding * of_row, documents)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
