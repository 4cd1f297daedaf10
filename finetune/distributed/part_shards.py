"""Shards of parts: the processes that would hold the same part of a model hold its shards, as under fsdp2_tp.

PyTorch's ``fully_shard`` gathers a layer's part for as long as it is computed with, and adds up the gradients of these
processes into their shards. What the processes of one tensor group or pipeline do with one another stays as it is.
Accelerate's own preparation knows one mesh of all processes alone, and takes no part in this.

Example: of four processes in tensor groups of two, ranks 0 and 2 have the same part of a weight of shape (8, 6), rows 0
to 3. Rank 0 holds rows 0 and 1, rank 2 rows 2 and 3.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from finetune.models.recomputation import layers_of

Settle = Callable[[Mapping[str, torch.nn.Parameter]], None]


def shard_part(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    holders: Any,
    settle: Settle,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Leave of this process's part of a model its shard, also to the optimizer. Collective.

    Layer by layer: no more than one layer's part is on the device beside the shards.

    Args:
        holders: the group of the processes that have the same part.
        settle: leaves the part of some parameters, by their names, on the device.
        dtype: in which the model computes.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    stepped = [[names[each] for each in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []  # which would keep the memory of whole parts
    del names
    elsewhere = {parameter for parameter in model.parameters() if parameter.is_meta}  # of other stages
    ends = _ends(model)
    units = [*layers_of(model), *ends, model]
    mesh = DeviceMesh.from_group(holders, device.type)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (each for each in units if each is model or elsewhere.isdisjoint(each.parameters())):
        settle(_not_sharded(model, module))
        keeps = module in ends[1:] or module is model  # what the backward pass begins with
        known: dict[str, Any] = {"ignored_params": elsewhere, "reshard_after_forward": not keeps}
        unit = fully_shard(module, mesh=mesh, mp_policy=policy, **known)
        unit.set_gradient_divide_factor(1.0)  # sums: the loss was divided by the tokens of all processes
        unit.set_force_sum_reduction_for_comms(True)
    shards = dict(model.named_parameters())
    for group, own in zip(optimizer.param_groups, stepped, strict=True):
        group["params"] = [shards[name] for name in own]


def _ends(model: Any) -> list[torch.nn.Module]:
    """Embedding and head, where each has weights of its own: each is then gathered for its own use alone."""
    ends = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None]
    every = [parameter for each in ends for parameter in each.parameters()]
    return ends if len({*every}) == len(every) else []


def _not_sharded(model: torch.nn.Module, module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of a module that are no shards yet, by their names in the model."""
    own = {each for each in module.parameters() if not isinstance(each, DTensor)}
    return {name: each for name, each in model.named_parameters() if each in own}


def share_of(elements: int, shape: torch.Size, shards: int) -> int:
    """Of the elements of a tensor that is cut by its rows, the most that a process has."""
    rows = shape[:1].numel()
    return elements // rows * -(-rows // shards)


def whole_part(parameter: torch.Tensor) -> torch.Tensor:
    """All of the part that a parameter is a shard of. Collective over the processes that have the same part."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
