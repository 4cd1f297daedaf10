"""The learning rate as a pure function of the step.

The recipe sets it before each backward pass. There is no scheduler object that could be stepped too often (once per
process or per micro-batch), and nothing to save in a checkpoint.
"""

import math

from finetune.config import sections


def learning_rate(step: int, total_steps: int, train: sections.Train) -> float:
    """Learning rate of one optimizer step.

    Rises linearly over the first ``warmup_steps``, or ``ceil(warmup_ratio * total_steps)``, without ever being 0, then
    follows the schedule. Without warm-up it equals transformers' schedulers at the same step.

    Args:
        step: optimizer step, from 1 to ``total_steps``.
        train: with the peak, which the first step after the warm-up has, and the schedule: ``constant``; ``linear``,
            ``cosine``, or ``wsd``, which stays at the peak and decays over the last ``decay_ratio`` of the steps as
            1 - sqrt (Haegele et al., arXiv:2405.18392). The last three end at ``min_learning_rate``, or
            ``min_learning_rate_ratio`` of the peak.

    Raises:
        ValueError: for a step out of range.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step {step} is outside 1..{total_steps}")
    warmup_steps = math.ceil(train.warmup_ratio * total_steps) if train.warmup_steps is None else train.warmup_steps
    if step <= warmup_steps:
        return train.learning_rate * step / (warmup_steps + 1)
    after = total_steps - warmup_steps
    if train.schedule == "wsd":
        after = min(after, math.ceil(train.decay_ratio * total_steps))
    # 0 at the first step that decays; the rate after the last one would be the lowest
    progress = max(0, step - 1 - (total_steps - after)) / max(1, after)
    left = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "wsd": 1 - math.sqrt(progress),
    }[train.schedule]
    lowest = train.min_learning_rate_ratio
    if train.min_learning_rate is not None:
        lowest = train.min_learning_rate / train.learning_rate
    return train.learning_rate * (lowest + (1 - lowest) * left)


def describe_warmup(train: sections.Train, total_steps: int) -> list[str]:
    """A line where ``warmup_steps`` leaves too few steps for the rest of the schedule."""
    left = total_steps - (train.warmup_steps or 0)
    if left <= 0:
        highest = learning_rate(total_steps, total_steps, train)
        return [f"train.warmup_steps {train.warmup_steps}: the learning rate rises to {highest:.2e} until the run ends"]
    decay = math.ceil(train.decay_ratio * total_steps)
    if train.schedule == "wsd" and train.warmup_steps and left < decay:
        return [f"train.warmup_steps {train.warmup_steps}: the learning rate decays over {left} steps, not {decay}"]
    return []


def is_due(step: int, every: int) -> bool:
    """Whether a step is one of every so many; never, for 0."""
    return every > 0 and step % every == 0
