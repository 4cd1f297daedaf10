"""What the libraries need so that the step runs on fake tensors, in a process group that answers by itself.

The only module that changes foreign code, each time in a context that restores it. Written against PyTorch 2.11 to
2.13, transformers 5.17 to 5.23 and Accelerate 1.15; each says until when it is needed.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


@contextlib.contextmanager
def _replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    originals = [(owner, name, vars(owner).get(name)) for owner, name, _ in changes]
    for owner, name, new in changes:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def storages_tell_their_size(tell: Callable[[torch.UntypedStorage], None]) -> contextlib.AbstractContextManager[None]:
    """Call ``tell`` after a storage is resized, which no dispatch mode sees: so FSDP2 frees its gathered layers.

    Until PyTorch shows it to modes.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        returned = original(storage, size)
        tell(storage)
        return returned

    return _replaced((torch.UntypedStorage, "resize_", resize_))


class AnyValue(TorchDispatchMode):
    """What the host reads off a fake tensor: a finite norm, and no for an answer, as to whether gradients overflowed.
    Not a patch; a fake tensor has no value to read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else args[0].dtype not in (torch.bool, torch.uint8)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def libraries_take_fakes() -> Iterator[None]:
    """Everything below, while a model is built, prepared and trained on fake tensors."""
    # PEFT and Accelerate import the like of these when they are first used: a constant of theirs would stay fake
    import bitsandbytes.functional as quantisation
    import bitsandbytes.nn.modules as quantised_modules
    import peft  # noqa: F401
    import torch.distributed.device_mesh as meshes
    import torch.distributed.tensor._sharding_prop as propagation
    import torch.nn.parallel.distributed as replicas
    import transformers.masking_utils as masks

    from finetune.models import attention

    mesh = meshes.DeviceMesh
    with _replaced(
        (FakeTensor, "data_ptr", _address),
        (FakeTensor, "__deepcopy__", _copy),
        (torch.nn.Module, "_apply", _apply),
        (propagation, "detect_fake_mode", lambda *inputs: None),
        (mesh, "__init__", _meshes_are_real(mesh.__init__)),
        (mesh, "__getitem__", _really(mesh.__getitem__)),
        (replicas, "_verify_param_shape_across_processes", lambda *args: None),
        (replicas, "_sync_module_states", lambda *args, **kwargs: None),
        (masks, "find_packed_sequence_indices", lambda position_ids: None),
        (masks, "is_tracing", lambda tensor=None: False),
        (attention, "_each_document", _in_one_kernel),
        (quantisation, "name2qmap", {}),  # where it keeps constants that it has made
        (quantised_modules, "fix_4bit_weight_quant_state_from_module", _find_quant_state),
    ):
        yield


@contextlib.contextmanager
def engines_take_fakes() -> Iterator[None]:
    """For DeepSpeed's stage 3, which has all processes compare the order in which they gather: there are no others to
    disagree (until it asks for it in debugging only)."""
    import deepspeed.runtime.zero.partition_parameters as partitions
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    import deepspeed.runtime.zero.stage3 as stage

    name = "assert_ints_same_as_other_ranks"
    with _replaced(*((module, name, lambda numbers: None) for module in (partitions, coordinator, stage))):
        yield


def _address(tensor: torch.Tensor) -> int:
    """For ``Tensor.data_ptr``: a fake tensor has none, and Accelerate matches parameters by it (until it matches
    them by name)."""
    return int(tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size())


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
        with _disable_current_modes():
            return function(*args, **kwargs)

    return real


def _meshes_are_real(initialise: Callable[..., None]) -> Callable[..., None]:
    """For ``DeviceMesh.__init__``, which reads the ranks in its tensors: those of a mesh over all processes, which
    ``init_device_mesh`` makes itself, are the numbers from 0 (until meshes hold no tensors)."""

    @functools.wraps(initialise)
    def initialise_really(mesh: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            if isinstance(kwargs.get("_rank_map"), FakeTensor):
                kwargs["_rank_map"] = torch.arange(kwargs["_rank_map"].numel(), dtype=torch.int)
            initialise(mesh, *args, **kwargs)

    return initialise_really


def _in_one_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: list[int],
    scaling: float | None,
    sliding_window: int | None,
    dropout: float,
) -> torch.Tensor:
    """For our own attention of packed rows, which takes a GPU's way when it sees a GPU: take it here too. What it
    computes with has a fake for every device."""
    from finetune.models.attention import _varlen

    longest = max(end - start for start, end in itertools.pairwise(bounds))
    with _disable_current_modes():
        real_bounds = torch.tensor(bounds, dtype=torch.int32)
    return _varlen(query, key, value, real_bounds, longest, scaling, sliding_window, dropout)


def _find_quant_state(module: Any) -> None:
    """For bitsandbytes: give the weight its quantisation constants back, without making a parameter of its own class
    of it, which loses that the tensor is fake (until its classes are made with ``torch.Tensor.as_subclass``)."""
    if "quant_state" not in vars(module.weight):
        from finetune.trace.building import Params4bit

        module.weight.quant_state = module.quant_state
        module.weight.__class__ = Params4bit


class _Buckets:
    """A reducer that keeps its first buckets. To lay them out anew, in the order in which gradients came, it would
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
