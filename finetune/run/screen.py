"""What a person sees of a run: a progress bar in a terminal, plain lines in a file. Main process only."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from finetune.units import spoken


class Preparing:
    """Shows what is prepared before the run, and how far: a line that moves in a terminal, else a line now and then."""

    EVERY_SECONDS = 20.0

    def __init__(self, *, shown: bool) -> None:
        self.console = Console(
            quiet=not shown, highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=sys.stdout.isatty()
        )
        self.status = self.console.status("") if self.console.is_terminal else None
        self.doing, self.told = "", 0.0

    def __enter__(self) -> "Preparing":
        if self.status:
            self.status.start()
            self.console.show_cursor(True)  # a signal may end the process at once, and leave it hidden
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.status:
            self.status.stop()

    def __call__(self, doing: str, rows: int) -> None:
        """Args: what is done, and how many rows are ready."""
        text = escape(f"{doing}: {rows:,} rows" if rows else doing)
        if self.status:
            self.status.update(text)
        elif doing != self.doing or time.monotonic() - self.told > self.EVERY_SECONDS:
            self.console.print(text)
            self.doing, self.told = doing, time.monotonic()


class Screen:
    """Prints on the main process and is silent on the others; a context manager around the steps of a run."""

    def __init__(self, *, shown: bool, total_steps: int, every: int) -> None:
        """Args: whether this process prints, the steps of the run, and the steps between lines in a file."""
        # A notebook gets plain lines too: processes forked from it can send nothing else, and though it asks for
        # colours (FORCE_COLOR) it is no terminal in which a bar could be redrawn.
        self.console = Console(
            quiet=not shown, highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=sys.stdout.isatty()
        )
        self.total_steps, self.every = total_steps, every
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not (shown and self.console.is_terminal),
        )

    def __enter__(self) -> "Screen":
        self.task = self.bar.add_task("", total=self.total_steps, figures="")
        self.bar.start()
        self.console.show_cursor(True)  # as above
        self.seconds, self.steps = 0.0, 0
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(escape(text))

    def step(self, metrics: dict[str, Any]) -> None:
        """Show one optimizer step, given as its line of metrics.jsonl."""
        step = metrics["step"]
        self.seconds, self.steps = self.seconds + metrics["step_seconds"], self.steps + 1
        loss = "not finite" if metrics["loss"] is None else f"{metrics['loss']:.4f}"
        accuracy = f"  accuracy {metrics['accuracy']:.0%}" if "accuracy" in metrics else ""
        figures = f"loss {loss}{accuracy}  {metrics['tokens_per_second']:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, figures=figures)
        if self.bar.disable and (step % self.every == 0 or step == self.total_steps):
            left = self.seconds / self.steps * (self.total_steps - step)
            norm = "overflow" if metrics["grad_norm"] is None else f"{metrics['grad_norm']:.3f}"
            self.say(f"step {step}/{self.total_steps}  {figures}  grad norm {norm}  {spoken(left)} left")
        if "not_finite" in metrics:
            rows = metrics["rows"]
            named = ", ".join(rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")
            self.say(
                f"step {step}: the {metrics['not_finite']} is not finite, so the step was skipped; its rows: {named}"
            )
        if "eval_loss" in metrics:
            held_out = f", accuracy {metrics['eval_accuracy']:.0%}" if "eval_accuracy" in metrics else ""
            self.say(f"step {step}: held-out loss {metrics['eval_loss']:.4f}{held_out}")

    def answers(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Show what the model answered before and after training, by question."""
        table = Table(show_lines=True, width=min(80, self.console.width), title="Held-out answers")
        for column in ("prompt", "before", "after"):
            table.add_column(column, ratio=1, overflow="fold")
        for question, answer in after.items():
            table.add_row(*(escape(text) for text in (question, before.get(question, "(not asked)"), answer)))
        self.console.print(table)
