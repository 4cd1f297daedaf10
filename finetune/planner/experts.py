"""A mixture of experts on tensors without values: a router, and matrices that are stacked in one parameter.

Read off transformers' ``models/mixtral/modeling_mixtral.py`` and ``integrations/moe.py``
(``grouped_mm_experts_forward``): every token goes to its experts, whatever their balance, so that sizes do not depend
on values. The products know no autocast: they compute in the weights' dtype. An adapter of stacked matrices makes a
whole changed copy of them (PEFT's ``ParamWrapper``), whose parts are estimated: what is read off is the copy.
"""

from collections.abc import Mapping

from finetune.planner.dialects import dialect_of
from finetune.planner.linear import Adapter, Matrix, multiply
from finetune.planner.operations import Operations
from finetune.planner.shape import ModelShape
from finetune.planner.tape import Tensor


def run_experts(ops: Operations, shape: ModelShape, matrices: Mapping[str, Matrix], x: Tensor) -> Tensor:
    """Sum of the chosen experts' results, times what the router gives them."""
    chosen = ops.tokens * shape.experts_per_token
    shares = _route(ops, shape, matrices["gate"], x)
    width, whole = x.width, ops.like(x)
    sorted_by_expert = ops.new(chosen, 8)
    picked = ops.new(chosen * shape.hidden, x.width)
    picked = ops.made(picked, [x], lambda arrived: [whole()], saved=[ops.new(chosen, 8)])
    del x
    back = ops.like(shares)
    shares = ops.made(back(), [shares], lambda arrived: [back()], saved=[sorted_by_expert])
    del sorted_by_expert
    bounds = ops.new(shape.experts, 4)
    output = _multiply_grouped(ops, picked, matrices["gate_up_proj"], chosen, bounds)
    del picked
    gate, up = (ops.view(output, chosen * shape.intermediate) for _ in range(2))
    del output
    product = ops.multiply(ops.activate(gate), up)
    del gate, up
    output = _multiply_grouped(ops, product, matrices["down_proj"], chosen, bounds)
    del product
    output = ops.multiply(output, shares)
    del shares
    again = ops.like(output)
    output = ops.made(again(), [output], lambda arrived: [again()], saved=[ops.new(chosen, 8)])  # in the tokens' order
    summed = ops.new(ops.tokens * shape.hidden, output.width)
    output = ops.made(summed, [output], lambda arrived: arrived)
    del summed
    return ops.cast(output, width)


def _route(ops: Operations, shape: ModelShape, matrix: Matrix, x: Tensor) -> Tensor:
    """The shares of the chosen experts, which add up to 1."""
    logits = multiply(ops, x, _changed(ops, matrix), matrix.outputs)
    shares = ops.soften(logits)
    del logits
    best, every = ops.tokens * shape.experts_per_token, ops.like(shares)
    chosen = ops.made(ops.new(best, 4), [shares], lambda arrived: [every()], saved=[ops.new(best, 8)])
    del shares
    sums, back = ops.new(ops.tokens, 4), ops.like(chosen)
    shares = ops.made(ops.new(best, 4), [chosen], lambda arrived: [back()], saved=[sums, chosen])
    return ops.cast(shares, ops.numerics.compute) if dialect_of(shape.model_type).narrows_shares else shares


def _changed(ops: Operations, matrix: Matrix) -> Tensor:
    """The weight, or a copy that its adapter has changed."""
    if matrix.adapter is None:
        return matrix.weight
    return _with_change(ops, matrix.weight, matrix.adapter)


def _with_change(ops: Operations, weight: Tensor, adapter: Adapter) -> Tensor:
    down, up = ops.cast_operand(adapter.down), ops.cast_operand(adapter.up)
    for_down, for_up = ops.wanted(down), ops.wanted(up)
    laid_out = ops.new(up.elements, up.width)
    changed = ops.new(weight.elements, weight.width)
    return ops.made(changed, [down, up], lambda arrived: [for_down(), for_up()], saved=[down, laid_out])


def _multiply_grouped(ops: Operations, x: Tensor, matrix: Matrix, rows: int, bounds: Tensor) -> Tensor:
    """Each row by the matrix of its expert."""
    weight = _changed(ops, matrix)
    x = ops.cast(x, weight.width)
    for_x, for_weight = ops.wanted(x), ops.wanted(weight)
    saved = [bounds, *([x] if weight.node else []), *([weight] if x.node else [])]
    inputs = [x, weight]
    return ops.made(
        ops.new(rows * matrix.outputs, x.width), inputs, lambda arrived: [for_x(), for_weight()], saved=saved
    )
