"""Charts as SVG: axes with round numbers, lines as paths. Colours are left to the style sheet of the page.

Written here and not by matplotlib, which takes a second to import: a page is written at the end of every run, costs
milliseconds, and follows the light or dark colours of its reader.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.report.charts import FROM_ZERO, Chart, Point
from finetune.report.run_read import RunRead

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 26
"""Margins, in which the axes' numbers stand."""
MOST_DOTS = 60
"""Held-out values that are marked each."""


@dataclass(frozen=True)
class Tick:
    """A number of an axis."""

    at: float
    """Pixels from the left, or from the top."""
    text: str


@dataclass(frozen=True)
class Stroke:
    """A line as it is drawn."""

    style: str
    """Classes of the style sheet: the run's and the kind's."""
    path: str
    """Of an SVG ``path``; pieces of it where values are missing."""
    dots: list[tuple[float, float]]
    """Values that are marked: all of few, and those that no line joins."""


@dataclass(frozen=True)
class Drawing:
    """A chart for the template."""

    title: str
    unit: str
    kinds: set[str]
    """Of its lines."""
    across: list[Tick]
    up: list[Tick]
    strokes: list[Stroke]
    marks: list[tuple[float, str, str]]
    """Where a run was resumed: pixels from the left, its style, and what happened."""


def drawn(chart: Chart, runs: Sequence[RunRead]) -> Drawing:
    """The chart in a frame of ``WIDTH`` x ``HEIGHT``."""
    points = [point for line in chart.lines for point in line.points if math.isfinite(point[1])]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    least = min(y for _, y in points)
    values = ticks(min(0.0, least) if chart.key in FROM_ZERO else least, max(y for _, y in points))
    lowest, highest = min(values[0], *(y for _, y in points)), max(values[-1], *(y for _, y in points))

    def place(point: Point) -> tuple[float, float]:
        across = (point[0] - first) / (last - first) if last > first else 0.5
        up = (point[1] - lowest) / (highest - lowest)
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    steps = [step for step in ticks(first, last) if step == round(step) and first <= step <= last]
    return Drawing(
        chart.title,
        chart.unit,
        {line.kind for line in chart.lines},
        across=[Tick(place((step, lowest))[0], f"{step:,.0f}") for step in steps],
        up=[Tick(place((first, value))[1], text) for value, text in zip(values, texts(values))],
        strokes=[_stroke(f"run{line.run} {line.kind}", line.points, place) for line in chart.lines],
        marks=[
            (place((each["after_step"], lowest))[0], f"run{number}", f"{run.name}: {describe_resumption(each)}")
            for number, run in enumerate(runs)
            for each in run.listed("resumed")
            if first <= each["after_step"] <= last
        ],
    )


def describe_resumption(resumed: Mapping[str, Any]) -> str:
    """An entry of run.yaml in words."""
    text = f"resumed after step {resumed['after_step']:,} under {resumed['strategy']} on {resumed['processes']} process"
    text += "es" if resumed["processes"] != 1 else ""
    return text + (f", from {resumed['from']}" if "from" in resumed else "")


def _stroke(style: str, points: Sequence[Point], place: Callable[[Point], tuple[float, float]]) -> Stroke:
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            pieces[-1].append(place(point))
        elif pieces[-1]:
            pieces.append([])
    path = " ".join("M" + " L".join(f"{x} {y}" for x, y in piece) for piece in pieces if len(piece) > 1)
    alone = [piece[0] for piece in pieces if len(piece) == 1]
    are_few = style.endswith("held-out") and len(points) <= MOST_DOTS
    return Stroke(style, path, [dot for piece in pieces for dot in piece] if are_few else alone)


def ticks(lowest: float, highest: float) -> list[float]:
    """Round numbers, four to eight of them, from at most the lowest to at least the highest value.

    From 0.93 to 4.2 they are 0, 1, 2, 3, 4 and 5.
    """
    if highest <= lowest:
        reach = abs(lowest) / 2 or 1.0
        lowest, highest = lowest - reach, lowest + reach
    rough = (highest - lowest) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(each for each in (1, 2, 5, 10) if each * unit >= rough * 0.999)
    first, last = math.floor(lowest / step + 1e-9), math.ceil(highest / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def texts(values: Sequence[float]) -> list[str]:
    """Numbers of an axis, as short as they can be told apart: 0.00, 0.25, 0.50; 2e-05; 12k; 3M."""
    step, largest = values[1] - values[0], max(map(abs, values))
    if largest < 1e-2 or largest >= 1e9:
        return [
            f"{value:.{_digits(step / 10 ** math.floor(math.log10(largest)))}e}" if value else "0" for value in values
        ]
    unit, sign = next(
        (unit, sign) for unit, sign in ((1e6, "M"), (1e3, "k"), (1, "")) if largest >= 10 * unit or unit == 1
    )
    return [f"{value / unit:.{_digits(step / unit)}f}{sign if value else ''}" for value in values]


def _digits(step: float) -> int:
    """Decimals in which numbers so far apart differ."""
    return max(0, -math.floor(math.log10(step) + 1e-9))
