"""Clipping where each process has a part of the gradients, as plain tensors or as shards."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from finetune.optim.rounding import local_shard


def clip_parts(
    model: torch.nn.Module,
    max_norm: float,
    shards: int,
    group: Any,
    replicas: Any,
    *,
    counts: Callable[[str], bool],
    device: torch.device,
) -> torch.Tensor:
    """Clip the gradients of all parts by their common norm, which is returned as it was before. Collective.

    Args:
        shards: into which each part is cut.
        group: the processes that have all parts between them, or a shard of each.
        replicas: those in the same place of each such group, which have the same parts, or shards of them.
        counts: the name of a parameter to whether this process's part of it counts: of those that hold the same, one.
    """
    own = {name: _local(each) for name, each in model.named_parameters() if each.grad is not None}
    counted = [each.grad for name, each in own.items() if counts(name) and each.grad is not None]
    square = torch.nn.utils.get_total_norm(counted).to(device, torch.float32) ** 2
    if shards > 1:
        dist.all_reduce(square)
    else:
        dist.all_reduce(square, group=group)
        dist.all_reduce(square, op=dist.ReduceOp.MAX, group=replicas)  # groups may have added up in another order
    norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(own.values(), max_norm, norm)
    return norm


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """What this process holds of a parameter, with its gradient, in the same memory."""
    found = local_shard(parameter.detach())
    found.grad = None if parameter.grad is None else local_shard(parameter.grad)
    return found
