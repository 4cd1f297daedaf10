"""The charts of a report as one PNG, by matplotlib, which is optional."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.report.charts import FROM_ZERO, Chart

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#444444", "#e69f00")
"""Of runs: Okabe and Ito's, which people tell apart whatever colours they see (jfly.uni-koeln.de/color)."""
STYLES: dict[str, dict[str, Any]] = {
    "training": {"linewidth": 1.2},
    "each": {"linewidth": 0.8, "alpha": 0.3},
    "mean": {"linewidth": 1.8},
    "held-out": {"linewidth": 1.2, "linestyle": "--", "marker": "o", "markersize": 3},
    "predicted": {"linewidth": 1.0, "linestyle": ":"},
}

HEAD = 0.62
"""Inches above the charts, where the names of the runs stand."""
SIDES = {"left": 0.075, "right": 0.985}


def draw(charts: Sequence[Chart], names: Sequence[str], file: Path) -> bool:
    """Write the picture; whether there is a matplotlib to draw it.

    Raises:
        OSError: if it cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = -(-len(charts) // 2)
    height = HEAD + 2.5 * rows
    figure = Figure(figsize=(11, height), dpi=110)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(top=1 - HEAD / height, bottom=0.4 / height, **SIDES, wspace=0.18, hspace=0.42)
    for number, chart in enumerate(charts, start=1):
        _plot(chart, figure.add_subplot(rows, 2, number))
    for number, name in enumerate(names):
        across = SIDES["left"] + number * 0.7 / len(names)
        figure.text(
            across, 1 - 0.24 / height, name, color=_colour(number), fontsize=11, weight="bold", parse_math=False
        )
    figure.text(SIDES["right"], 1 - 0.24 / height, _how_drawn(charts), fontsize=9, color="#666666", ha="right")
    figure.savefig(file)
    return True


def _plot(chart: Chart, axes: Any) -> None:
    for line in chart.lines:
        axes.plot(*zip(*line.points), color=_colour(line.run), **STYLES[line.kind])
    if chart.key in FROM_ZERO:
        axes.set_ylim(bottom=0)
    axes.set_title(chart.title + (f" ({chart.unit})" if chart.unit else ""), loc="left", fontsize=10)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.tick_params(labelsize=8, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _colour(run: int) -> str:
    return COLOURS[run % len(COLOURS)]


def _how_drawn(charts: Sequence[Chart]) -> str:
    kinds = {line.kind for chart in charts for line in chart.lines}
    return "   ".join(
        f"{how}: {kind}" for kind, how in {"held-out": "dashed", "predicted": "dotted"}.items() if kind in kinds
    )
