"""A plot of a GPU's memory over one optimizer step, by matplotlib."""

from itertools import groupby
from pathlib import Path

from finetune.errors import InputError
from finetune.planner.judged_rows import Row
from finetune.units import GIB

COLOURS = {"forward": "#4477aa", "loss": "#ccbb44", "backward": "#ee6677", "step": "#228833"}
FORMATS = (".png", ".svg", ".pdf")


def problems(file: Path) -> list[str]:
    """Why a picture cannot be written there, as sentences."""
    if file.suffix.lower() not in FORMATS:
        return [f"--plot {file}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}."]
    if not file.absolute().parent.is_dir():
        return [f"--plot {file}: there is no folder {file.parent}; create it, or choose another file."]
    return []


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
            "--plot needs matplotlib, which is not installed; install it with: pip install 'finetune[notebooks]'."
        ) from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = list(enumerate(row.memory.course))
    last = places[0]
    for phase, group in groupby(places, key=lambda place: place[1][0]):
        part = [last, *group]
        axes.fill_between(
            [place for place, _ in part],
            [size / GIB for _, (_, size) in part],
            color=COLOURS.get(phase, "#bbbbbb"),
            alpha=0.75,
            linewidth=0,
            label=phase,
        )
        last = part[-1]
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
    axes.set(xlim=(0, len(places) - 1), xticks=[], ylabel="GiB", title=title)
    axes.set_ylim(0, 1.1 * max(there, row.memory.peak / GIB))
    axes.set_xlabel("one optimizer step, by allocation, middle layers merged into one (predicted)")
    handles, names = axes.get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    figure.legend(once.values(), once.keys(), loc="outside right upper")
    try:
        figure.savefig(file)
    except OSError as error:
        raise InputError(f"--plot {file}: cannot be written ({error.strerror}); choose another file.") from error
