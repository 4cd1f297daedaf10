"""Memory that CUDA's kernels take for themselves while they run, where it is too large to be left out.

On a CPU other kernels stand in for them: their results and what they save for the backward pass are the same, not what
they take inside. Sources: ``mha_bwd`` and ``mha_varlen_bwd`` in PyTorch's
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (FlashAttention 2; nondeterministic), ``_safe_softmax``
in its transformers/attention.cpp and ``isinf`` in TensorCompare.cpp, and bitsandbytes 0.50, backends/cuda/ops.py. Not
counted: workspaces of cuBLAS, which are kept for the whole run, and that FlashAttention rounds the tokens of a document
up to 128 in what it accumulates.
"""

from collections.abc import Sequence
from typing import Any

import torch

ATTENTION_BACKWARD = ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "torch_attn::_varlen_attn_backward")
FUSED_4BIT_ROWS = 512
"""Up to so many rows bitsandbytes may multiply by 4-bit weights without dequantising them first (on sm90: 512 at
most); above them it always does where an H100 or H200 computes."""


def inside(operation: str, args: Sequence[Any], returned: Any) -> int:
    """Bytes that the kernel of an operation takes beside its arguments and results.

    Args:
        operation: its name in PyTorch, with the namespace.
        args: its arguments; tensors may be fake.
        returned: its results.
    """
    if operation in ATTENTION_BACKWARD:
        return _attention_backward(args[1], args[2])
    if operation == "bitsandbytes::gemm_4bit":
        inputs, (rows, columns), block_elements = args[0], args[2], args[4]
        if inputs.numel() // inputs.shape[-1] <= FUSED_4BIT_ROWS:
            return 0
        # the weights in 16 bits, and their scales in fp32, before and after the offset of double quantisation
        return int(rows * columns * inputs.element_size() + 2 * 4 * rows * columns // block_elements)
    if operation == "bitsandbytes::int8_scaled_mm":
        return int(4 * returned.numel())  # products in int32
    if operation == "aten::isinf":
        return int(args[0].numel() * args[0].element_size())  # absolute values, to compare
    if operation == "aten::_safe_softmax":
        return int(returned.numel() * (returned.element_size() + 1))  # an unsafe one, and a mask of what is masked
    return 0


def _attention_backward(query: torch.Tensor, key: torch.Tensor) -> int:
    """``dq_accum`` and ``softmax_d`` in fp32; of grouped keys and values, gradients for every query head.

    Args:
        query, key: of (rows, heads, positions, width), or (positions, heads, width) of rows that lie end to end.
    """
    heads, key_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    multiple = 32 if width <= 128 else 64
    accumulated = 4 * query.numel() // width * (-(-width // multiple) * multiple + 1)
    return accumulated + (2 * key.numel() // key_heads * heads * key.element_size() if key_heads != heads else 0)
