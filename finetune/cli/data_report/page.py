"""A report as JSON, and as a self-contained page without network access or scripts.

The page escapes everything, so the data cannot inject anything into it.
"""

import json
from dataclasses import asdict, replace
from importlib import resources

import jinja2

from finetune.cli.data_report import wording
from finetune.cli.data_report.figures import Report
from finetune.cli.data_report.row_text import shorten, visible


def to_json(report: Report) -> str:
    """Every figure, under the names of the report's fields."""
    return json.dumps(asdict(report), indent=1)


def to_html(report: Report) -> str:
    """The page."""
    template = (resources.files(__package__) / "page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    rows = []
    for row in report.examples:
        stretches = shorten(row.stretches, trained=4000, untrained=2000, most=400)
        rows.append((wording.title(row), [replace(stretch, text=visible(stretch.text)) for stretch in stretches]))
    return environment.from_string(template).render(
        report=report,
        verdict=wording.verdict(report),
        sources=wording.source_table(report),
        sections=wording.sections(report),
        lines=wording.histogram_lines(report.lengths.histogram, report.max_length),
        packing=wording.packing_table(report),
        speed=wording.speed(report),
        how_chosen=wording.how_chosen(report),
        rows=rows,
        left_out_line=visible(wording.left_out_line(report)),
        left_out=[visible(f"{entry.source}: {entry.reason}") for entry in report.left_out],
    )
