"""``finetune report``: runs on a page, beside each other. Imports nothing that is slow before it is called."""

import argparse
import json
from pathlib import Path
from typing import Any

from finetune.errors import InputError


def add_report(verbs: Any) -> None:
    """The verb that tells of runs."""
    report = verbs.add_parser(
        "report",
        help="write a page and a picture of one or several runs: losses, speed, memory, data, answers",
        description="Write a page of what came of a run, or of several side by side: courses of all figures, memory, "
        "data, answers, and in what their configurations differ. A run that is still at work has one too. A picture of "
        "the same charts is written beside the page, as PNG, where matplotlib is installed.",
    )
    report.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="output folder of a run")
    report.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="HTML file to write; default: report.html in the folder of the run, or of several in the current one",
    )
    report.add_argument("--json", action="store_true", help="print every figure as JSON instead")
    report.set_defaults(run=_report, late_words="runs")


def _report(options: argparse.Namespace) -> int:
    from finetune.output.output_folder import REPORT
    from finetune.report import pages
    from finetune.report.run_read import read_runs

    runs = read_runs(options.runs)
    page = options.output or (options.runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    if page.suffix.lower() != ".html":
        raise InputError(f"--output {page}: the name must end in .html; the picture takes the same name.")
    if options.json:
        print(json.dumps(pages.to_json(runs), indent=1, default=str, allow_nan=False))
        return 0
    try:
        print(pages.write(runs, page, page.with_suffix(".png")))
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{page} cannot be written ({reason}); choose another file with --output.") from error
    return 0
