"""``finetune doctor``: whether training can start here, and what to do where it cannot."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune import __version__
from finetune.cli.health import gpu_state, host_state, hub_state, installed_libraries
from finetune.cli.health.finding import Finding

SCHEMA = 1
"""Raised when a key of the JSON changes its meaning or goes."""
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def doctor(*, as_json: bool) -> int:
    """Look at everything and tell of it; returns the exit code: 1 if training cannot start."""
    with Console(stderr=True).status("Looking at this machine"):
        examined = (installed_libraries, gpu_state, host_state, hub_state)
        findings = [finding for module in examined for finding in module.examine()]
    can_train = all(finding.state != "error" for finding in findings)
    if as_json:
        found = [asdict(finding) for finding in findings]
        print(
            json.dumps({"schema": SCHEMA, "finetune": __version__, "can_train": can_train, "findings": found}, indent=2)
        )
    else:
        show(findings, Console(highlight=False, emoji=False, markup=False))
    return 0 if can_train else 1


def show(findings: Sequence[Finding], console: Console) -> None:
    """A table as wide as the terminal, and a last line that sums it up."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("what", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("seen, and what to do", overflow="fold")
    for finding in findings:
        told = Text("\n".join(filter(None, (finding.seen, finding.do and f"-> {finding.do}"))))
        table.add_row(finding.what, Text(finding.state, STYLES[finding.state]), told)
    console.print(table)
    counts = Counter(finding.state for finding in findings)
    if counts["error"]:
        console.print("Training cannot start: see the errors.")
    else:
        console.print(f"Training can start{'; see the warnings' if counts['warning'] else ''}.")
