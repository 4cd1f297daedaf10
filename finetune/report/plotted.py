"""The charts of a report as one PNG, by matplotlib, which is optional."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.report.charts import Chart

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#444444", "#e69f00")
"""Of runs: Okabe and Ito's, which people tell apart whatever colours they see (jfly.uni-koeln.de/color)."""
STYLES: dict[str, dict[str, Any]] = {
    "training": {"linewidth": 1.2},
    "each": {"linewidth": 0.8, "alpha": 0.3},
    "mean": {"linewidth": 1.8},
    "held-out": {"linewidth": 1.2, "linestyle": "--", "marker": "o", "markersize": 3},
    "predicted": {"linewidth": 1.0, "linestyle": ":"},
}


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
    figure = Figure(figsize=(11, 0.6 + 2.5 * rows), dpi=110)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=0.075, right=0.985, top=1 - 0.62 / (0.6 + 2.5 * rows), bottom=0.07, wspace=0.18, hspace=0.42
    )
    for number, chart in enumerate(charts, start=1):
        axes = figure.add_subplot(rows, 2, number)
        for line in chart.lines:
            axes.plot(*zip(*line.points), color=COLOURS[line.run % len(COLOURS)], **STYLES[line.kind])
        axes.set_title(chart.title + (f" ({chart.unit})" if chart.unit else ""), loc="left", fontsize=10)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.tick_params(labelsize=8, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set_xlim(left=min(0, *(line.points[0][0] for line in chart.lines)))
    for number, name in enumerate(names):
        figure.text(
            0.075 + number * 0.9 / len(names),
            1 - 0.22 / (0.6 + 2.5 * rows),
            name,
            color=COLOURS[number % len(COLOURS)],
            fontsize=11,
            weight="bold",
        )
    figure.savefig(file)
    return True
