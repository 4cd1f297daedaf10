"""The nearest configuration that fits: the fewest and mildest changes to one that does not fit."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from finetune.errors import InputError, RunStopped
from finetune.hardware.cards import Machines
from finetune.planner.candidates import Judge, is_pointless, why_not
from finetune.planner.changes import (
    LEAST_ROW_TOKENS,
    given_up,
    in_4_bits,
    sharded,
    smaller_micro_batches,
    with_8_bit_state,
    with_adapter,
    with_bf16_weights,
    with_cached_reference,
    with_checkpointing,
)
from finetune.planner.judged_rows import Row, judged
from finetune.planner.model import Model
from finetune.planner.preference import simplest_of_the_fastest
from finetune.planner.question import Question, method_of, question_about
from finetune.trace.setting import Setting

Change = Callable[[Setting], list[Setting]]
KEYS: dict[str, tuple[str, Callable[[Setting], str]]] = {
    "reference": ("dpo.reference", lambda setting: setting.reference),
    "micro_batch_size": ("train.micro_batch_size", lambda setting: str(setting.micro_batch_size)),
    "activation_checkpointing": (
        "train.activation_checkpointing",
        lambda setting: "full" if setting.activation_checkpointing else "none",
    ),
    "optimizer": ("train.optimizer", lambda setting: setting.optimizer),
    "weights": ("train.weights", lambda setting: setting.weights),
    "adapter": ("adapter.type", lambda setting: setting.adapter),
    "bits": ("quantization.bits", lambda setting: str(setting.bits or "none")),
    "row_tokens": ("data.max_length", lambda setting: str(setting.row_tokens)),
}
"""Fields of a setting that are keys of the recipe, and their values there."""


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
        launch = f"launch with accelerate_configs/{self.strategy}.yaml" if self.strategy else ""
        joined = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        return ", and ".join(part for part in (f"set {joined}" if parts else "", launch) if part)


def nearest_that_fits(
    model: Model,
    setting: Setting,
    machines: Machines,
    *,
    mean_document_tokens: float | None = None,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    judge: Judge = judged,
) -> Nearest | None:
    """The nearest way to train that fits the machines; None if there is none.

    From the mildest: a reference without a copy of the weights, a smaller micro-batch, activation checkpointing,
    sharding over the GPUs that there are, 8-bit optimizer state, bf16 weights, an adapter, 4-bit weights, shorter rows.
    A harsher change is made only where all milder ones together are not enough; rows are no shorter than they must be
    with all the others. No change offloads. What fits without being tight comes first.

    Args:
        mean_document_tokens: that a token's document has on average; a whole row's where it is not given.
        host_bytes: memory of one machine, if known.
        disk_bytes: free for checkpoints, if known.
        judge: predicts one way to train.
    """
    question = question_about(
        model,
        setting,
        machines,
        mean_document_tokens=mean_document_tokens or setting.row_tokens,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )
    return _search(question, setting, judge)


def nearest_to(question: Question, row: Row, judge: Judge = judged) -> Nearest | None:
    """The same for a row of a question's answer."""
    return _search(question, row.setting, judge)


def _search(question: Question, start: Setting, judge: Judge) -> Nearest | None:
    for accepted in ({"fits"}, {"fits", "tight"}):
        for shorter in _row_lengths(start):
            if fitting := _fewest_changes(question, shorter, accepted, judge):
                largest = max(row.setting.micro_batch_size for row in fitting)
                alike = [row for row in fitting if row.setting.micro_batch_size == largest]
                return _nearest(start, simplest_of_the_fastest(alike))
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
    if setting.strategy != start.strategy and is_pointless(setting.strategy, question.machines):
        return False
    return why_not(replace(question, base=setting), setting.strategy, method_of(setting)) is None


def _judged(question: Question, settings: list[Setting], judge: Judge) -> list[Row]:
    """Rows of the possible ones; what has more tokens than one that did not fit is not looked at."""
    kinds: dict[Setting, list[Setting]] = {}
    for setting in settings:
        kinds.setdefault(replace(setting, micro_batch_size=1, accumulation=1, row_tokens=1), []).append(setting)
    found = question.model.together([partial(_judged_alike, question, alike, judge) for alike in kinds.values()])
    return [row for rows in found for row in rows]


def _judged_alike(question: Question, settings: list[Setting], judge: Judge) -> list[Row]:
    """Of settings that differ in the tokens of a micro-batch alone."""
    found, too_many = list[Row](), math.inf
    for setting in settings:
        documents = min(question.mean_document_tokens, setting.row_tokens)
        asked = replace(question, base=setting, mean_document_tokens=documents)
        if setting.tokens >= too_many or why_not(asked, setting.strategy, method_of(setting)):
            continue
        try:
            found.append(judge(asked, setting))
        except (InputError, RunStopped):  # what cannot be trained, or not be traced, is not proposed
            continue
        if found[-1].verdict == "does not fit":
            too_many = min(setting.tokens, too_many)
    return found


def _row_lengths(setting: Setting) -> Iterator[Setting]:
    """From its own, by halves."""
    tokens = setting.row_tokens
    while tokens >= min(LEAST_ROW_TOKENS, setting.row_tokens):
        yield replace(setting, row_tokens=tokens)
        tokens //= 2


_MILDEST_FIRST: tuple[Change, ...] = (
    with_cached_reference,
    smaller_micro_batches,
    with_checkpointing,
    sharded,
    with_8_bit_state,
    with_bf16_weights,
    with_adapter,
    in_4_bits,
)
"""Sharding changes where numbers lie and not what is learnt, so it is milder than 8-bit state and bf16 weights."""
_AS_APPLIED: tuple[Change, ...] = (
    with_adapter,
    in_4_bits,
    sharded,
    with_8_bit_state,
    with_bf16_weights,
    with_checkpointing,
    with_cached_reference,
    smaller_micro_batches,
)
"""Those first that make others possible: 4 bits need an adapter, and can be sharded where 8 bits cannot."""


def _nearest(start: Setting, row: Row) -> Nearest:
    before, after = asdict(start), asdict(row.setting)
    changes = {key: value(row.setting) for name, (key, value) in KEYS.items() if before[name] != after[name]}
    strategy = row.setting.strategy
    return Nearest(row, changes, strategy if strategy != start.strategy else None, tuple(given_up(row.setting, start)))
