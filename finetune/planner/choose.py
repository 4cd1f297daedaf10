"""The answer to a question: all rows in order, and what would fit where none does."""

from collections import Counter
from dataclasses import dataclass

from finetune.errors import InputError
from finetune.planner.candidates import Impossible, Judge, candidates
from finetune.planner.judged_rows import Row, judged
from finetune.planner.nearest import Nearest, nearest_that_fits
from finetune.planner.preference import in_order
from finetune.planner.question import Question

MOST_REASONS = 3
"""That are told where nothing is possible."""


@dataclass(frozen=True)
class Plan:
    """An answer."""

    question: Question
    rows: tuple[Row, ...]
    """As ``preference`` orders them: the recommended one first, what does not fit last."""
    impossible: tuple[Impossible, ...]
    nearest: Nearest | None
    """Where nothing fits: what would."""

    @property
    def best(self) -> Row | None:
        """The recommended row; None where nothing fits."""
        return None if self.rows[0].verdict == "does not fit" else self.rows[0]

    @property
    def stand_in(self) -> str | None:
        """The card at whose speed ways to train were compared, where the speed of the GPU is not known."""
        return self.rows[0].time.stand_in


def plan(question: Question, judge: Judge = judged) -> Plan:
    """Answer a question.

    Args:
        judge: predicts one way to train.

    Raises:
        InputError: if nothing that was asked for is possible, with the reasons.
    """
    rows, impossible = candidates(question, judge)
    if not rows:
        commonest = Counter(each.why for each in impossible).most_common(MOST_REASONS)
        raise InputError([why for why, _ in commonest])
    ordered = tuple(in_order(rows, question.base))
    first = ordered[0]
    nearest = nearest_that_fits(question, first.setting, judge) if first.verdict == "does not fit" else None
    return Plan(question, ordered, tuple(impossible), nearest)
