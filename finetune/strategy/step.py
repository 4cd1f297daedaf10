"""The optimizer's step, which no loss or gradient reaches that is not finite, on any process."""

import math

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from .sharding import engine_of


def scaled(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """A loss times a factor, whose gradients are NaN if the loss is not finite.

    An infinite loss can have finite gradients. NaN reaches the gradient norm of all processes with the reduction, so
    that all of them leave the step out, without asking one another.
    """
    return loss * torch.where(loss.detach().isfinite(), factor, math.nan)


def step_if_finite(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float
) -> float:
    """Clip the accumulated gradients to a global norm (0: do not), step unless it is not finite, and drop them.

    DeepSpeed has stepped inside ``backward`` by then, clipped as ``start`` told it to, and leaves such a step out by
    itself; a loss scaler leaves it out inside ``optimizer.step``, and lowers its scale.

    Returns:
        The norm before clipping, the same on all processes. On a GPU it is waited for: the step's kernels alone are
        launched late, by less than their own time.
    """
    found = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
    if math.isfinite(norm) or accelerator.scaler is not None or engine_of(model) is not None:
        optimizer.step()
    optimizer.zero_grad()
    return norm
