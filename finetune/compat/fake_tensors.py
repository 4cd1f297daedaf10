"""Private names of PyTorch that a trace uses: fake tensors, dispatch modes, a process group that answers by itself.

Apart from ``torch_private`` because ``FakeStore`` registers the backend ``fake``, which a run has no use for. Read in
2.11 to 2.13. The re-exported names go when PyTorch documents them; each change of its code says when it goes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_leaves

Change = tuple[Any, str, Any]
"""A module or class, the name of one of its attributes, and what to put in its place."""

__all__ = [
    "Change",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "answer_replicas",
    "changes",
    "operation_name",
    "reads_a_value",
    "storage_key",
    "tree_leaves",
    "without_modes",
]


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that tells living storages apart, fake ones too. Goes when fake storages have a ``data_ptr``."""
    return int(storage._cdata)


def operation_name(function: Any) -> str:
    """``aten::mm`` of an operator. Goes when ``OpOverload`` has a public name without its overload."""
    return str(function._schema.name)


def reads_a_value(function: Any) -> bool:
    """Whether an operator is the one behind ``Tensor.item``. Goes with a public name of it."""
    return function is torch.ops.aten._local_scalar_dense.default


def changes() -> list[Change]:
    """What PyTorch needs to build, prepare and train a model on fake tensors."""
    import torch.distributed.device_mesh as meshes
    import torch.distributed.tensor._sharding_prop as propagation
    import torch.nn.parallel.distributed as replicas

    mesh = meshes.DeviceMesh
    return [
        (FakeTensor, "data_ptr", _address),
        (FakeTensor, "__deepcopy__", _copy),
        (torch.nn.Module, "_apply", _apply),
        # it would propagate under the mode of its inputs; until a fake DTensor propagates outside of it
        (propagation, "detect_fake_mode", lambda *inputs: None),
        (mesh, "__init__", _meshes_are_real(mesh.__init__)),
        (mesh, "__getitem__", _really(mesh.__getitem__)),
        # DDP compares and broadcasts parameters at its start; until the fake group answers that too
        (replicas, "_verify_param_shape_across_processes", lambda *args: None),
        (replicas, "_sync_module_states", lambda *args, **kwargs: None),
    ]


def _address(tensor: torch.Tensor) -> int:
    """For ``Tensor.data_ptr``: a fake tensor has none, and Accelerate 1.15 matches parameters by it (until it matches
    them by name)."""
    return storage_key(tensor.untyped_storage()) + int(tensor.storage_offset() * tensor.element_size())


def _copy(tensor: Any, memo: dict[int, Any]) -> Any:
    """For ``Tensor.__deepcopy__``, which copies the bytes of a tensor that has an address."""
    if id(tensor) not in memo:
        copied: Any = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def _apply(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """For ``Module._apply``, behind ``Module.to``: PyTorch swaps fake parameters for others, which fails when anything
    refers to them weakly, as every fake tensor's own mode does (until it sets their data, as for real ones)."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for parameter in module._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                applied = function(parameter)
            if applied is not parameter:
                parameter.data = applied
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose tensors have values, whatever mode is active."""

    @functools.wraps(function)
    def real(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return function(*args, **kwargs)

    return real


def _meshes_are_real(initialise: Callable[..., None]) -> Callable[..., None]:
    """For ``DeviceMesh.__init__``, which reads the ranks in its tensors: those of a mesh over all processes, which
    ``init_device_mesh`` makes itself, are the numbers from 0 (until meshes hold no tensors)."""

    @functools.wraps(initialise)
    def initialise_really(mesh: Any, *args: Any, **kwargs: Any) -> None:
        with without_modes():
            if isinstance(kwargs.get("_rank_map"), FakeTensor):
                kwargs["_rank_map"] = torch.arange(kwargs["_rank_map"].numel(), dtype=torch.int)
            initialise(mesh, *args, **kwargs)

    return initialise_really


class _Buckets:
    """A reducer that keeps its first buckets. To lay them out again, in the order in which gradients came, it would
    read their numbers off a tensor; there are as many bytes in them then."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def answer_replicas(model: Any) -> None:
    """Make a replicated model's gradients come back from a process group that answers with nothing.

    The reducer takes the value of the collective's future for the reduced bucket; the fake group's has none (until it
    has one).
    """

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    model.reducer = _Buckets(model.reducer)
