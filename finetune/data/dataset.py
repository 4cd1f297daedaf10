"""Data of a run: from sources to training rows and held-out rows.

Every process asks for them before the process group exists: one prepares them, the others wait for its file.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.columns import unknown_problems
from finetune.data.encoding import Settings
from finetune.data.formats import PREFERENCE
from finetune.data.rows import SHOWN, Rows, prepare
from finetune.data.sources import Source
from finetune.errors import InputError, refuse_if_any

_WHOLE = 2.0**64
MOST_PARTS_OF_HISTOGRAM = 32
MOST_REASONS = 3
"""Why no row can be used, of which the first row is shown."""


def read_rows(
    entries: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    *,
    skip_bad_rows: bool = False,
    tell: Callable[[str, int], None] = lambda doing, rows: None,
) -> Rows:
    """All rows of the sources, tokenised and masked, from the cache if they are in it.

    Args:
        tell: called with the current activity and the number of rows so far; see ``rows.prepare``.

    Raises:
        InputError: if a row cannot be used and ``skip_bad_rows`` is off, naming the first ten by ``file:line`` and
            reason; if no row is left, or none has a column that is named; if a source cannot be read.
    """
    rows = Rows(prepare(entries, tokenizer, settings, tell=tell))
    refuse_if_any(unknown_problems(settings.columns, rows.summary["columns"], rows.summary["first_keys"]))
    if not len(rows):
        raise InputError(f"{', '.join(entry.path for entry in entries)}: {_why_empty(rows, settings.max_length)}")
    if rows.summary["rejected"] and not skip_bad_rows:
        raise InputError(_refusal(rows))
    return rows


def read_some(
    entries: Sequence[Source], tokenizer: PreTrainedTokenizerBase, settings: Settings, **manner: Any
) -> Rows | None:
    """``read_rows``, or None without sources."""
    return read_rows(entries, tokenizer, settings, **manner) if entries else None


def load(
    train: Sequence[Source],
    held_out: Sequence[Source] | float,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    **manner: Any,
) -> tuple[Rows, Rows | None]:
    """Training rows, repeated by the weights of their sources, and held-out rows if there are any.

    Args:
        held_out: sources, or a fraction of the training rows.
        manner: ``skip_bad_rows`` and ``tell`` of ``read_rows``.

    Raises:
        InputError: as ``read_rows`` and ``split``.
    """
    rows = read_rows(train, tokenizer, settings, **manner)
    kept, held = rows, None
    if isinstance(held_out, float):
        kept, held = split(rows, held_out)
    else:
        held = read_some(held_out, tokenizer, settings, **manner)
    return weigh(kept, [source.weight for source in train]), held


def rejected_problem(rejected: int, rest: int) -> str:
    """What to do if some rows cannot be used."""
    count = f"{rejected:,} row{'s' if rejected > 1 else ''}"
    return f"{count} cannot be used; fix or remove them, or train on the other {rest:,} with --data.on_bad_row skip."


def _refusal(rows: Rows) -> list[str]:
    count, first = rows.summary["rejected"], rows.summary["first_rejected"]
    sources_of: dict[str, list[str]] = {}
    for source, reason in first:
        sources_of.setdefault(reason, []).append(source)
    named = [f"{', '.join(found)}: {reason}." for reason, found in sources_of.items()]
    more = [f"... and {count - len(first):,} more, all in {rows.folder / 'rejected.jsonl'}."] if count > SHOWN else []
    return [*named, *more, rejected_problem(count, len(rows))]


def _why_empty(rows: Rows, max_length: int) -> str:
    dropped, rejected = rows.summary["dropped"], rows.summary["rejected"]
    if dropped and not rejected:
        one = "the only row is" if dropped == 1 else f"all {dropped:,} rows are"
        return (
            f"{one} longer than data.max_length {max_length}, or nothing to train is left within it; raise it, or set "
            "data.too_long to cut."
        )
    if rejected:
        first: dict[str, str] = {}
        for source, reason in rows.summary["first_rejected"]:
            first.setdefault(reason, source)
        shown = "; ".join(f"{source}: {reason}" for reason, source in list(first.items())[:MOST_REASONS])
        every = (
            f"; the reasons for all {rejected:,} rows are in {rows.folder / 'rejected.jsonl'}" if rejected > 1 else ""
        )
        return f"no usable row. {shown}{every}."
    return "no rows found; give a file that has some."


def split(rows: Rows, fraction: float) -> tuple[Rows, Rows]:
    """Training and held-out rows, split by the hash of each row: the same in every run, whatever rows are added.

    Raises:
        InputError: if one side is empty.
    """
    held_out = rows.column("split_hash").astype(np.float64) / _WHOLE < fraction
    if held_out.all() or not held_out.any():
        raise InputError(
            f"data.eval {fraction} splits {len(rows)} rows into {int((~held_out).sum())} for training and "
            f"{int(held_out.sum())} held out; choose another fraction, or name a file."
        )
    return rows.choose(np.flatnonzero(~held_out)), rows.choose(np.flatnonzero(held_out))


def weigh(rows: Rows, weights: Sequence[float]) -> Rows:
    """Rows repeated by the weight of their source, one pass after the other.

    A fractional weight keeps the rows whose hash falls below it; that hash is independent of the split's.

    Raises:
        InputError: if no row is left.
    """
    if all(weight == 1 for weight in weights):
        return rows
    weight = np.asarray(weights)[rows.column("origin")]
    extra = rows.column("weight_hash").astype(np.float64) / _WHOLE < weight % 1
    copies = weight.astype(np.int64) + extra
    chosen = np.concatenate([np.flatnonzero(copies > taken) for taken in range(max(1, copies.max()))])
    if not len(chosen):
        raise InputError(f"The weights {list(weights)} in data.train leave none of the {len(rows)} rows; raise them.")
    return rows.choose(chosen)


def shared_with(held_out: Rows, train: Rows) -> int:
    """Number of held-out rows whose tokens also appear in the training rows."""
    return int(np.isin(held_out.column("token_hash"), train.column("token_hash")).sum())


def describe(rows: Rows, purpose: str) -> str:
    """One line for the run's output."""
    summary = rows.summary
    formats = ", ".join(summary["formats"])
    trained, tokens = int(rows.trained_tokens.sum(dtype=np.int64)), int(rows.lengths.sum(dtype=np.int64))
    text = f"{_count(rows, purpose)} ({formats}), {tokens:,} tokens, {trained:,} of them trained"
    whose = "" if rows.chosen is None else " before the split"
    if summary["truncated"]:
        count = summary["truncated"]
        text += f"; {count:,} row{'s' if count > 1 else ''} cut at data.max_length{whose}"
    if summary["dropped"]:
        count, first = summary["dropped"], summary["first_dropped"]
        more = ", ..." if count > 3 else ""
        text += f"; {count:,} left out as too long for data.max_length{whose} ({', '.join(first[:3])}{more})"
    if summary["rejected"]:
        text += f"; {summary['rejected']:,} rejected{whose}"
    for what, count in summary["left_out"].items():
        text += f"; the chat template leaves out {what} of {count:,}{whose}"
    return text


