"""A plot of a GPU's memory over one optimizer step, by what it is for, drawn with matplotlib."""

from itertools import groupby
from pathlib import Path
from typing import Any

from finetune.errors import InputError
from finetune.planner.judged_rows import Row
from finetune.planner.memory import StepMemory
from finetune.units import GIB

COLOURS = {
    "weights": ("weights", "#4477aa"),
    "optimizer": ("optimizer", "#228833"),
    "gradients": ("gradients", "#66ccee"),
    "activations": ("activations", "#ee6677"),
    "loss": ("logits", "#ccbb44"),
    "gathered": ("in transit", "#aa3377"),
    "workspace": ("workspace", "#bbbbbb"),
}
"""Names in the picture and colours of the parts of a step's memory, from the lowest."""
FORMATS = (".png", ".svg", ".pdf")


def problems(file: Path) -> list[str]:
    """Why a picture cannot be written there, as sentences."""
    if file.suffix.lower() not in FORMATS:
        return [f"--plot {file}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."]
    if not file.absolute().parent.is_dir():
        return [f"--plot {file}: there is no folder {file.parent}; create it, or choose another file."]
    return []


def draw_areas(axes: Any, memory: StepMemory) -> None:
    """Stack what a step's memory is for over the step, in GiB, from the first allocation to the last.

    Args:
        axes: matplotlib's; the areas get labels for a legend.
    """
    course = memory.course
    present = [part for part in COLOURS if any(parts.get(part) for _, parts in course)]
    areas = [[parts.get(part, 0) / GIB for _, parts in course] for part in present]
    names, colours = zip(*(COLOURS[part] for part in present))
    axes.stackplot(range(len(course)), areas, labels=names, colors=colours, alpha=0.8, linewidth=0)
    for phase, group in groupby(range(len(course)), key=lambda place: course[place][0]):
        start = next(group)
        axes.axvline(start, color="white", linewidth=1)
        axes.annotate(phase, (start, 0.98), (3, 0), ("data", "axes fraction"), "offset points", va="top", fontsize=9)
    axes.set(xlim=(0, len(course) - 1), xticks=[])


def draw(row: Row, file: Path, *, title: str) -> None:
    """Write a picture of the step that a row predicts.

    Raises:
        InputError: if matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "--plot needs matplotlib, which is not installed; install it with: pip install matplotlib."
        ) from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw_areas(axes, row.memory)
    there = (row.gpu.there or 0) / GIB
    axes.axhline(there, color="black", linewidth=1)
    axes.annotate(f"GPU memory: {there:.1f} GiB", (0, there), (4, 3), textcoords="offset points", fontsize=9)
    axes.axhline(row.memory.peak / GIB, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(
        f"peak: {row.memory.peak / GIB:.1f} GiB, {row.gpu.bytes / GIB:.1f} with memory outside the allocator",
        (0, row.memory.peak / GIB),
        (4, 3),
        textcoords="offset points",
        fontsize=9,
    )
    axes.set(ylabel="GiB", title=title)
    axes.set_ylim(0, 1.1 * max(there, row.memory.peak / GIB))
    axes.set_xlabel("one optimizer step, by allocation, middle layers merged into one (predicted)")
    figure.legend(reverse=True, loc="outside right upper")
    try:
        figure.savefig(file)
    except OSError as error:
        raise InputError(f"--plot {file}: cannot be written ({error.strerror}); choose another file.") from error
