"""``finetune plan``: what fits on which GPUs, under which strategy, how fast, before anything is loaded."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from finetune.cli.planning import picture, probed
from finetune.cli.planning.asked import Asked, asked
from finetune.cli.planning.json_answer import record
from finetune.cli.planning.machine import gpus_here
from finetune.cli.planning.plan_tables import print_plan
from finetune.cli.planning.probe import probe_in_child
from finetune.cli.planning.written import Options
from finetune.errors import refuse_if_any
from finetune.models.model_config import read_config
from finetune.planner.choose import Plan, plan


@dataclass(frozen=True)
class Shown:
    """How an answer is shown, and whether it is probed."""

    as_json: bool = False
    all_rows: bool = False
    plot: Path | None = None
    probes: bool = False


def show(arguments: Sequence[str], options: Options, shown: Shown) -> int:
    """Answer a question; the exit code is 0 if something fits, and 1 if nothing does.

    Args:
        arguments: ``--config FILE`` and flags of the recipe.

    Raises:
        InputError: for wrong input.
        RunStopped: if the libraries here cannot be traced, or a probe failed.
    """
    refuse_if_any(picture.problems(shown.plot) if shown.plot is not None else [])
    if shown.probes:
        gpus_here("leave out --probe, which takes real steps on one")
    with tracing_progress() as on_progress:
        question = asked(arguments, options, on_progress)
        with question.question.model.tracer:
            answer = plan(question.question)
            return _show(question, answer, shown)


@contextmanager
def tracing_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal while steps are traced; nothing where nobody looks."""
    console = Console(stderr=True)
    columns = (TextColumn("Tracing the step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks: list[TaskID] = []

        def tell(done: int, of: int) -> None:
            if not tasks:
                tasks.append(progress.add_task("", total=of))
            progress.update(tasks[0], completed=done, total=of)

        yield tell


def _show(question: Asked, answer: Plan, shown: Shown) -> int:
    first = answer.rows[0]
    name = Path(question.model).stem if question.model.endswith(".json") else Path(question.model).name
    extra: dict[str, Any] = {}
    lines: list[str] = []
    if shown.probes:
        lines += ["", *_probe(question, answer, extra)]
    if shown.plot is not None:
        title = f"{name}: {first.name} on {question.question.machines.text}"
        picture.draw(first, shown.plot, title=title)
        lines += ["", f"Plotted the memory of {first.name} to {shown.plot}."]
    if shown.as_json:
        print(json.dumps(record(answer, model=question.model, notes=question.notes) | extra, indent=2))
    else:
        console = Console(highlight=False, emoji=False, markup=False)
        print_plan(answer, console, model=name, notes=question.notes, shows_all=shown.all_rows)
        for line in lines:
            console.print(line, soft_wrap=True)
    return 0 if answer.best is not None else 1


def _probe(question: Asked, answer: Plan, extra: dict[str, Any]) -> list[str]:
    """Real steps on this machine's GPU."""
    row = probed.row_to_probe(answer.rows, question.question, gpus_here())
    real = probe_in_child(read_config(question.model, question.revision), probed.probed_setting(row))
    extra["probe"] = probed.compared(row, question.question, real)
    return probed.lines_of(row, extra["probe"])
