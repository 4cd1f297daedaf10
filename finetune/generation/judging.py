"""What a model scores on rows: its answers judged, its choices, and its loss on the answers that were expected."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.data.encoding import Row
from finetune.generation.manner import Manner
from finetune.generation.speaker import Answer, Speaker
from finetune.scoring.asked_rows import AskedRows
from finetune.scoring.intervals import Difference, Interval, compared, compared_ratio, ratio_interval, share_interval
from finetune.scoring.scores import Score
from finetune.training import documents
from finetune.training.evaluation import TOKENS_AT_ONCE
from finetune.training.loss import take_losses

Batches = Callable[[Sequence[Sequence[int]]], Iterable[Sequence[int]]]
"""Passes on batches of row numbers, and may show how far the work is."""


@dataclass(frozen=True)
class Measured:
    """One score of one model on all rows, or its loss."""

    name: str
    totals: list[float]
    """Of each row: its score, or the loss of its trained tokens, in nats."""
    divisors: list[float]
    """Of each row: 1, or its trained tokens."""
    is_share: bool

    @property
    def value(self) -> float:
        """The mean over rows, or over tokens."""
        return sum(self.totals) / sum(self.divisors)

    @property
    def interval(self) -> Interval:
        """Of 95 %."""
        if self.is_share:
            return share_interval(round(sum(self.totals)), len(self.totals))
        return ratio_interval(self.totals, self.divisors)

    def is_comparable(self, other: "Measured") -> bool:
        """Whether both are of the same rows and tokens; other tokenizers make other tokens, with other losses."""
        return self.divisors == other.divisors

    def difference(self, other: "Measured") -> Difference:
        """Of another model's from this one, on the same rows."""
        if self.divisors == [1.0] * len(self.divisors):
            return compared(self.totals, other.totals, are_shares=self.is_share)
        return compared_ratio(self.totals, other.totals, self.divisors)


@dataclass(frozen=True)
class Judgement:
    """Of one model."""

    measured: list[Measured]
    answers: list[Answer] | None
    """Of each row, where a score is one of answers."""
    choices: list[list[float]] | None
    """Log-probabilities of each row's choices, where a score is one of choices."""


def judge(
    speaker: Speaker,
    asked: AskedRows,
    scores: Sequence[Score],
    held_out: Sequence[Row] | None,
    manner: Manner,
    *,
    batch_size: int,
    shown: Batches = iter,
) -> Judgement:
    """Ask a model all rows, and score what it says.

    Args:
        asked: tokenised for this model.
        held_out: rows whose loss is computed; None for no loss.
        batch_size: rows answered together.
    """
    answers, choices = None, None
    if any(score.judge is not None for score in scores):
        answers = answered(speaker, asked.prompts, manner, batch_size, shown)
    if any(score.judge is None for score in scores):
        choices = asked.grouped(log_probabilities(speaker, asked.choices, shown))
    measured = []
    for score in scores:
        if score.judge is None:
            assert choices is not None
            found = [row.judged_choices(score, own) for row, own in zip(asked.rows, choices)]
        else:
            assert answers is not None
            found = [row.judged(score, answer.text) for row, answer in zip(asked.rows, answers)]
        measured.append(Measured(score.name, found, [1.0] * len(found), score.is_share))
    if held_out is not None:
        losses = [-each for each in log_probabilities(speaker, held_out, shown)]
        measured.append(Measured("loss", losses, [float(row.trained_tokens) for row in held_out], False))
    return Judgement(measured, answers, choices)


def answered(
    speaker: Speaker, prompts: Sequence[Sequence[int]], manner: Manner, batch_size: int, shown: Batches
) -> list[Answer]:
    """The answer to each prompt; those of like length are answered together."""
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]), reverse=True)
    found: dict[int, Answer] = {}
    for batch in shown([order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]):
        found |= zip(batch, speaker.answers([prompts[place] for place in batch], manner))
    return [found[place] for place in range(len(prompts))]


@torch.no_grad()
def log_probabilities(speaker: Speaker, rows: Sequence[Row], shown: Batches) -> list[float]:
    """Of each row the sum over its trained tokens, in nats."""
    model: Any = speaker.model
    take_losses(model)
    found = np.zeros(len(rows))
    for batch in shown(list(_of_like_length([len(row.tokens) for row in rows]))):
        with speaker.as_it_answers():
            own = documents.log_probabilities(model, [rows[place] for place in batch], model.device, flat=False)
        found[list(batch)] = own.double().cpu().numpy()
    return list(found.tolist())


def _of_like_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of rows, the longest first, up to ``TOKENS_AT_ONCE`` with padding, or one alone."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True):
        if batch and (len(batch) + 1) * lengths[batch[0]] > TOKENS_AT_ONCE:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
