"""What a person sees of a run: a progress bar in a terminal, plain lines in a file. Main process only."""

import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from finetune.run.sparkline import Sparkline
from finetune.run.standard_output import console
from finetune.units import spoken

MOST_OF_COURSE = 32
"""Characters."""


class Preparing:
    """Shows what is prepared before the run, and how far: a line that moves in a terminal, else a line now and then."""

    EVERY_SECONDS = 20.0

    def __init__(self, *, shown: bool) -> None:
        self.console = console(shown=shown)
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


def _figures(metrics: Mapping[str, Any]) -> list[str]:
    """Of a step, as texts: the loss first."""
    return [
        "loss not finite" if metrics["loss"] is None else f"loss {metrics['loss']:.4f}",
        *([f"accuracy {metrics['accuracy']:.0%}"] if "accuracy" in metrics else []),
        f"lr {metrics['learning_rate']:.2e}",
        "grad norm overflow" if metrics["grad_norm"] is None else f"grad norm {metrics['grad_norm']:.3f}",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
    ]


class _Bar(Progress):
    """How far the run is and how long it takes, with its figures in a line below."""

    figures = Text()

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield self.figures


class Screen:
    """Prints on the main process and is silent on the others; a context manager around the steps of a run."""

    def __init__(self, *, shown: bool, total_steps: int, every: int, scores: Mapping[str, str] | None = None) -> None:
        """
        Args:
            shown: whether this process prints.
            total_steps: of the run.
            every: steps between lines in a file.
            scores: what figures of an evaluation are called, by their keys.
        """
        self.console = console(shown=shown)
        self.total_steps, self.every, self.scores = total_steps, every, scores or {}
        self.losses = Sparkline()
        self.bar = _Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not (shown and self.console.is_terminal),
        )

    def __enter__(self) -> "Screen":
        self.task = self.bar.add_task("", total=self.total_steps, left="")
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
        left = f"{spoken(self.seconds / self.steps * (self.total_steps - step))} left"
        loss, *others = _figures(metrics)
        self.losses.add(metrics["loss"])
        self.bar.update(self.task, completed=step, left=left)
        self.bar.figures = self._live_line(loss, "  ".join(others))
        if self.bar.disable and (step % self.every == 0 or step == self.total_steps):
            self.say("  ".join([f"step {step}/{self.total_steps}", loss, *others, left]))
        if "not_finite" in metrics:
            rows = metrics["rows"]
            named = ", ".join(rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")
            self.say(
                f"step {step}: the {metrics['not_finite']} is not finite, so the step was skipped; its rows: {named}"
            )
        self.evaluation(metrics)

    def evaluation(self, metrics: dict[str, Any]) -> None:
        """Show the figures of an evaluation, if the step's line of metrics.jsonl has some."""
        step = metrics["step"]
        if "eval_loss" in metrics:
            held_out = f", accuracy {metrics['eval_accuracy']:.0%}" if "eval_accuracy" in metrics else ""
            self.say(f"step {step}: held-out loss {metrics['eval_loss']:.4f}{held_out}")
        for key, label in self.scores.items():
            if key in metrics:
                self.say(f"step {step}: {label} {metrics[key]:.1%}")

    def _live_line(self, loss: str, others: str) -> Text:
        """The figures in one line, with as much of the losses' course as there is room for."""
        room = min(MOST_OF_COURSE, self.console.width - len(f"{loss}   {others}"))
        can_show = room > 0 and not self.console.options.ascii_only
        course = self.losses.text(room) if can_show else ""
        return Text.assemble(f"{loss} ", (course, "cyan"), f"  {others}", no_wrap=True, overflow="ellipsis")

    def answers(self, answered: Sequence[Mapping[str, str]]) -> None:
        """Show what the model answered before and after training, as run.yaml tells it."""
        table = Table(show_lines=True, width=min(80, self.console.width), title="Held-out answers")
        for column in ("prompt", "before", "after"):
            table.add_column(column, ratio=1, overflow="fold")
        for each in answered:
            table.add_row(*(escape(each.get(column, "(not asked)")) for column in ("prompt", "before", "after")))
        self.console.print(table)
