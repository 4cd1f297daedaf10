"""An answer in a terminal, within 80 columns."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.cli.planning.launch_command import in_lines, launch_command
from finetune.cli.planning.reasons import joined, reasons
from finetune.planner.changes import reduction
from finetune.planner.choose import Plan
from finetune.planner.judged_rows import COMFORTABLE, Row
from finetune.planner.memory import PARTS
from finetune.planner.preference import SAME_SPEED
from finetune.planner.question import Question
from finetune.units import GIB

SHORT = dict(zip(PARTS, ("wts", "grad", "opt", "act", "loss", "gath", "work"), strict=True))
LEGEND = (
    "GiB of a GPU at the peak of a step: weights, gradients, optimizer, activations, logits and loss, gathered layers "
    "and buckets, workspace. ckpt: layers that are recomputed; mb: rows of a micro-batch."
)
STYLES = {"fits": "green", "tight": "yellow", "does not fit": "red"}
WORDS = {"fits": "fits", "tight": "tight", "does not fit": "no"}


def print_plan(plan: Plan, console: Console, *, model: str, notes: Sequence[str] = (), shows_all: bool = False) -> None:
    """Show an answer.

    Args:
        notes: sentences on what was assumed.
        shows_all: also the rows that do not fit, which are shown anyway where none does.
    """
    fitting = [row for row in plan.rows if row.verdict != "does not fit"]
    rows = list(plan.rows) if shows_all or not fitting else fitting
    _say(console, _opening(plan.question, model), "bold")
    console.print()
    console.print(_memory_table(plan, rows))
    _say(console, LEGEND + _legend_of_reduced(plan, rows), "dim")
    console.print()
    console.print(_needs_table(plan, rows))
    _say(console, _needs_legend(plan.question), "dim")
    if hidden := len(plan.rows) - len(rows):
        _say(
            console,
            f"{hidden} more {'does' if hidden == 1 else 'do'} not fit; --all shows {'it' if hidden == 1 else 'them'}.",
        )
    for strategy, why in {each.strategy: each.why for each in plan.impossible if each.is_untraced}.items():
        _say(console, f"{strategy} is not compared. {why}")
    console.print()
    _print_advice(console, plan)
    for note in (*_notes(plan), *notes):
        _say(console, note)


def _opening(question: Question, model: str) -> str:
    machines = question.machines
    return (
        f"{model}: {_count(question.model.anatomy.parameters)} weights on {machines.text} "
        f"({machines.gpu.memory_gib:.1f} GiB each); {question.global_batch_size} rows of "
        f"{question.base.row_tokens} tokens a step"
    )


def _count(number: int) -> str:
    """Three digits or four."""
    if number >= 1e9:
        return f"{number / 1e9:.2f} billion"
    return f"{number / 1e6:.1f} million" if number >= 1e6 else f"{number:,}"


def _memory_table(plan: Plan, rows: Sequence[Row]) -> Table:
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("ckpt", lambda row: row.setting.recomputes),
        ("mb", lambda row: str(row.setting.micro_batch_size)),
    ]
    columns += [(SHORT[kind], _part(kind)) for kind in PARTS]
    columns.append(("peak", lambda row: gib(row.memory.peak)))
    return _table(plan, rows, columns)


def _legend_of_reduced(plan: Plan, rows: Sequence[Row]) -> str:
    """Rows of one method, full fine-tuning, are all reduced alike."""
    for row in rows:
        if reduced := reduction(row.setting, plan.question.base):
            return f" *: with {joined(reduced)}."
    return ""


def _part(kind: str) -> Callable[[Row], str]:
    return lambda row: gib(row.memory.parts[kind])


def _needs_table(plan: Plan, rows: Sequence[Row]) -> Table:
    fastest = max(row.time.tokens_per_second for row in rows)
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("needed", lambda row: gib(row.gpu.bytes)),
        ("of GPU", lambda row: f"{row.gpu.share or 0:.0%}"),
        ("host", lambda row: gib(row.host.bytes)),
        ("disk", lambda row: gib(row.disk.bytes)),
    ]
    if plan.stand_in is None:
        columns.append(("tokens/s", lambda row: f"{row.time.tokens_per_second:,.0f}"))
        columns.append(("MFU", lambda row: f"{row.time.mfu:.0%}"))
        epoch = plan.question.epoch_tokens
        if epoch is not None:
            columns.append(("h/epoch", lambda row: f"{row.time.seconds_for(epoch) / 3600:,.1f}"))
    else:
        columns.append(("speed", lambda row: f"{row.time.tokens_per_second / fastest:.0%}"))
    return _table(plan, rows, columns)


def _table(plan: Plan, rows: Sequence[Row], columns: Sequence[tuple[str, Callable[[Row], str]]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    for head in ("", "strategy", "method"):
        table.add_column(head)
    for head, _ in columns:
        table.add_column(head, justify="right")
    table.add_column("")
    for row in rows:
        method = row.setting.method.text + ("*" if reduction(row.setting, plan.question.base) else "")
        cells = [">" if row is plan.best else "", row.setting.launched, method, *(cell(row) for _, cell in columns)]
        style = "bold" if row is plan.best else ""
        table.add_row(*(Text(cell, style) for cell in cells), Text(WORDS[row.verdict], STYLES[row.verdict]))
    return table


def gib(size: float) -> str:
    """At most four characters up to 9,999 GiB; 0 is a dot."""
    value = size / GIB
    return "." if size == 0 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _needs_legend(question: Question) -> str:
    gib_of_gpu = question.machines.gpu.memory_gib
    text = (
        f"needed: peak, fragmentation, CUDA context and NCCL buffers; fits: up to {COMFORTABLE:.0%} of "
        f"{gib_of_gpu:.1f} GiB. host: GiB of memory per machine"
    )
    text += f", of {gib(question.host_bytes)}" if question.host_bytes is not None else ""
    text += "; disk: GiB per checkpoint and of swap."
    return f"{text} Speeds within {SAME_SPEED:.0%} count as equal: there the simplest comes first."


def _print_advice(console: Console, plan: Plan) -> None:
    """The first sentence is the answer."""
    first, *others = reasons(plan)
    _say(console, first, "bold")
    for sentence in others:
        _say(console, sentence)
    if plan.best is not None:
        console.print()
        console.print(Text(in_lines(launch_command(plan.question, plan.best.setting))), soft_wrap=True)
        console.print()


def _notes(plan: Plan) -> list[str]:
    stand_in = plan.stand_in
    if stand_in is None:
        return ["Predicted from traces and data sheets, not measured; speeds are rougher than memory."]
    return [
        "Predicted from traces, not measured. The speed of "
        f"{plan.question.machines.gpu.name} is unknown; options are compared as on {stand_in}, links included."
    ]


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style))
