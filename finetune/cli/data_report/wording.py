"""Words and tables of a report, shared by terminal and page."""

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.cli.data_report.figures import Report
from finetune.cli.data_report.lengths import Bin
from finetune.cli.data_report.row_text import ShownRow, visible
from finetune.units import spoken


@dataclass(frozen=True)
class Section:
    """A heading, lines of a label and a value, and a sentence below."""

    title: str
    facts: list[tuple[str, str]]
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A line of the histogram: a bin, or a remark without a label."""

    label: str | None
    text: str
    share: float = 0.0
    """Length of the bar, 0 to 1."""


def verdict(report: Report) -> str:
    """Whether a run would accept these data, in a sentence."""
    if report.refusal is None:
        return "A run would accept these data."
    return f"A run would refuse these data: {report.refusal}"


def _is_weighted(report: Report) -> bool:
    return any(source.weight != 1 for source in report.sources)


def source_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows: what was read."""
    heads, rows = ["source", "for", "rows"], []
    for source in report.sources:
        row = [visible(source.path), source.purpose, f"{source.rows:,}"]
        rows.append([*row, f"{source.weight:g}", f"{source.training_rows:,}"] if _is_weighted(report) else row)
    return heads + (["weight", "per epoch"] if _is_weighted(report) else []), rows


def sections(report: Report) -> list[Section]:
    """What is said between the sources and the histogram."""
    rows, tokens, lengths = report.rows, report.tokens, report.lengths
    shared = f"; {rows.shared_with_held_out:,} of them also appear in the training rows"
    records, made = sum(report.formats.values()), report.prepared_rows
    several = "chosen and rejected answers" if report.paired else "some need several"
    of_rows = [
        ("formats", ", ".join(f"{name} {count:,}" for name, count in report.formats.items())),
        *(
            [("columns", ", ".join(f"{field} from {column}" for field, column in report.columns.items()))]
            * bool(report.columns)
        ),
        *([("all rows", f"{made:,} from {records:,} records: {several}")] if made != records else []),
        ("training rows", f"{rows.training:,}"),
        *([("per epoch", f"{rows.per_epoch:,}")] if _is_weighted(report) else []),
        ("held-out rows", f"{rows.held_out:,}{shared if rows.shared_with_held_out else ''}"),
        ("rejected", f"{rows.rejected:,}"),
        (
            "dropped",
            f"{rows.dropped:,}" + (", too long for max_length" if rows.dropped else ""),
        ),
        ("truncated", f"{rows.truncated:,}" + (f", by {rows.tokens_cut:,} tokens" if rows.truncated else "")),
        ("duplicates", f"{rows.duplicates:,}" + (" with the same tokens as an earlier row" if rows.duplicates else "")),
        *(
            ("left out", f"{what} of {count:,} records, by the chat template")
            for what, count in report.dropped_by_template.items()
        ),
    ]
    of_tokens = [
        ("tokens", f"{tokens.total:,}"),
        ("trained", f"{tokens.trained:,} ({tokens.trained / tokens.total:.1%})"),
        ("per epoch", f"{tokens.per_epoch:,}, {tokens.trained_per_epoch:,} of them trained"),
        ("row length", f"median {lengths.median:,}, mean {lengths.mean:,.1f}"),
        ("", f"90th percentile {lengths.percentile_90:,}, 99th percentile {lengths.percentile_99:,}"),
        ("", f"shortest {lengths.shortest:,}, longest {lengths.longest:,}"),
    ]
    return [
        Section("Rows", of_rows),
        Section("Tokens", of_tokens, "Training rows by length in tokens, before truncation:"),
    ]


def histogram_lines(bins: Sequence[Bin], max_length: int) -> list[Line]:
    most = max(each.rows for each in bins)
    lines = []
    for previous, each in zip([0, *(each.first for each in bins)], bins):
        if previous <= max_length < each.first:
            lines.append(Line(None, f"max_length {max_length:,}: longer rows are truncated"))
        label = f"{each.first:,}" if each.first == each.last else f"{each.first:,}-{each.last:,}"
        lines.append(Line(label, f"{each.rows:,}", each.rows / most))
    if bins[-1].first <= max_length:
        lines.append(Line(None, f"max_length {max_length:,}: no row is truncated"))
    return lines


def packing_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Column heads and rows: what the model computes without and with packing."""
    both = [report.unpacked]
    heads = ["", "pairs"]
    if report.packed is not None:
        packed = "concatenated" if report.packing == "concatenate" else "packed"
        both, heads = [report.unpacked, report.packed], ["", "one per row", packed]
        heads[2 if report.packing else 1] += " (chosen)"
    micro_batch = f"micro-batch of {'up to ' if report.micro_batch_is_open else ''}{report.micro_batch_size}"
    rows = [
        ["input rows per epoch", *(f"{each.rows_per_epoch:,}" for each in both)],
        [f"fill of rows of {report.max_length:,} tokens", *(f"{each.room_used:.1%}" for each in both)],
        ["positions to compute per epoch", *(f"{each.positions_per_epoch:,}" for each in both)],
        [f"padding among these, {micro_batch}", *(f"{each.padding:.1%}" for each in both)],
        [f"steps of {report.global_batch_size} rows per epoch", *(f"{each.steps_per_epoch:,.1f}" for each in both)],
        ["steps of the run", *(f"{each.steps:,}" for each in both)],
        ["trained tokens per step", *(f"{each.trained_tokens_per_step:,.0f}" for each in both)],
        [
            "time per epoch",
            *("?" if each.seconds_per_epoch is None else spoken(each.seconds_per_epoch) for each in both),
        ],
    ]
    return heads, rows


def speed(report: Report) -> str:
    """Source of the time, or how to get one."""
    if report.tokens_per_second is None:
        return (
            "For a time, give the positions per second of all processes with --tokens-per-second N, or train a few "
            "steps with this train.output_dir, whose metrics.jsonl has the speed."
        )
    return f"Time at {report.tokens_per_second:,.0f} positions per second, {report.speed_from}."


def how_chosen(report: Report) -> str:
    several = len({source.path for source in report.sources if source.purpose == "training"}) > 1
    rows = len({row.source for row in report.examples}) if report.paired else len(report.examples)
    count = f"{rows:,} {'pairs' if report.paired else 'training rows'}"
    return f"{count}, from the shortest to the longest{' of each source' if several else ''}"


def left_out_line(report: Report) -> str:
    rejected, dropped = report.rows.rejected, report.rows.dropped
    if not rejected + dropped:
        return "None: every row is used."
    files = " and ".join(report.left_out_files)
    return f"{rejected + dropped:,} in total: {rejected:,} rejected and {dropped:,} dropped; see {files} for their text"


def title(row: ShownRow) -> str:
    cut = f" of {row.uncut_tokens:,}" if row.uncut_tokens > row.tokens else ""
    side = f", {row.side}" if row.side else ""
    return visible(f"{row.source}{side}: {row.tokens:,}{cut} tokens, {row.trained_tokens:,} trained")
