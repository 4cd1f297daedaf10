"""The learning rate as a pure function of the step.

The recipe sets it before each backward pass. There is no scheduler object that could be stepped too often (once per
process or per micro-batch), and nothing to save in a checkpoint.
"""

import math


def learning_rate(step: int, *, total_steps: int, peak: float, schedule: str, warmup_ratio: float) -> float:
    """Learning rate of one optimizer step.

    Rises linearly over the first ``ceil(warmup_ratio * total_steps)`` steps without ever being 0, then
    follows the schedule. Without warm-up it equals transformers' schedulers at the same step.

    Args:
        step: optimizer step, from 1 to ``total_steps``.
        peak: the highest rate, reached by the first step after the warm-up.
        schedule: ``constant``, or ``linear`` or ``cosine`` (to 0 at the end of the run).

    Raises:
        ValueError: for a step out of range or an unknown schedule.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step {step} is outside 1..{total_steps}")
    warmup_steps = math.ceil(warmup_ratio * total_steps)
    if step <= warmup_steps:
        return peak * step / (warmup_steps + 1)
    progress = (step - 1 - warmup_steps) / max(1, total_steps - warmup_steps)  # 0 at the first step after warm-up
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * (1 - progress)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"schedule {schedule!r} is not one of constant, linear, cosine")


def is_due(step: int, every: int) -> bool:
    """Whether a step is one of every so many; never, for 0."""
    return every > 0 and step % every == 0
