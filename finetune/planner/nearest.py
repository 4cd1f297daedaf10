"""The nearest configuration that fits: the fewest and mildest changes to one that does not fit."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from finetune.config.strategy_names import TOGETHER
from finetune.errors import InputError, RunStopped
from finetune.planner.candidates import Judge, is_pointless
from finetune.planner.changes import (
    differing,
    given_up,
    in_4_bits,
    in_plain_order,
    sharded,
    smaller_micro_batches,
    spread,
    with_8_bit_state,
    with_adapter,
    with_bf16_weights,
    with_cached_reference,
    with_checkpointing,
    with_offloaded_activations,
    with_shorter_rows,
)
from finetune.planner.judged_rows import Row, judged
from finetune.planner.possible import why_not
from finetune.planner.preference import simplest_of_the_fastest
from finetune.planner.question import Question
from finetune.trace.setting import Setting

Change = Callable[[Setting], list[Setting]]


@dataclass(frozen=True)
class Nearest:
    """What fits in place of something that does not."""

    row: Row
    changes: dict[str, str]
    """Keys of the configuration and their new values, the mildest change first."""
    strategy: str | None
    """The strategy file to launch with, where it is another."""
    given_up: tuple[str, ...]
    """What less exact updates mean, in sentences."""

    @property
    def text(self) -> str:
        """As part of a sentence: set a to b and c to d, and launch with e."""
        parts = [f"{key} to {value}" for key, value in self.changes.items()]
        launch = [f"accelerate_configs/{self.strategy}.yaml"] if self.strategy else []
        setting = self.row.setting
        if self.strategy or setting.strategy not in TOGETHER:
            launch += [f"--{size.key} {number}" for size, number in setting.sizes.items()]
        joined = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        both = (f"set {joined}" if parts else "", f"launch with {' '.join(launch)}" if launch else "")
        return ", and ".join(part for part in both if part)


def nearest_that_fits(question: Question, start: Setting, judge: Judge = judged) -> Nearest | None:
    """The nearest way to train that fits the machines of a question; None if there is none.

    From the mildest: a reference without a copy of the weights, a plainer order of a pipeline's stages, a
    smaller micro-batch, activation checkpointing, sharding over the GPUs that there are, several of them for each row,
    activations in host memory, 8-bit optimizer state, bf16 weights, an adapter, 4-bit weights, shorter rows. A
    harsher change is made only where all milder ones together are not enough; rows are no shorter than they must be
    with all the others. No change offloads weights or optimizer state. Of rows of a length, what fits without being
    tight comes first; rows are not cut for that.

    Args:
        start: what does not fit.
        judge: predicts one way to train.
    """
    for shorter in _row_lengths(start):
        for accepted in ({"fits"}, {"fits", "tight"}):
            if fitting := _fewest_changes(question, shorter, accepted, judge):
                largest = max(row.setting.micro_batch_size for row in fitting)
                row = simplest_of_the_fastest([row for row in fitting if row.setting.micro_batch_size == largest])
                found = row.setting
                strategy = found.strategy if found.strategy != start.strategy else None
                return Nearest(row, differing(found, start), strategy, given_up(found, start))
    return None


def _fewest_changes(question: Question, start: Setting, accepted: set[str], judge: Judge) -> list[Row]:
    """Rows that fit after the changes that are needed: of all, each is left out that can be, the harshest first."""
    needed = list(_MILDEST_FIRST)
    found = _fitting(question, start, needed, accepted, judge)
    if found:
        for change in reversed(_MILDEST_FIRST):
            fewer = [each for each in needed if each is not change]
            if fitting := _fitting(question, start, fewer, accepted, judge):
                needed, found = fewer, fitting
    return found


def _fitting(
    question: Question, start: Setting, changes: Sequence[Change], accepted: set[str], judge: Judge
) -> list[Row]:
    """Rows that fit after changes; one that cannot be made is passed over."""
    settings = [start]
    for change in (each for each in _AS_APPLIED if each in changes):
        changed = [each for setting in settings for each in change(setting)]
        settings = [each for each in changed if _is_sensible(question, each, start)] or settings
    return [row for row in _judged(question, settings, judge) if row.verdict in accepted]


def _is_sensible(question: Question, setting: Setting, start: Setting) -> bool:
    """Whether it is possible, under a strategy that has something to win."""
    is_other = setting.strategy != start.strategy and setting.size == 1
    if is_other and is_pointless(setting.strategy, question.machines):
        return False
    return why_not(question.model, setting) is None


def _judged(question: Question, settings: list[Setting], judge: Judge) -> list[Row]:
    """Rows of the possible ones; what has more tokens than one alike that did not fit is not looked at."""
    possible = [setting for setting in settings if why_not(question.model, setting) is None]
    question.model.tracer.prepare(possible)
    found, too_many = list[Row](), dict[Setting, float]()
    for setting in possible:
        kind = replace(setting, micro_batch_size=1, accumulation=1, row_tokens=1)
        if setting.tokens >= too_many.get(kind, math.inf):
            continue
        try:
            found.append(judge(question, setting))
        except (InputError, RunStopped):  # what cannot be trained, or not be traced, is not proposed
            continue
        if found[-1].verdict == "does not fit":
            too_many[kind] = setting.tokens
    return found


def _row_lengths(setting: Setting) -> Iterator[Setting]:
    """From its own, by halves."""
    yield setting
    for shorter in with_shorter_rows(setting):
        yield from _row_lengths(shorter)


_MILDEST_FIRST: tuple[Change, ...] = (
    with_cached_reference,
    in_plain_order,
    smaller_micro_batches,
    with_checkpointing,
    sharded,
    spread,
    with_offloaded_activations,
    with_8_bit_state,
    with_bf16_weights,
    with_adapter,
    in_4_bits,
)
"""Sharding changes where numbers lie and not what is learnt, so it is milder than 8-bit state and bf16 weights."""
_FIRST: tuple[Change, ...] = (with_adapter, in_4_bits, sharded)
"""Those that make others possible: 4 bits need an adapter, and can be sharded where 8 bits cannot."""
_AS_APPLIED = (*_FIRST, *(each for each in _MILDEST_FIRST if each not in _FIRST))
