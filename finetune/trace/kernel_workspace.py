"""Memory that CUDA's kernels take for themselves while they run, where it is too large to be left out.

On a CPU other kernels stand in for them: their results and what they save for the backward pass are the same, not what
they take inside. Sources: ``mha_bwd`` and ``mha_varlen_bwd`` in PyTorch's
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (FlashAttention 2; nondeterministic), and bitsandbytes
0.50, backends/cuda/ops.py. Not counted: workspaces of cuBLAS, which are kept for the whole run.
"""

from collections.abc import Sequence
from typing import Any

import torch

BLOCK_ROWS = 128
"""Query rows to which FlashAttention rounds up what it accumulates."""
FUSED_4BIT_ROWS = 512
"""Up to so many rows bitsandbytes may multiply by 4-bit weights without dequantising them first (on sm90: 512 at
most); above them it always does where an H100 or H200 computes."""


def bytes_inside(operation: str, args: Sequence[Any], returned: Any) -> int:
    """Bytes that the kernel of an operation takes beside its arguments and results.

    Args:
        operation: its name in PyTorch, with the namespace.
        args: its arguments; tensors may be fake.
        returned: its results.
    """
    if operation == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        query, key = args[1], args[2]
        rows, heads, positions, _ = query.shape
        return _attention_backward(query, key, heads, key.shape[1], rows * _up(positions, BLOCK_ROWS))
    if operation == "torch_attn::_varlen_attn_backward":
        query, key, bounds = args[1], args[2], args[6]
        tokens, heads, _ = query.shape
        return _attention_backward(query, key, heads, key.shape[1], tokens + BLOCK_ROWS * (bounds.shape[0] - 1))
    if operation == "bitsandbytes::gemm_4bit":
        inputs, (rows, columns), block_elements = args[0], args[2], args[4]
        if inputs.numel() // inputs.shape[-1] <= FUSED_4BIT_ROWS:
            return 0
        # the weights in 16 bits, and their scales in fp32, before and after the offset of double quantisation
        return int(rows * columns * inputs.element_size() + 2 * 4 * rows * columns // block_elements)
    if operation == "bitsandbytes::int8_scaled_mm":
        return int(4 * returned.numel())  # products in int32
    return 0


def _attention_backward(query: torch.Tensor, key: torch.Tensor, heads: int, key_heads: int, padded_rows: int) -> int:
    """``dq_accum`` and ``softmax_d`` in fp32; of grouped keys and values, gradients for every query head."""
    width = query.shape[-1]
    accumulated = 4 * padded_rows * heads * (_up(width, 32 if width <= 128 else 64) + 1)
    expanded = 2 * key.numel() // key_heads * heads * key.element_size() if key_heads != heads else 0
    return accumulated + expanded


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
