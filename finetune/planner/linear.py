"""Linear layers on tensors without values: in 16 or 32 bits or quantised, with PEFT's adapters."""

from dataclasses import dataclass

from finetune.planner.operations import Operations
from finetune.planner.tape import Parameter, Storage, Tensor


@dataclass(frozen=True)
class Adapter:
    """LoRA's two matrices, and DoRA's magnitudes."""

    down: Parameter
    """From inputs to rank."""
    up: Parameter
    """From rank to outputs."""
    magnitude: Parameter | None = None


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear layer, or of all experts' together."""

    inputs: int
    outputs: int
    weight: Parameter
    bits: int | None = None
    """4 or 8 where it is quantised."""
    bias: Parameter | None = None
    adapter: Adapter | None = None


def linear(ops: Operations, x: Tensor, matrix: Matrix, dropout: float = 0.0) -> Tensor:
    """A linear layer, with its adapter: ``W x + s B A x`` (LoRA, arXiv:2106.09685)."""
    if matrix.bits:
        result = _multiply_quantised(ops, x, matrix)
    else:
        result = multiply(ops, x, matrix.weight, matrix.outputs, matrix.bias)
    if matrix.adapter is None:
        return result
    if matrix.adapter.magnitude is not None:
        return _add_dora(ops, x, result, matrix, matrix.adapter, matrix.adapter.magnitude, dropout)
    if matrix.bits == 4:
        result = ops.clone(result)
    down, up = matrix.adapter.down, matrix.adapter.up
    dropped = ops.dropout(x) if dropout else x
    thin = multiply(ops, dropped, down, down.elements // matrix.inputs)
    del dropped
    output = multiply(ops, thin, up, matrix.outputs)
    del thin
    output = ops.scale(output)
    return ops.add(result, output)


def multiply(ops: Operations, x: Tensor, weight: Tensor, outputs: int, bias: Parameter | None = None) -> Tensor:
    """``x W^T + b``."""
    x, w = ops.cast_operand(x), ops.cast_operand(weight)
    for_x, for_w = ops.wanted(x), ops.wanted(w)
    saved = ([x] if w.node else []) + ([w] if x.node else [])
    size, width = x.elements * outputs // weight.elements * outputs, x.width
    if bias is None:
        return ops.made(lambda: ops.new(size, width), [x, w], lambda arrived: [for_x(), for_w()], saved=saved)
    b = ops.cast_operand(bias)
    for_b = ops.wanted(b)
    return ops.made(lambda: ops.new(size, width), [x, w, b], lambda arrived: [for_x(), for_w(), for_b()], saved=saved)


def _multiply_quantised(ops: Operations, x: Tensor, matrix: Matrix) -> Tensor:
    """By frozen weights of bitsandbytes, brought to 16 bits for as long as it takes.

    LLM.int8's function refers to its input until the whole graph goes, checkpointed or not.
    """
    x = ops.cast(x, ops.numerics.compute)
    for_x, memory, width = ops.like(x), ops.memory, ops.numerics.compute
    weights, elements, bits = matrix.inputs * matrix.outputs, x.elements, matrix.bits

    def backward(arrived: list[Tensor]) -> list[Tensor | None]:
        held = _dequantise(ops, matrix)
        gradient = for_x()
        held.clear()
        return [gradient]

    if bits == 8 and ops.numerics.on_gpu:  # the input in fp16 and in int8, and the int32 product
        held = [Storage(memory, size, "workspace") for size in (2 * elements, elements)]
        held.append(Storage(memory, 4 * ops.tokens * matrix.outputs, "workspace"))
    elif bits == 8:
        held = [Storage(memory, width * weights, "workspace")]
    elif ops.numerics.on_gpu:  # weights in 16 bits; their scales, before and after the offset of double quantisation
        held = [Storage(memory, width * weights + 2 * 4 * weights / 64, "workspace")]
    else:
        held = _dequantise(ops, matrix)
    output = ops.new(ops.tokens * matrix.outputs, width)
    held.clear()
    return ops.made(output, [x], backward, pinned=[x] if bits == 8 else [])


def _dequantise(ops: Operations, matrix: Matrix) -> list[Storage]:
    """The weights in 16 bits; of 4-bit ones also their scales in fp32."""
    weights, width = matrix.inputs * matrix.outputs, ops.numerics.compute
    scales = [Storage(ops.memory, 4 * weights / 64, "workspace")] if matrix.bits == 4 else []
    return [*scales, Storage(ops.memory, width * weights, "workspace")]


def _add_dora(
    ops: Operations, x: Tensor, result: Tensor, matrix: Matrix, adapter: Adapter, magnitude: Parameter, dropout: float
) -> Tensor:
    """``W x + (m / |W + s B A| - 1) W x + (m / |W + s B A|) s B A x`` (DoRA, arXiv:2402.09353), as PEFT computes it.

    The change of the weight is multiplied out, by way of the unit matrix. Dropout makes ``W x`` be computed again.
    """
    narrow, base = result.width, result
    if dropout:
        x = ops.dropout(x)
    product = _multiplied_out(ops, matrix, adapter)
    weight = _whole_weight(ops, matrix)
    norm = _norm_of(ops, product, matrix)
    for_magnitude = ops.like(magnitude)
    scales = ops.new(magnitude.elements, max(magnitude.width, norm.width))
    scales = ops.made(scales, [magnitude], lambda arrived: [for_magnitude()], saved=[norm])
    del norm
    thin = multiply(ops, x, adapter.down, adapter.down.elements // matrix.inputs)
    change = multiply(ops, thin, adapter.up, matrix.outputs)
    del thin
    if dropout:
        base = multiply(ops, x, weight, matrix.outputs)
    less_one = ops.made(ops.new(scales.elements, scales.width), [scales], lambda arrived: arrived)
    first = ops.multiply(base, less_one)
    del less_one
    second = ops.multiply(change, scales)
    second = ops.scale(second)
    added = ops.add(first, second)
    del first, second, change, product, weight, base, scales
    result = ops.add(result, added)
    del added
    # for quantised layers PEFT asks CUDA whether autocast is on, and relies on it
    stays_wide = matrix.bits is not None and ops.numerics.autocast and ops.numerics.on_gpu
    return result if stays_wide else ops.cast(result, narrow)


def _multiplied_out(ops: Operations, matrix: Matrix, adapter: Adapter) -> Tensor:
    unit = ops.new(matrix.inputs**2, adapter.down.width)
    thin = multiply(ops, unit, adapter.down, adapter.down.elements // matrix.inputs)
    product = multiply(ops, thin, adapter.up, matrix.outputs)
    del thin, unit
    return ops.cast(product, ops.numerics.compute)


def _whole_weight(ops: Operations, matrix: Matrix) -> Tensor:
    """As a tensor of its own where it is quantised."""
    if matrix.bits is None:
        return matrix.weight
    weights = matrix.inputs * matrix.outputs
    if matrix.bits == 8:  # in fp32, before and after its constant
        whole = ops.new(weights, 4)
        whole = ops.new(weights, 4)
        return ops.cast(whole, ops.numerics.compute)
    held = _dequantise(ops, matrix)
    return Tensor(held.pop(), weights, ops.numerics.compute)


def _norm_of(ops: Operations, product: Tensor, matrix: Matrix) -> Tensor:
    """Of each row of weight and change together, taken in fp32 under autocast."""
    scaled = ops.new(product.elements, product.width)
    changed = ops.new(product.elements, product.width)
    del scaled
    whole = ops.new(product.elements, 4) if ops.numerics.autocast else changed
    norm = ops.new(matrix.outputs, whole.width)
    del whole
    norm = ops.cast(norm, changed.width)
    del changed
    return norm
