"""Private names of PyTorch that a trace uses: fake tensors, dispatch modes, a process group that answers by itself.

Apart from ``torch_private`` because ``FakeStore`` registers the backend ``fake``, which a run has no use for. Read in
2.11 to 2.13. The re-exported names go when PyTorch documents them; each change of its code says when it goes.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from finetune.compat.torch_private import DispatchMode, storage_key, without_modes

Change = tuple[Any, str, Any]
"""A module or class, the name of one of its attributes, and what to put in its place."""

__all__ = [
    "Change",
    "DispatchMode",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "QuickFakeTensorMode",
    "answer_replicas",
    "asks_for_the_device",
    "changes",
    "forget_process_groups",
    "is_view",
    "operation_name",
    "process_group_size",
    "reads_a_value",
    "tree_leaves",
    "written_arguments",
]


class QuickFakeTensorMode(FakeTensorMode):
    """Fake tensors at half the time: what an operation returned is known by its name and what goes in.

    PyTorch's own cache is for any operation, and looks at everything that could matter to one. Here only new tensors
    are remembered that follow from the shapes of others: no views, nothing that is written to. Goes when PyTorch's
    cache takes less than a tenth of a millisecond.
    """

    known: ClassVar[dict[Any, tuple[bool, list[tuple[Any, ...]]]]] = {}
    """Whether an operation returned several tensors, and their sizes, strides and dtypes, by ``_key``."""
    makes_new: ClassVar[dict[Any, bool]] = {}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VIEWS and type(args[0]) is FakeTensor and args[0].fake_device == CPU and args[0].constant is None:
            with in_kernel_invocation_manager(self):
                view = func(*args, **(kwargs or {}))
            return FakeTensor(self, view, CPU)
        key = self._key(func, args, kwargs)
        if key is None:
            return super().dispatch(func, types, args, kwargs)
        if key in self.known:
            several, made = self.known[key]
            with in_kernel_invocation_manager(self):
                empty = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in made]
            found = [FakeTensor(self, each, CPU) for each in empty]
            return tuple(found) if several else found[0]
        returned = super().dispatch(func, types, args, kwargs)
        every = returned if isinstance(returned, tuple) else (returned,)
        taken = {
            storage_key(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if type(each) is FakeTensor
        }
        if all(
            type(each) is FakeTensor
            and each.fake_device == CPU
            and storage_key(each.untyped_storage()) not in taken  # a view whose schema does not say so
            for each in every
        ):
            made = [(tuple(each.shape), each.stride(), each.dtype) for each in every]
            if all(each.untyped_storage().nbytes() == each.numel() * each.element_size() for each in every):
                self.known[key] = isinstance(returned, tuple), made
        return returned

    def _key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A name for an operation and what goes in; None where more than that could matter."""
        if func not in self.makes_new:
            self.makes_new[func] = _makes_new(func)
        if not self.makes_new[func]:
            return None
        key: list[Any] = [func]
        for each in (*args, *(kwargs or {}).items()):
            if isinstance(each, FakeTensor):
                if each.fake_device != CPU or each.constant is not None:
                    return None
                key.append((each.shape, each.stride(), each.dtype))
            elif isinstance(each, list | tuple):
                if not all(isinstance(one, SIMPLE) for one in each):
                    return None
                key.append(tuple((type(one), one) for one in each))
            elif isinstance(each, SIMPLE):
                key.append((type(each), each))
            else:
                return None
        return tuple(key)


