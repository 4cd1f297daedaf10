"""Private names of PyTorch that training uses. Read in 2.11 to 2.13."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GROWTH_TRACKER = "_growth_tracker"
"""Key of the good steps since the scale changed, in ``GradScaler.state_dict``. Goes with a public getter and setter."""

SHARD = "_sharded_param_data"
"""Name of the attribute of FSDP2's parameters from which they are gathered."""

tree_leaves = _pytree.tree_leaves
"""What containers hold, in the order in which they hold it. Goes with a public name."""

without_modes = _disable_current_modes
"""Within it tensors are real, whatever mode is active. Goes with a public name."""

# one tensor of each process, end to end, and its reverse: by the names of 2.13; go when it is required
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class DispatchMode(TorchDispatchMode):
    """Sees each operation below autograd. Nobody compiles under it: each is spared a wrapper that keeps Dynamo away."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def when_backward_ends(call: Callable[[], None]) -> None:
    """Have something called at the end of the backward pass within which this is called. FSDP2 does so, too. Goes with
    a public name of it."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def current_backward() -> int:
    """A number that tells backward passes apart, of the one within which this is called. Goes with a public name."""
    return int(torch._C._current_graph_task_id())


def scaled_product(
    a_TK: torch.Tensor, b_OK: torch.Tensor, scales_T1: torch.Tensor, scales_O1: torch.Tensor
) -> torch.Tensor:
    """``(a * scales) (b * scales)^T`` of numbers in fp8, (T, O) in bf16. Goes with a public name of it in 2.11."""
    return torch._scaled_mm(a_TK, b_OK.t(), scales_T1, scales_O1.t(), out_dtype=torch.bfloat16, use_fast_accum=True)


def first_in_backward(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose gradient is passed on as soon as it is there. Autograd takes what was computed last first, and
    would leave that of a tensor which was made early to the end. Goes with a public setter."""
    if tensor.grad_fn is not None:
        tensor.grad_fn._set_sequence_nr(2**62)  # type: ignore[attr-defined]
    return tensor


def cpu_computes_bf16() -> bool:
    """Whether this CPU multiplies in bf16. Goes when ``torch.cpu`` answers it without an underscore."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that tells living storages apart, fake ones too. Goes when fake storages have a ``data_ptr``."""
    return int(storage._cdata)


def offload_policies(model: torch.nn.Module) -> list[Any]:
    """The offload policy of each FSDP2 group of parameters. Goes when ``FSDPModule`` has a getter for it."""
    return [group.offload_policy for group in param_groups(model)]


def param_groups(model: torch.nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that are gathered together; several modules may share one."""
    groups: list[Any] = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    return [group for group in dict.fromkeys(groups) if group is not None]


def sharded_parameters(model: torch.nn.Module) -> list[Any]:
    """FSDP2's records of its parameters, each of which gathers its parameter from ``SHARD``; none under others.

    Goes when FSDP2 can gather from other tensors. Before its first forward pass it may lay shards out anew: it does so
    here, once.
    """
    groups = param_groups(model)
    for group in groups:
        group.lazy_init()
    return [each for group in groups for each in group.fsdp_params]


def free_gathered(model: torch.nn.Module) -> None:
    """Free all that FSDP2 has gathered. Goes when ``reshard`` does so after a forward pass that ended in an error."""
    for group in param_groups(model):
        group._to_sharded()


def store_of_launch() -> Any:
    """The key-value store over which the processes of this launch met. Goes with a public getter."""
    return dist.distributed_c10d._get_default_store()
