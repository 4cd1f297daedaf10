"""The answer to a question: all rows in order, and the recommended one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.errors import InputError
from finetune.planner.candidates import SAME_SPEED, Impossible, Judge, candidates
from finetune.planner.judged_rows import Row, judged
from finetune.planner.launch_command import launch_command
from finetune.planner.nearest import Nearest, nearest_that_fits, nearest_to
from finetune.planner.question import Question
from finetune.trace.placement import placement_of
from finetune.units import GIB

__all__ = ["Nearest", "Plan", "Recommendation", "nearest_that_fits", "plan", "recommended"]

MOST_REASONS = 3
"""That are told where nothing is possible."""


@dataclass(frozen=True)
class Recommendation:
    """The row to take."""

    row: Row
    reason: str
    """One or two sentences."""
    command: list[list[str]]
    """Words that start it; ``command.in_lines`` makes a text of them."""


@dataclass(frozen=True)
class Plan:
    """An answer."""

    question: Question
    rows: tuple[Row, ...]
    """What fits first, the fastest before the others; then what is tight; then the rest, by what it needs."""
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
    in_order = sorted(rows, key=_order)
    best = recommended(in_order)
    if best is None:
        return Plan(question, tuple(in_order), tuple(impossible), None, nearest_to(question, in_order[0], judge))
    recommendation = Recommendation(best, reason(best, in_order), launch_command(question, best.setting))
    return Plan(question, tuple(in_order), tuple(impossible), recommendation, None)


def recommended(rows: Sequence[Row]) -> Row | None:
    """The fastest that fits on the GPUs; else with host memory; else of what is tight; None where nothing fits."""
    first = min(rows, key=_order)
    return None if first.verdict == "does not fit" else first


def _order(row: Row) -> tuple[int, bool, float, float]:
    """Sorting key. What is offloaded comes last of its kind: its speed rests on hiding every transfer."""
    place = ("fits", "tight", "does not fit").index(row.verdict)
    share = row.worst.share or 0.0
    if place == 2:
        return place, False, share, 0.0
    return place, _offloads(row), -row.time.tokens_per_second, share


def _offloads(row: Row) -> bool:
    return placement_of(row.setting.strategy, row.setting.world_size).optimizer_on != "gpu"


def reason(best: Row, rows: Sequence[Row]) -> str:
    """Why a row is recommended, what offloading could gain, and how to train every weight."""
    alike = [row for row in rows if row.verdict == best.verdict]
    fitting = [row for row in alike if _offloads(row) == _offloads(best)]
    apart = "" if len(fitting) == len(alike) else " without offloading"
    needed = f"needs {best.gpu.bytes / GIB:.1f} of {(best.gpu.there or 0) / GIB:.1f} GiB of a GPU"
    name = _sentence_start(best)
    if best.verdict == "tight":
        worst = best.worst
        text = (
            f"No option leaves a tenth of the memory free; {best.name} is the fastest that may just fit{apart}: it "
            f"needs {worst.share or 0:.0%} of the {worst.what}."
        )
    elif len(rows) == 1:
        text = f"{name} fits: it {needed}."
    elif len(fitting) == 1:
        text = f"{name} is the only option that fits{apart}: it {needed}."
    else:
        text = f"{name} is the fastest of {len(fitting)} options that fit{apart}, and {needed}."
    if _offloads(best) and best.host.there is None:
        text += f" It needs {best.host.bytes / GIB:.0f} GiB of host memory per machine (see --host-memory)."
    fastest = max(alike, key=lambda row: row.time.tokens_per_second)
    speed = fastest.time.tokens_per_second / best.time.tokens_per_second
    if speed > 1 + SAME_SPEED:
        text += (
            f" {_sentence_start(fastest)} is predicted to reach {speed:.0%} of that speed if every transfer "
            "overlaps with computation."
        )
    whole = [row for row in fitting if row.setting.adapter == "none" and not _offloads(row)]
    if best.setting.adapter != "none" and whole:
        speed = whole[0].time.tokens_per_second / best.time.tokens_per_second
        text += f" To train every weight, use {whole[0].setting.strategy}: {speed:.0%} of that speed (--method full)."
    return text


def _sentence_start(row: Row) -> str:
    return row.name[0].upper() + row.name[1:]
