"""Attention on tensors without values: in one kernel, or written out where no kernel can do it."""

from finetune.planner.operations import Operations
from finetune.planner.shape import ModelShape
from finetune.planner.tape import Storage, Tensor

ROWS = 128
"""Positions to whose multiples flash attention rounds up what it accumulates (see ``trace.kernel_workspace``)."""


def needs_mask(ops: Operations, shape: ModelShape) -> bool:
    """Whether layers that attend within a window are given a mask: the kernel for packed rows knows windows itself, and
    a window that no row exceeds is none."""
    return shape.sliding_window is not None and shape.sliding_window < ops.row_tokens and not ops.packed


def attend(ops: Operations, query: Tensor, key: Tensor, value: Tensor, heads: int, *, masked: bool = False) -> Tensor:
    """Flash attention: keeps operands, output, and a number a head and position (arXiv:2307.08691).

    Args:
        masked: keeps a mask of its own too, and keys and values that are repeated for each query head.
    """
    kept = []
    if masked:
        if key.elements < query.elements:
            key, value = _repeat(ops, key, query.elements), _repeat(ops, value, query.elements)
        kept.append(ops.new(ops.rows * ops.row_tokens**2, ops.numerics.compute))
    query, key, value = ops.cast_operand(query), ops.cast_operand(key), ops.cast_operand(value)
    news, memory = [ops.like(x) for x in (query, key, value)], ops.memory
    workspace = _workspace(ops, query, key, heads) if ops.numerics.on_gpu else []

    def backward(arrived: list[Tensor]) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [new() for new in news]
        held = [Storage(memory, size, "workspace") for size in workspace]
        held.clear()
        return gradients

    output = ops.new(query.elements, query.width)
    scales = ops.new(ops.tokens * heads, 4)
    return ops.made(output, [query, key, value], backward, saved=[query, key, value, output, scales, *kept])


def _workspace(ops: Operations, query: Tensor, key: Tensor, heads: int) -> list[int]:
    """Bytes inside the backward kernel: the query's gradient in fp32 as it is summed, a number for each of its rows;
    where heads share keys, the gradients of keys and values for every query head."""
    head_dim = query.elements // ops.tokens // heads
    step = 32 if head_dim <= 128 else 64
    rows = ops.tokens + ROWS * ops.rows if ops.packed else ops.rows * -(-ops.row_tokens // ROWS) * ROWS
    accumulated = 4 * rows * heads * (-(-head_dim // step) * step + 1)
    return [accumulated, 2 * query.width * query.elements] if key.elements < query.elements else [accumulated]


def attend_eagerly(ops: Operations, query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """``softmax(squash(q k^T) + mask) v``, with keys and values repeated for each query head."""
    elements = query.elements
    if key.elements < elements:
        key, value = _repeat(ops, key, elements), _repeat(ops, value, elements)
    if ops.rows > 1:  # rows and heads of the query do not lie one after the other
        query = ops.clone(ops.cast_operand(query))
    weights = _multiply(ops, query, key, ops.tokens * ops.row_tokens * heads)
    del query, key
    weights = ops.scale(weights)
    weights = ops.squash(weights)
    weights = ops.clone(weights)  # the mask is added
    weights = ops.soften(weights)
    weights = ops.cast(weights, ops.numerics.compute)
    output = _multiply(ops, weights, value, elements)
    del weights, value
    return ops.clone(output)


def _repeat(ops: Operations, x: Tensor, elements: int) -> Tensor:
    """For each query head; its gradient is summed over them."""
    back = ops.like(x)
    return ops.made(ops.new(elements, x.width), [x], lambda arrived: [back()])


def _multiply(ops: Operations, a: Tensor, b: Tensor, elements: int) -> Tensor:
    """Two matrices for each head."""
    a, b = ops.cast_operand(a), ops.cast_operand(b)
    for_a, for_b = ops.wanted(a), ops.wanted(b)
    saved = ([a] if b.node else []) + ([b] if a.node else [])
    return ops.made(ops.new(elements, a.width), [a, b], lambda arrived: [for_a(), for_b()], saved=saved)
