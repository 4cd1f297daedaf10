"""Clipping by the norm of all gradients: plain tensors, shards, or each process's part of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from finetune.optim.rounding import local_shard


def clip(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip gradients, whole or all shards of one mesh, by their norm, which is returned as it was before. Collective
    where they are shards."""
    clipped = [each for each in parameters if each.grad is not None]
    norm = _norm_of([each.grad for each in clipped if each.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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
    square = _norm_of(counted).to(device) ** 2
    if shards > 1:
        dist.all_reduce(square)
    else:
        dist.all_reduce(square, group=group)
        dist.all_reduce(square, op=dist.ReduceOp.MAX, group=replicas)  # groups may have added up in another order
    norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(own.values(), max_norm, norm)
    return norm


def _norm_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients, in fp32. PyTorch rounds that of bf16 to bf16, twice: up to 0.8 %."""
    in_fp32 = [each for each in gradients if each.dtype == torch.float32]
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients if each.dtype != torch.float32]
    if in_fp32 or not gradients:
        norms.append(torch.nn.utils.get_total_norm(in_fp32))
    return torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """What this process holds of a parameter, with its gradient, in the same memory."""
    found = local_shard(parameter.detach())
    found.grad = None if parameter.grad is None else local_shard(parameter.grad)
    return found
