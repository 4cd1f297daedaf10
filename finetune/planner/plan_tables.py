"""An answer in a terminal, within 80 columns."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.planner.choose import Plan
from finetune.planner.judged_rows import COMFORTABLE, Row
from finetune.planner.launch_command import in_lines
from finetune.planner.question import Question
from finetune.planner.tape import KINDS
from finetune.units import GIB

SHORT = dict(zip(KINDS, ("wts", "grad", "opt", "act", "loss", "gath", "work"), strict=True))
LEGEND = (
    "GiB of a GPU at the peak of a step: weights, gradients, optimizer, activations, logits and loss, gathered layers "
    "and buckets, workspace. ckpt: activation checkpointing; mb: rows of a micro-batch."
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
    best = plan.recommendation.row if plan.recommendation else None
    _say(console, _opening(plan.question, model), "bold")
    console.print()
    console.print(_memory_table(rows, best))
    _say(console, LEGEND, "dim")
    console.print()
    console.print(_needs_table(plan, rows, best))
    _say(console, _needs_legend(plan.question), "dim")
    if hidden := len(plan.rows) - len(rows):
        _say(console, f"{hidden} more do not fit; --all shows them.")
    console.print()
    _print_advice(console, plan)
    for note in (*_notes(plan), *notes):
        _say(console, note)


def _opening(question: Question, model: str) -> str:
    machines = question.machines
    return (
        f"{model}: {question.shape.parameters / 1e9:.2f} billion weights on {machines.text} "
        f"({machines.gpu.memory_gib:.1f} GiB each); {question.global_batch_size} rows of "
        f"{question.base.row_tokens} tokens a step"
    )


def _memory_table(rows: Sequence[Row], best: Row | None) -> Table:
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("ckpt", lambda row: "full" if row.setting.activation_checkpointing else "none"),
        ("mb", lambda row: str(row.setting.micro_batch_size)),
    ]
    columns += [(SHORT[kind], _part(kind)) for kind in KINDS]
    columns.append(("peak", lambda row: gib(row.memory.peak)))
    return _table(rows, best, columns)


def _part(kind: str) -> Callable[[Row], str]:
    return lambda row: gib(row.memory.parts[kind])


def _needs_table(plan: Plan, rows: Sequence[Row], best: Row | None) -> Table:
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
    return _table(rows, best, columns)


def _table(rows: Sequence[Row], best: Row | None, columns: Sequence[tuple[str, Callable[[Row], str]]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    for head in ("", "strategy", "method"):
        table.add_column(head)
    for head, _ in columns:
        table.add_column(head, justify="right")
    table.add_column("")
    for row in rows:
        cells = [">" if row is best else "", row.setting.strategy, row.method.text, *(cell(row) for _, cell in columns)]
        style = "bold" if row is best else ""
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
    return text + "; disk: GiB per checkpoint."


def _print_advice(console: Console, plan: Plan) -> None:
    if plan.recommendation is not None:
        _say(console, plan.recommendation.reason, "bold")
        console.print()
        console.print(Text(in_lines(plan.recommendation.command)), soft_wrap=True)
        console.print()
    elif plan.nearest is not None:
        _say(
            console,
            f"Nothing fits. The nearest option that fits is {plan.nearest.row.name}: {plan.nearest.text}.",
            "bold",
        )
    else:
        least = plan.rows[0]
        worst = least.worst
        _say(
            console,
            f"Nothing fits, and no similar option does: {least.name} needs {gib(worst.bytes)} GiB of {worst.what}, but "
            f"there are {gib(worst.there or 0)} GiB. Use more or larger GPUs, or a smaller model.",
            "bold",
        )


def _notes(plan: Plan) -> list[str]:
    stand_in = plan.stand_in
    if stand_in is None:
        return ["Predicted from formulas and data sheets, not measured; speeds are rougher than memory."]
    return [
        "Predicted from formulas, not measured. The speed of "
        f"{plan.question.machines.gpu.name} is unknown; options are compared at the speed of {stand_in}."
    ]


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style))
