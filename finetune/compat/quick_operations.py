"""More operations on fake tensors that ``QuickFakeTensorMode`` answers without PyTorch's own dispatch.

Apart from it because a run uses names of ``fake_tensors``, and none of these. Read in 2.11 to 2.13; goes with it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from finetune.compat.fake_tensors import CPU, QuickFakeTensorMode

__all__ = ["TracingMode", "tensors_in"]


def _operators(namespace: str, *names: str) -> frozenset[Any]:
    """Operators by their names and overloads, of those that this version of PyTorch has."""
    packets = getattr(torch.ops, namespace)
    found = (name.split(".") for name in names)
    return frozenset(getattr(getattr(packets, name), overload) for name, overload in found if hasattr(packets, name))


WRITES = _operators(
    "aten",
    "add_.Scalar",
    "add_.Tensor",
    "addcdiv_.default",
    "addcmul_.default",
    "copy_.default",
    "div_.Scalar",
    "div_.Tensor",
    "fill_.Scalar",
    "lerp_.Scalar",
    "masked_fill_.Scalar",
    "mul_.Scalar",
    "mul_.Tensor",
    "normal_.default",
    "sub_.Tensor",
    "uniform_.default",
    "zero_.default",
)
"""Operations that write to their first argument, and return it as it is."""
FACTORIES = _operators("aten", "empty.memory_format", "empty_strided.default", "full.default", "zeros.default")
"""Operations that make a tensor of no other one."""
JOINS = _operators("aten", "cat.default", "stack.default")
"""Operations that make one tensor of a list of them."""
VIEWS = _operators("aten", "as_strided.default", "squeeze.dim", "view.dtype")
SEVERAL_VIEWS = _operators("aten", "split.Tensor", "split_with_sizes.default", "unbind.int")
"""Operations that give views of their first argument."""
COLLECTIVES = _operators("c10d", "_allgather_base_.default", "_reduce_scatter_base_.default", "broadcast_.default")
"""Operations that write to their first argument, or to a list of them, and return it with what is waited for."""
WITH_META_KERNELS = VIEWS | SEVERAL_VIEWS | COLLECTIVES
ANNOTATIONS = _operators("profiler", "_record_function_enter_new.default", "_record_function_exit._RecordFunction")
"""Operations on no tensors."""


class TracingMode(QuickFakeTensorMode):
    """Fake tensors of a trace. Whether shapes fit one another is looked at where tensors are made, and not where they
    are written to: real tensors of the same step tell that in the tests of the step."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTORIES and (kwargs or {}).get("dtype") is None:  # which is remembered with all else
            kwargs = (kwargs or {}) | {"dtype": _dtype_of(func, args)}
        elif func in ANNOTATIONS:
            return func(*args, **(kwargs or {}))
        elif func in WRITES and _is_plain(args[0]):
            return args[0]
        elif func in WITH_META_KERNELS and _is_plain(args[0]):
            with in_kernel_invocation_manager(self):
                returned = func(*args, **(kwargs or {}))
            if func in COLLECTIVES:
                return args[0], *returned[1:]
            several = func in SEVERAL_VIEWS
            return [FakeTensor(self, each, CPU) for each in returned] if several else FakeTensor(self, returned, CPU)
        return super().dispatch(func, types, args, kwargs)

    def _key(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in JOINS:
            args = (*args[0], *args[1:])
        return super()._key(func, args, kwargs)


def _is_plain(first: Any) -> bool:
    """Whether an argument is a fake tensor of which nothing but its shape is known, or a list of them."""
    if isinstance(first, list):
        return all(map(_is_plain, first))
    return type(first) is FakeTensor and first.fake_device == CPU and first.constant is None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Of arguments or results of an operation, which are lists, tuples and dictionaries at most. PyTorch's own
    ``tree_leaves`` also looks for kinds that were registered, in each argument of each operation of a trace."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def _dtype_of(factory: Any, args: Any) -> torch.dtype:
    """What a factory makes that was not told a dtype."""
    if factory is torch.ops.aten.full.default and isinstance(args[1], int):
        return torch.bool if isinstance(args[1], bool) else torch.int64
    return torch.get_default_dtype()


TracingMode.makes_new.update(dict.fromkeys((*FACTORIES, *JOINS), True))
