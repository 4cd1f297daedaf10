"""The answer to a question: all rows in order, and the recommended one."""

from collections import Counter
from dataclasses import dataclass

from finetune.errors import InputError
from finetune.planner import largest_term
from finetune.planner.candidates import Impossible, Judge, candidates
from finetune.planner.judged_rows import Row, judged
from finetune.planner.launch_command import launch_command
from finetune.planner.nearest import Nearest, nearest_to
from finetune.planner.preference import in_order
from finetune.planner.question import Question
from finetune.planner.reasons import host_memory, reasons
from finetune.units import GIB

MOST_REASONS = 3
"""That are told where nothing is possible."""


@dataclass(frozen=True)
class Recommendation:
    """The row to take."""

    row: Row
    reasons: tuple[str, ...]
    """Sentences: the choice first, then what it needs, what it gives up, and what else there is."""
    command: list[list[str]]
    """Words that start it; ``launch_command.in_lines`` makes a text of them."""

    @property
    def reason(self) -> str:
        """All sentences as one text."""
        return " ".join(self.reasons)


@dataclass(frozen=True)
class Plan:
    """An answer."""

    question: Question
    rows: tuple[Row, ...]
    """As ``preference`` orders them: the recommended one first, what does not fit last."""
    impossible: tuple[Impossible, ...]
    recommendation: Recommendation | None
    """None where nothing fits."""
    nearest: Nearest | None
    """Where nothing fits: what would."""

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
    best = ordered[0]
    if best.verdict == "does not fit":
        return Plan(question, ordered, tuple(impossible), None, nearest_to(question, best, judge))
    recommendation = Recommendation(best, reasons(question, best, ordered), launch_command(question, best.setting))
    return Plan(question, ordered, tuple(impossible), recommendation, None)


def why_nothing_fits(plan: Plan) -> tuple[str, ...]:
    """Sentences on what would fit, and on what takes most of the row that is nearest to fitting."""
    least, nearest = plan.rows[0], plan.nearest
    worst = least.worst
    if nearest is None:
        found = [
            f"Nothing fits, and no similar option does: {least.name} needs {worst.bytes / GIB:,.1f} GiB of "
            f"{worst.what}, but there are {(worst.there or 0) / GIB:,.1f} GiB.",
            "Use more or larger GPUs, or a smaller model.",
        ]
    else:
        host = f", with {host_memory(nearest.row)}" if nearest.row.offloads else ""
        found = [f"Nothing fits. The nearest option that fits is {nearest.row.name}{host}: {nearest.text}."]
        found += nearest.given_up
    if worst is least.gpu:
        found.append(largest_term.sentence(plan.question, least, f"the peak of {least.name}"))
    return tuple(found)