def figures(parts: Sequence[Rows]) -> dict[str, Any]:
    """Of rows of one or several mixes, for run.yaml: counts, tokens, and how many rows there are of which lengths.

    ``lengths`` is a histogram: ``{"up_to": [10, 20], "rows": [3, 1]}`` are three rows of 1 to 10 tokens, and one of 11
    to 20.
    """
    lengths = np.concatenate([rows.lengths for rows in parts])
    part = -(-int(lengths.max()) // MOST_PARTS_OF_HISTOGRAM)
    counted = np.bincount((lengths - 1) // part)
    stores = list({rows.folder: rows.summary for rows in parts}.values())
    of_stores = {name: sum(store[name] for store in stores) for name in ("truncated", "dropped", "rejected")}
    return {
        "rows": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "trained_tokens": sum(int(rows.trained_tokens.sum(dtype=np.int64)) for rows in parts),
        "longest": int(lengths.max()),
        **of_stores,
        "formats": sorted({name for store in stores for name in store["formats"]}),
        "lengths": {"up_to": [part * (number + 1) for number in range(len(counted))], "rows": counted.tolist()},
    }


def _count(rows: Rows, purpose: str) -> str:
    if PREFERENCE not in rows.summary["formats"]:
        return f"{len(rows):,} {purpose} rows"
    is_judged = bool((rows.trained_tokens.reshape(-1, 2) == 0).any())  # of a pair, one side is left empty
    return f"{len(rows) // 2:,} " + (f"judged {purpose} answers" if is_judged else f"{purpose} pairs")


def rejected_lines(rows: Rows | None) -> Iterator[str]:
    """Each unused record with its source and the reason, as a line of JSON."""
    if rows is not None:
        with (rows.folder / "rejected.jsonl").open(encoding="utf-8") as file:
            yield from map(str.rstrip, file)
