"""One optimizer step: ``backward`` for the micro-batches of a process, then ``step_if_finite``.

With 2 processes and 3 micro-batches each, whose losses sum to 4, 6, 2 and 3, 0, 5 nats over 10 trained tokens in all,
the loss of the step is 20 / 10 = 2 nats a token. Frameworks average over processes and micro-batches, which would give
20 / 6; so each loss is multiplied by 6 / 10 before its backward pass, and the average of those is 2.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from finetune.distributed.clipping import clip
from finetune.distributed.held_parts import part_of, pipeline_of
from finetune.distributed.sharding import engine_of
from finetune.training.loss import LossSum


def backward(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loss_sum: LossSum,
    micro_batches: Iterable[Any],
    *,
    divide_by: float,
) -> list[torch.Tensor]:
    """The gradients of a step, from all micro-batches of this process, reduced over the processes.

    Under a pipeline several micro-batches are on their way at a time; else they are computed one after another.

    Args:
        divide_by: the trained tokens of the whole step, of all processes and micro-batches.

    Returns:
        The sum of the loss of each micro-batch, detached.
    """
    if part := part_of(model):
        return part.backward(model, loss_sum, micro_batches, partial(scaled, factor=1 / divide_by))
    return [_backward(accelerator, model, loss_sum, each, divide_by) for each in micro_batches]


def _backward(
    accelerator: Accelerator, model: torch.nn.Module, loss_sum: LossSum, micro_batch: Any, divide_by: float
) -> torch.Tensor:
    """Add the gradients of one micro-batch to those of the step, reduced over the processes with the step's last one.

    The graph lives in this frame only: some functions hold tensors until it goes, and the optimizer's step comes next.
    DeepSpeed steps inside it, with the step's last micro-batch; set the learning rate before. FSDP reduces gradients
    with every micro-batch: it would hold those of the whole model otherwise, on one process as well.
    """
    with accelerator.accumulate(*() if accelerator.is_fsdp2 else (model,)):
        loss = loss_sum(model, micro_batch)
        accelerator.backward(
            scaled(loss, accelerator.num_processes * accelerator.gradient_accumulation_steps / divide_by)
        )
    return loss.detach()


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
    engine = engine_of(model)
    if part := part_of(model):
        found = part.clip(model, max_grad_norm or math.inf)
    elif engine:
        found = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    else:
        accelerator.unscale_gradients()
        found = clip(model.parameters(), max_grad_norm or math.inf)
    norm = float(found)
    if math.isfinite(norm) or accelerator.scaler is not None or engine:
        optimizer.step()
        if pipeline := pipeline_of(model):
            pipeline.step_as_one(model)
    optimizer.zero_grad()
    return norm