FORGOTTEN: list[Any] = []
"""Process groups of the process that this one is a fork of."""
CPU = torch.device("cpu")
VIEWS = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("_unsafe_view", "default"),
        ("alias", "default"),
        ("detach", "default"),
        ("expand", "default"),
        ("permute", "default"),
        ("select", "int"),
        ("slice", "Tensor"),
        ("t", "default"),
        ("transpose", "int"),
        ("unsqueeze", "default"),
        ("view", "default"),
    )
}
"""Operations that always give one view of their first argument, which their meta kernels do as well."""
SIMPLE = (int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _makes_new(func: Any) -> bool:
    """Whether an operation takes tensors and returns new ones, of a shape that follows from theirs."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.data_dependent_output in func.tags:
        return False
    schema = func._schema
    aliases = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    takes = any(str(each.type) in ("Tensor", "Optional[Tensor]") for each in schema.arguments)
    gives = bool(schema.returns) and all(str(each.type) == "Tensor" for each in schema.returns)
    return takes and gives and not aliases and torch.Tag.dynamic_output_shape not in func.tags


def operation_name(function: Any) -> str:
    """``aten::mm`` of an operator. Goes when ``OpOverload`` has a public name without its overload."""
    return str(function._schema.name)


def is_view(function: Any) -> bool:
    """Whether an operation returns its argument seen differently, and writes nothing. Goes with a public name."""
    returns = [each.alias_info for each in function._schema.returns]
    writes = any(each.alias_info is not None and each.alias_info.is_write for each in function._schema.arguments)
    return bool(returns) and all(each is not None for each in returns) and not writes


def written_arguments(function: Any) -> list[int]:
    """Places of the arguments that an operation writes to: fused ones return nothing. They mark gradients as well, but
    write to them only to undo a scale. Goes with a public name."""
    arguments = enumerate(function._schema.arguments)
    marked = ((place, each) for place, each in arguments if each.alias_info is not None and each.alias_info.is_write)
    return [place for place, each in marked if each.name != "grads"]


def reads_a_value(function: Any) -> bool:
    """Whether an operator is the one behind ``Tensor.item``. Goes with a public name of it."""
    return function is torch.ops.aten._local_scalar_dense.default


def asks_which(function: Any) -> bool:
    """Whether an operator is the one behind ``Tensor.nonzero``, of which a fake tensor does not know how much it
    returns. Goes with a public name of it."""
    return function is torch.ops.aten.nonzero.default


def makes_gradients() -> bool:
    """Whether a backward pass runs. Goes with a public name of it."""
    return torch._C._current_graph_task_id() != -1


def asks_for_the_device(function: Any) -> bool:
    """Whether an operator is the one behind ``Tensor.device`` of a fake tensor, half of all that it is asked. Goes with
    a public name of it."""
    return function is torch.ops.prim.device.default


def process_group_size(args: Any) -> int:
    """Processes of the group among a collective's arguments; 1 if it has none. Goes when it is a ``ProcessGroup``."""
    for each in args:
        if isinstance(each, torch.ScriptObject):
            return int(dist.ProcessGroup.unbox(each).size())
    return 1


def forget_process_groups() -> None:
    """In a fork: have PyTorch know of no process groups. Their connections belong to the process that was forked, and
    ending them here would end them there, so that what knows of them is kept and never used. Goes when a group can be
    left without being told to the others."""
    import torch.distributed.distributed_c10d as groups

    world = groups._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
    FORGOTTEN.append([world.default_pg, *(dict(table) for table in tables)])
    groups._update_default_pg(None)
    for table in (*tables, world.tags_to_pg, world.pg_coalesce_state):
        table.clear()
    groups._unregister_all_process_groups()
    world.group_count = 0


def changes() -> list[Change]:
    """What PyTorch needs to build, prepare and train a model on fake tensors."""
    import torch._meta_registrations as shapes
    import torch.distributed.device_mesh as meshes
    import torch.distributed.tensor._sharding_prop as propagation
    import torch.nn.parallel.distributed as replicas

    mesh = meshes.DeviceMesh
    return [
        (FakeTensor, "data_ptr", _address),
        (FakeTensor, "__deepcopy__", _copy),
        (torch.nn.Module, "_apply", _apply),
        (shapes, "_meta_grouped_mm_common", _grouped_in_any_width(shapes._meta_grouped_mm_common)),
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


def _grouped_in_any_width(grouped: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For the product of groups, as experts compute it, whose shape PyTorch tells in bf16 only; its kernels take fp32
    as well, as under autocast, which does not know it (until the shape is told in fp32)."""

    @functools.wraps(grouped)
    def in_any_width(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if left.dtype != right.dtype or left.dtype != torch.float32:
            return grouped(left, right, *args, **kwargs)
        return grouped(left.bfloat16(), right.bfloat16(), *args, **kwargs).float()

    return in_any_width


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
