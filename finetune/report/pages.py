"""The report as one self-contained page: no script, nothing from the network. It escapes whatever the data say."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from finetune.errors import first_line
from finetune.output.output_folder import PICTURE, REPORT
from finetune.output.run_reading import finite
from finetune.report import plotted, tables
from finetune.report.charts import as_json, charts_of
from finetune.report.drawn import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, describe_resumption, drawn
from finetune.report.memory_bars import memory_bars
from finetune.report.run_read import RunRead, read_runs
from finetune.report.tables import Table
from finetune.yaml_text import as_yaml


def of_finished_run(folder: Path) -> str:
    """Write report.html and, with matplotlib, report.png into the folder of a run; returns a line on it.

    A run that is finished is not lost because its report cannot be written; the other processes wait for this one.
    """
    try:
        return write(read_runs([folder]), folder / REPORT, folder / PICTURE)
    except Exception as error:  # of any type: of a full disk, of a broken style file of matplotlib
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        return (
            f"no report was written ({why}); the result of the run is complete, and `finetune report {folder}` tries "
            "again"
        )


def write(runs: Sequence[RunRead], page: Path, picture: Path) -> str:
    """Write the page and, with matplotlib, the picture; returns a line on it.

    Raises:
        OSError: if one of them cannot be written.
    """
    page.write_text(to_html(runs), encoding="utf-8")
    charts = charts_of(runs)
    if not charts:
        return f"report: {page}"
    if not plotted.draw(charts, [run.name for run in runs], picture):
        return f"report: {page} (for {picture.name} beside it, run `pip install matplotlib`)"
    return f"report: {page} and {picture.name}"


def to_html(runs: Sequence[RunRead]) -> str:
    """The page."""
    template = (resources.files(__package__) / "report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        runs=runs,
        title=" · ".join(run.name for run in runs),
        notes=[f"{run.name}: {note}" for run in runs for note in _notes(run)],
        summary=tables.summary(runs),
        drawings=[drawn(chart, runs) for chart in charts_of(runs)],
        frame={
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "top": TOP,
            "bottom": HEIGHT - BOTTOM,
        },
        differences=tables.differences(runs) if len(runs) > 1 else None,
        memory=[(run.name, bars) for run in runs if (bars := memory_bars(run))],
        data=[(run.name, table, *_histogram(run)) for run in runs if (table := tables.data(run)).rows],
        answers=[(run.name, run.listed("answers")) for run in runs if run.listed("answers")],
        configurations=[(run.name, _as_yaml(run)) for run in runs if run.record],
    )


def to_json(runs: Sequence[RunRead]) -> dict[str, Any]:
    """What the page shows, for a program."""

    def table(shown: Table) -> dict[str, dict[str, str]]:
        return {row[0]: dict(zip(shown.head[1:], row[1:])) for row in shown.rows}

    return {
        "runs": [{"name": run.name, **finite(run.record), "unread_lines": run.unread} for run in runs],
        "summary": table(tables.summary(runs)),
        "differences": table(tables.differences(runs)) if len(runs) > 1 else {},
        "charts": as_json(charts_of(runs)),
    }


def _notes(run: RunRead) -> list[str]:
    """What a reader should know of how these figures came about."""
    notes = [describe_resumption(each) for each in run.listed("resumed")]
    if not run.steps:
        notes.append("no step is complete yet")
    if not run.record:
        notes.append("run.yaml is missing or cannot be read")
    if run.unread:
        notes.append(
            f"{run.unread} line{'s' if run.unread > 1 else ''} of metrics.jsonl cannot be read and are left out"
        )
    if bad := run.last("bad_steps"):
        notes.append(
            f"{bad:.0f} step{'s were' if bad > 1 else ' was'} left out, because a loss or gradient was not finite"
        )
    return notes


def _histogram(run: RunRead) -> tuple[list[tuple[str, float]], str]:
    """Of training rows by their lengths: a text for each part with its share of the highest; and the longest."""
    found = run.part("data_figures", "train", "lengths")
    if not found:
        return [], ""
    highest = max(found["rows"])
    bounds = [0, *found["up_to"]]
    bars = [
        (f"{begin + 1:,} to {end:,} tokens: {rows:,} rows", rows / highest)
        for begin, end, rows in zip(bounds, found["up_to"], found["rows"])
    ]
    return bars, f"{bounds[-1]:,} tokens"


def _as_yaml(run: RunRead) -> str:
    shown = {key: run.record[key] for key in run.record if key not in ("answers", "data_figures", "chat_template")}
    return as_yaml(shown)
