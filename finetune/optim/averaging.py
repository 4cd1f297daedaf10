"""The exponential moving average of the trained weights, in fp32, as state of the optimizer.

Averages of the iterates of SGD converge better than the last one (Polyak and Juditsky 1992, doi:10.1137/0330046), and
generalise better (Izmailov et al., arXiv:1803.05407). Here a step keeps a share of the average, the decay, and adds as
much of the new weights as is missing. It begins with the weights before the first step, which would be nine tenths of
it after a hundred steps with a decay of 0.999. So the first steps keep less, as in TensorFlow's
``ExponentialMovingAverage``: ``(1 + t) / (10 + t)`` in step t, 0.18 in the first, 0.5 in the eighth, 0.999 in the
8,990th.

An average lies beside the moments, in ``state[parameter]``, and has the shape of what the optimizer steps on: of a
parameter, a shard, or a flat partition of several. Nothing is communicated. A step that is left out does not change it.
"""

from typing import Any

import torch

from finetune.optim.optimizer import state_of
from finetune.optim.rounding import CHUNK_ELEMENTS, local_shard

AVERAGE, AVERAGED_STEPS = "ema", "ema_steps"
"""Keys of the average, and of the number of steps in it, in the state of a parameter."""


def decay_at(decay: float, step: int) -> float:
    """Share of the average that a step keeps.

    Args:
        step: of those that are averaged, from 1.
    """
    return min(decay, (1 + step) / (10 + step))


def averages(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer was built to keep averages."""
    return any(group.get("ema_decay", 0.0) > 0 for group in optimizer.param_groups)


def keep_averages(optimizer: torch.optim.Optimizer) -> None:
    """Have the steps of an optimizer update averages, if its groups have an ``ema_decay``.

    Args:
        optimizer: the one that steps, without a strategy's wrapper.
    """
    if averages(optimizer):
        averaging = _Averaging()
        optimizer.register_step_pre_hook(averaging.before_step)
        optimizer.register_step_post_hook(averaging.after_step)


class _Averaging:
    """What happens around a step. Under ZeRO an optimizer steps on one partition after the other, each a step here."""

    def __init__(self) -> None:
        self.stepped: list[tuple[torch.Tensor, float]] = []
        self.beginnings: dict[torch.Tensor, torch.Tensor] = {}

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Copy weights without an average. It joins the state after the step, since optimizers begin an empty one."""
        self.stepped = [
            (parameter, group["ema_decay"])
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and local_shard(parameter).numel()
        ]
        self.beginnings = {
            parameter: _copied(parameter)
            for parameter, _ in self.stepped
            if AVERAGE not in state_of(optimizer, parameter)
        }

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        overflowed = _overflowed(optimizer)
        for parameter, decay in self.stepped:
            state = state_of(optimizer, parameter) or optimizer.state[parameter]  # SGD has made none
            if parameter in self.beginnings:
                state[AVERAGE], state[AVERAGED_STEPS] = self.beginnings.pop(parameter), 0
            if not overflowed:
                state[AVERAGED_STEPS] += 1
                _move(state[AVERAGE], parameter, 1 - decay_at(decay, state[AVERAGED_STEPS]))
        self.stepped = []


def _overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this step changed no weight, because gradients overflowed in fp16.

    ``GradScaler`` does not call other optimizers then. It calls a fused one all the same, which leaves the weights as
    they are where this attribute is not 0.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


@torch.no_grad()
def _copied(parameter: torch.Tensor) -> torch.Tensor:
    shard = local_shard(parameter.detach())
    return torch.empty(shard.shape, dtype=torch.float32, device=shard.device).copy_(shard)


@torch.no_grad()
def _move(average: torch.Tensor, parameter: torch.Tensor, share: float) -> None:
    """Move an average by a share of its way to the weights, some at a time: those in 16 bits are cast."""
    weights = local_shard(parameter.detach()).reshape(-1).split(CHUNK_ELEMENTS)
    for mean, now in zip(average.view(-1).split(CHUNK_ELEMENTS), weights, strict=True):
        mean.lerp_(now.float(), share)
