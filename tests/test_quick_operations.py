"""What a trace answers without PyTorch's own dispatch is what PyTorch answers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.compat import quick_operations
from finetune.compat.quick_operations import TracingMode, tensors_in
from finetune.compat.torch_private import storage_key

aten = torch.ops.aten
DEVICE = torch.device("cpu")
FLOATS = {"dtype": torch.float32, "device": DEVICE}


def given() -> torch.Tensor:
    return torch.ones(4, 6)


OPERATIONS: dict[Any, Callable[[], Any]] = {
    aten.empty.memory_format: lambda: aten.empty.memory_format([3, 5], device=DEVICE),
    aten.empty_strided.default: lambda: aten.empty_strided.default([3, 5], [1, 3], **FLOATS),
    aten.full.default: lambda: [aten.full.default([2], value, device=DEVICE) for value in (1, 1.0, True)],
    aten.zeros.default: lambda: aten.zeros.default([3, 5], device=DEVICE),
    aten.cat.default: lambda: [aten.cat.default([given(), given()], dim) for dim in (0, 1, -1)],
    aten.stack.default: lambda: aten.stack.default([given(), given()], 1),
    aten.as_strided.default: lambda: aten.as_strided.default(given(), [2, 3], [6, 1], 6),
    aten.squeeze.dim: lambda: aten.squeeze.dim(given()[:1], 0),
    aten.view.dtype: lambda: aten.view.dtype(given(), torch.uint8),
    aten.split.Tensor: lambda: aten.split.Tensor(given(), 3),
    aten.split_with_sizes.default: lambda: aten.split_with_sizes.default(given(), [1, 3]),
    aten.unbind.int: lambda: aten.unbind.int(given(), 1),
    aten.add_.Scalar: lambda: aten.add_.Scalar(given(), 1),
    aten.add_.Tensor: lambda: aten.add_.Tensor(given(), given()),
    aten.addcdiv_.default: lambda: aten.addcdiv_.default(given(), given(), given()),
    aten.addcmul_.default: lambda: aten.addcmul_.default(given(), given(), given()),
    aten.copy_.default: lambda: aten.copy_.default(given(), given().bfloat16()),
    aten.div_.Scalar: lambda: aten.div_.Scalar(given(), 2),
    aten.div_.Tensor: lambda: aten.div_.Tensor(given(), given()),
    aten.fill_.Scalar: lambda: aten.fill_.Scalar(given(), 2),
    aten.lerp_.Scalar: lambda: aten.lerp_.Scalar(given(), given(), 0.5),
    aten.masked_fill_.Scalar: lambda: aten.masked_fill_.Scalar(given(), given() > 0, 2),
    aten.mul_.Scalar: lambda: aten.mul_.Scalar(given(), 2),
    aten.mul_.Tensor: lambda: aten.mul_.Tensor(given(), given()),
    aten.normal_.default: lambda: aten.normal_.default(given()),
    aten.sub_.Tensor: lambda: aten.sub_.Tensor(given(), given()),
    aten.uniform_.default: lambda: aten.uniform_.default(given()),
    aten.zero_.default: lambda: aten.zero_.default(given()),
}


def laid_out(mode: FakeTensorMode, operation: Callable[[], Any], dtype: torch.dtype) -> list[Any]:
    """Shapes, strides, places, dtypes and storages of what an operation returns, without their names."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mode:
            returned = list(tensors_in(operation()))
    finally:
        torch.set_default_dtype(default)
    storages = [storage_key(each.untyped_storage()) for each in returned]
    return [
        (type(each), each.shape, each.stride(), each.storage_offset(), each.dtype, each.device, storages.index(storage))
        for each, storage in zip(returned, storages, strict=True)
    ]


def test_every_quick_operation_is_compared():
    named = [getattr(quick_operations, name) for name in ("WRITES", "FACTORIES", "JOINS", "VIEWS", "SEVERAL_VIEWS")]
    assert frozenset().union(*named) == OPERATIONS.keys()


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_quick_operation_returns_what_pytorch_returns(operation: Any):
    mode = TracingMode(allow_non_fake_inputs=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):  # the last is known from the first
        expected = laid_out(FakeTensorMode(allow_non_fake_inputs=True), OPERATIONS[operation], dtype)
        assert laid_out(mode, OPERATIONS[operation], dtype) == expected
        assert expected


@pytest.mark.parametrize("operation", sorted(quick_operations.WRITES, key=str), ids=str)
def test_operation_that_writes_returns_its_first_argument(operation: Any):
    alias = operation._schema.arguments[0].alias_info
    assert alias is not None
    assert alias.is_write
    assert [each.alias_info.before_set for each in operation._schema.returns] == [alias.before_set]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PyTorch 2.11 has no other names
def test_collectives_fill_what_they_are_given():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with TracingMode(allow_non_fake_inputs=True):
            whole, part = torch.zeros(8), torch.zeros(4)
            before = [storage_key(each.untyped_storage()) for each in (whole, part)]
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
            dist.broadcast(whole, 0)
            assert dist.broadcast(whole, 0, async_op=True) is not None
            assert [storage_key(each.untyped_storage()) for each in (whole, part)] == before
            assert (whole.shape, part.shape) == ((8,), (4,))
    finally:
        dist.destroy_process_group()


def test_tensors_are_found_in_lists_and_dictionaries():
    first, second, third = (torch.zeros(size) for size in (1, 2, 3))
    assert [each.numel() for each in tensors_in(([first, 7, (second,)], {"out": third, "dtype": None}))] == [1, 2, 3]
