"""A report in a terminal, or as plain text with a terminal's width.

The data cannot control the terminal: control characters are replaced by symbols.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

from rich.cells import chop_cells
from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.cli.data_report import wording
from finetune.cli.data_report.figures import Report
from finetune.cli.data_report.row_text import TextSpan, shorten, visible
from finetune.cli.data_report.wording import Line

BAR = 30
"""Columns of the longest bar in a terminal."""
TRAINED = "green"
MARKS = (("«", "»"), ("⟦", "⟧"), ("⟪", "⟫"), ("❮", "❯"))
"""Marks around trained text without colours; the first pair that does not occur in the rows is used."""


def print_report(report: Report, console: Console) -> None:
    """Show a report in a terminal, or as plain text of the console's width."""
    _say(console, "Sources", "bold")
    console.print(_table(*wording.source_table(report), left=(0, 1)))
    for section in wording.sections(report):
        _say(console, f"\n{section.title}", "bold")
        _print_facts(console, section.facts)
        if section.note:
            _say(console, section.note)
    _print_histogram(console, wording.histogram_lines(report.lengths.histogram, report.max_length))
    _say(console, "\nPacking and steps", "bold")
    console.print(_table(*wording.packing_table(report), left=(0,)))
    _say(console, wording.speed(report))
    _say(console, "\nRows as the model sees them", "bold")
    _print_rows(console, report)
    _say(console, "\nUnused rows", "bold")
    for entry in report.left_out:
        _say(console, f"{entry.source}: {entry.reason}")
    if len(report.left_out) < report.rows.rejected + report.rows.dropped:
        _say(console, "...")
    _say(console, wording.left_out_line(report))
    _say(console, f"\n{wording.verdict(report)}", "" if report.refusal is None else "bold red")


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(visible(text), style), overflow="fold")


def _print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2):
        grid.add_column(overflow="fold")
    for label, value in facts:
        grid.add_row(Text(label), Text(value))
    console.print(grid)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for i, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if i in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _print_histogram(console: Console, lines: Sequence[Line]) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "right", "left"):
        grid.add_column(justify=justify)
    for line in lines:
        if line.label is None:
            grid.add_row("", "", Text(f"---- {line.text}"))
        else:
            grid.add_row(Text(line.label), Text(line.text), "█" * max(round(line.share * BAR), line.share > 0))
    console.print(grid)


def _print_rows(console: Console, report: Report) -> None:
    shown = [shorten(row.stretches, trained=480, untrained=240, most=40) for row in report.examples]
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    opening, closing = ("", "") if coloured else marks(stretch.text for row in shown for stretch in row)
    explained = Text(f"{wording.how_chosen(report)}; trained tokens ").append(
        f"{opening}are {'green' if coloured else 'marked like this'}{closing}", TRAINED
    )
    console.print(explained)
    for row, pieces in zip(report.examples, shown):
        _say(console, f"\n{wording.title(row)}", "bold")
        text = Text()
        for is_trained, group in groupby(pieces, lambda stretch: stretch.trained):
            text.append(opening if is_trained else "")
            for stretch in group:
                text.append(visible(stretch.text), _style(stretch))
            text.append(closing if is_trained else "")
        for line in text.split("\n", allow_blank=True):
            console.print(_fold(line, console.width), soft_wrap=True)


def _fold(line: Text, width: int) -> Text:
    """The line broken at the full width: breaking between words, as rich does, would hide what is in the data."""
    line.expand_tabs(8)
    ends = accumulate(len(piece) for piece in chop_cells(line.plain, width))
    return Text("\n").join(line.divide(list(ends)[:-1]))


def _style(stretch: TextSpan) -> str:
    """For a terminal."""
    return " ".join(
        (TRAINED if stretch.trained else "default", *["bold"] * stretch.special, *["dim"] * stretch.is_note)
    )


def marks(texts: Iterable[str]) -> tuple[str, str]:
    """An opening and a closing mark that do not occur in the texts, if one of ``MARKS`` does not."""
    used = set().union(*texts)
    return next((pair for pair in MARKS if not used & {*pair}), MARKS[-1])
