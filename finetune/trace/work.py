"""What the operations of a step compute and move in memory: FLOPs, bytes, and calls, kind by kind.

Matrix products take 2 FLOPs for each multiplication. Attention is counted over all pairs of positions, half of them
where it is causal; what it is with short documents is the planner's to say, by ``attended``. A kernel reads its inputs
once and writes its outputs once: caches between kernels are not counted on, since tensors of a training step are
larger. A view moves nothing.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from finetune.compat.fake_tensors import is_view, process_group_size, written_arguments
from finetune.compat.quick_operations import tensors_in
from finetune.trace.powers import CONSTANT, MicroBatch, Power, added, multiplied
from finetune.trace.shallow import FP8_PRODUCT, HOST_COPY, Kernel, Sent

FLASH_BACKWARD = 2.5
"""FLOPs of flash attention's backward pass for each forward: five matrix products to two, the scores being computed
again (arXiv:2205.14135)."""
FREE = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach", "aten::set_", "aten::resize_")
"""Beginnings of the names of operations that neither read nor write, beside views."""
TRANSFERS = ("c10d::", "_c10d_functional::", HOST_COPY)
Shapes = tuple[tuple[tuple[int, ...], int, bool], ...]
"""Of tensors: their dimensions, bytes of an element, and whether an element is a floating-point number."""


class Calls:
    """Counts operations by their names and shapes, which is all that a dispatch mode has time for."""

    def __init__(self) -> None:
        self.counted: Counter[tuple[str, Power, str, Shapes, Shapes, tuple[Any, ...]]] = Counter()
        self._known: dict[Any, tuple[bool, list[int]]] = {}

    def add(
        self, phase: str, times: Power, name: str, function: Any, args: Sequence[Any], kwargs: Any, returned: Any
    ) -> None:
        """Count one operation, which is done so many times."""
        if function not in self._known:
            self._known[function] = name.startswith(FREE) or is_view(function), written_arguments(function)
        is_free, written = self._known[function]
        if not is_free:
            outputs = _shapes(returned) or _shapes([args[place] for place in written if place < len(args)])
            self.counted[phase, times, name, _shapes((args, kwargs)), outputs, _told(name, args)] += 1

    def kernels(self, traced: MicroBatch) -> tuple[Kernel, ...]:
        """What was computed and moved on this process."""
        found = []
        for (phase, times, name, inputs, outputs, told), calls in self.counted.items():
            if name.startswith(TRANSFERS):
                continue
            kind, flops = _flops(name, inputs, outputs, told)
            power, coefficient = traced.factored(round(2 * flops))
            computed: dict[Power, float] = {power: coefficient / 2} if flops else {}
            moved = added(_bytes_of(each, traced, phase) for each in (*inputs, *outputs))
            width = inputs[0][1] if inputs else outputs[0][1] if outputs else 0
            found.append(
                Kernel(phase, kind, name, width, multiplied(computed, times), multiplied(moved, times), float(calls))
            )
        return tuple(found)

    def sent(self, traced: MicroBatch) -> tuple[Sent, ...]:
        """What was sent to other processes: weights and gradients, whatever the micro-batch; and what positions of a
        row need of one another. And what went to host memory and came back."""
        found = []
        for (phase, _, name, inputs, outputs, told), calls in self.counted.items():
            if name.startswith(TRANSFERS):
                largest = max((*inputs, *outputs), key=_bytes, default=((0,), 1, True))
                found.append(Sent(phase, name, told[0], _bytes_of(largest, traced, phase), float(calls)))
        return tuple(found)


def _shapes(values: Any) -> Shapes:
    return tuple((tuple(each.shape), each.element_size(), each.dtype.is_floating_point) for each in tensors_in(values))


def _bytes(tensor: tuple[tuple[int, ...], int, bool]) -> int:
    return math.prod(tensor[0]) * tensor[1]


def _bytes_of(tensor: tuple[tuple[int, ...], int, bool], traced: MicroBatch, phase: str) -> dict[Power, float]:
    if phase == "step":  # which knows no micro-batch
        return {CONSTANT: float(_bytes(tensor))}
    power, coefficient = traced.growth(tensor[0], _bytes(tensor))
    return {power: float(coefficient)}


def _told(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """What an operation does that its shapes do not tell."""
    if name.startswith("aten::_scaled_dot_product"):
        return (any(each is True for each in args),)  # is_causal is its only flag that is ever set in training
    if name.startswith(TRANSFERS):
        return (process_group_size(args),)
    if name.startswith("torch_attn::"):
        return (max(each for each in args if type(each) is int),)  # tokens of the longest document
    return ()


def _product(inputs: Shapes, outputs: Shapes, told: tuple[Any, ...]) -> float:
    """Every element of the left operand meets as many as the result has columns: also in groups, and of fewer bits."""
    return 2.0 * math.prod(inputs[0][0]) * outputs[0][0][-1]


def _added_product(inputs: Shapes, outputs: Shapes, told: tuple[Any, ...]) -> float:
    """To what the first operand holds."""
    return _product(inputs[1:], outputs, told)


def _attention(inputs: Shapes, outputs: Shapes, told: tuple[Any, ...]) -> float:
    """Query, key and value of (rows, heads, positions, width)."""
    query, key = inputs[0][0], inputs[1][0]
    return 4.0 * math.prod(query) * key[-2] * (0.5 if told[0] else 1.0)


def _attention_backward(inputs: Shapes, outputs: Shapes, told: tuple[Any, ...]) -> float:
    return FLASH_BACKWARD * _attention(inputs[1:], outputs, told)


def _varlen(inputs: Shapes, outputs: Shapes, told: tuple[Any, ...]) -> float:
    """Query of (positions, heads, width), of documents that are equally long, of which each sees half on average."""
    return 2.0 * math.prod(inputs[0][0]) * told[0]


def _varlen_backward(inputs: Shapes, outputs: Shapes, told: tuple[Any, ...]) -> float:
    return FLASH_BACKWARD * _varlen(inputs[1:], outputs, told)


_FLOPS: dict[str, tuple[str, Callable[[Shapes, Shapes, tuple[Any, ...]], float]]] = {
    "aten::mm": ("product", _product),
    "aten::addmm": ("product", _added_product),
    "aten::addmm_": ("product", _added_product),
    "aten::bmm": ("product", _product),
    "aten::baddbmm": ("product", _added_product),
    "aten::_grouped_mm": ("product", _product),
    FP8_PRODUCT: ("product", _product),
    "bitsandbytes::gemm_4bit": ("product", _product),
    "bitsandbytes::int8_scaled_mm": ("product", _product),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("attention", _attention),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": ("attention", _attention_backward),
    "torch_attn::_varlen_attn": ("attention", _varlen),
    "torch_attn::_varlen_attn_backward": ("attention", _varlen_backward),
}


def _flops(name: str, inputs: Shapes, outputs: Shapes, told: tuple[Any, ...]) -> tuple[str, float]:
    """Kind and FLOPs of an operation."""
    if name not in _FLOPS:
        return "moved", 0.0
    kind, formula = _FLOPS[name]
    return kind, formula(inputs, outputs, told)
