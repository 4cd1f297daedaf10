"""The charts of a report: courses over the optimizer steps, one line for each run."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from finetune.output.run_reading import finite
from finetune.report.run_read import RunRead

KNOWN = {
    "loss": ("Loss", "nats"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "learning_rate": ("Learning rate", ""),
    "tokens_per_second": ("Speed", "tokens/s"),
    "mfu": ("MFU", "share of peak FLOP/s"),
    "peak_memory_gib": ("Peak memory", "GiB, largest of all processes"),
}
"""Titles and units of what every run has, in this order; other figures follow."""
FROM_ZERO = {"tokens_per_second", "mfu", "peak_memory_gib"}
"""Quantities, of which a line half as high is half as much."""
NOT_DRAWN = {"step", "tokens", "total_tokens", "step_seconds", "save_stall_seconds", "skipped_steps", "bad_steps"}
MOST_POINTS = 600
"""Of a line: about as many as there are pixels."""
_WHOLE = 2**1074
"""Any finite float times this is a whole number."""
SMOOTHED_FROM = 100
"""Values from which on a mean is drawn over them."""
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """The course of a figure in one run."""

    run: int
    """Its number in the report, from 0."""
    kind: str
    """``training``; ``each`` training value, where it is a background to their ``mean`` over a fiftieth of them before
    and after; ``held-out``; ``predicted``."""
    points: list[Point]
    """Steps and values; NaN where a line is interrupted."""


@dataclass(frozen=True)
class Chart:
    """Courses of one figure."""

    key: str
    """Of metrics.jsonl."""
    title: str
    unit: str
    lines: list[Line]


def charts_of(runs: Sequence[RunRead]) -> list[Chart]:
    """Of every figure that a run has written."""
    written = dict.fromkeys(key for run in runs for line in run.steps for key in line)
    own = [key.removeprefix("eval_") for key in written if key not in NOT_DRAWN]
    found = []
    for key in dict.fromkeys([*KNOWN, *own]):
        lines = [line for number, run in enumerate(runs) for line in _lines(number, run, key)]
        if lines:
            title, unit = KNOWN.get(key, (key.replace("_", " ").capitalize(), ""))
            found.append(Chart(key, title, unit, lines))
    return found


def as_json(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Under the names of the fields; null where a line is interrupted."""
    found: list[dict[str, Any]] = finite([asdict(chart) for chart in charts])
    return found


def _lines(number: int, run: RunRead, key: str) -> Iterable[Line]:
    course = run.course(key)
    held_out = run.course(f"eval_{key}")
    before = run.part("eval_loss").get("before") if key == "loss" else None
    if before is not None:
        held_out = [(0, before), *held_out]
    if any(math.isfinite(value) for _, value in course):
        is_smoothed = len(course) >= SMOOTHED_FROM and key != "learning_rate"
        yield Line(number, "each" if is_smoothed else "training", thinned(course))
        if is_smoothed:
            yield Line(number, "mean", thinned(smoothed(course, len(course) // 50)))
    if any(math.isfinite(value) for _, value in held_out):
        yield Line(number, "held-out", thinned(held_out))
    predicted = run.part("plan").get(key)
    if course and predicted is not None:
        yield Line(number, "predicted", [(course[0][0], predicted), (course[-1][0], predicted)])


def smoothed(course: Sequence[Point], reach: int) -> list[Point]:
    """The mean of the finite values up to ``reach`` points before and after each."""
    sums, counts = [0], [0]
    for _, value in course:
        is_there = math.isfinite(value)
        number, of = value.as_integer_ratio() if is_there else (0, 1)
        sums.append(sums[-1] + number * (_WHOLE // of))  # exact: floats forget small values after a huge one
        counts.append(counts[-1] + is_there)
    means = []
    for place, (step, _) in enumerate(course):
        begin, end = max(0, place - reach), min(len(course), place + reach + 1)
        count = counts[end] - counts[begin]
        means.append((step, (sums[end] - sums[begin]) / (count * _WHOLE) if count else math.nan))
    return means


def thinned(course: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many points, with the lowest and the highest of each part of the course, and its ends.

    Of (1, 5) (2, 1) (3, 9) (4, 4) ..., if each part has four points, (2, 1) and (3, 9) are kept of the first.
    """
    if len(course) <= most:
        return list(course)
    parts = (most - 2) // 2
    edges = [1 + round(place * (len(course) - 2) / parts) for place in range(parts + 1)]
    kept = [course[0]]
    for begin, end in pairwise(edges):
        finite = [place for place in range(begin, end) if math.isfinite(course[place][1])]
        ends = {min(finite, key=lambda i: course[i][1]), max(finite, key=lambda i: course[i][1])} if finite else {begin}
        kept += [course[place] for place in sorted(ends)]
    return [*kept, course[-1]]
