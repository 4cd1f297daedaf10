"""Figures of a run's data: sources, tokens, packing, steps and time.

Limits: dropped records are counted, but their lengths are unknown; padding is that of the first epoch's order.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.cli.data_report.lengths import LengthFigures, length_figures
from finetune.cli.data_report.row_text import ShownRow, shown_row, spread
from finetune.data.batches import Batches, Inputs
from finetune.data.concatenation import Concatenated
from finetune.data.dataset import rejected_lines, rejected_problem, shared_with
from finetune.data.encoding import Row
from finetune.data.formats import SIDES
from finetune.data.rows import Rows
from finetune.data.sampler import dealt, epoch_order
from finetune.data.sources import Source


@dataclass(frozen=True)
class SourceFigures:
    """One entry of data.train or data.eval."""

    path: str
    purpose: str
    """training or held-out."""
    weight: float
    rows: int
    """Rows prepared from it, trained or held out."""
    training_rows: int
    """Per epoch, by its weight."""


@dataclass(frozen=True)
class RowFigures:
    """Rows by their use; each counted once, whatever the weight of its source."""

    training: int
    held_out: int
    per_epoch: int
    """Training rows per epoch, by the weights."""
    rejected: int
    dropped: int
    """Records that are too long for max_length, by data.too_long or because no trained token is within it."""
    truncated: int
    """Training rows truncated at max_length."""
    tokens_cut: int
    """Tokens lost by truncation."""
    duplicates: int
    """Training rows with the same tokens as an earlier one."""
    shared_with_held_out: int
    """Held-out rows with the same tokens as a training row."""


@dataclass(frozen=True)
class TokenFigures:
    """Tokens of the training rows, truncated at max_length."""

    total: int
    trained: int
    per_epoch: int
    trained_per_epoch: int


@dataclass(frozen=True)
class InputFigures:
    """What the model computes, with packed documents or one document per row."""

    rows_per_epoch: int
    positions_per_epoch: int
    """Positions that all processes compute, padding included."""
    padding: float
    """Share of these that is padding."""
    room_used: float
    """Share of rows x max_length that is used by tokens."""
    trained_tokens_per_step: float
    steps_per_epoch: float
    steps: int
    """Optimizer steps of the run."""
    seconds_per_epoch: float | None
    """None if no speed is known."""


@dataclass(frozen=True)
class LeftOut:
    """An unused row."""

    source: str
    """``file:line``."""
    reason: str


@dataclass(frozen=True)
class Report:
    """Everything that ``finetune data`` shows; the fields are the keys of its JSON."""

    sources: list[SourceFigures]
    formats: dict[str, int]
    """Records of each format that rows were made of, over all sources."""
    columns: dict[str, str]
    """Fields of the formats, each with the column of the records that holds it."""
    prepared_rows: int
    """Made of these records, before weights."""
    dropped_by_template: dict[str, int]
    """What the chat template leaves out, and of how many records that are trained all the same."""
    rows: RowFigures
    tokens: TokenFigures
    max_length: int
    lengths: LengthFigures
    packing: bool | Literal["concatenate"]
    """How the configuration packs; with ``concatenate`` documents are cut wherever a row is full."""
    paired: bool
    """Whether every two rows are a chosen and a rejected answer, which the model reads as one row."""
    unpacked: InputFigures
    packed: InputFigures | None
    """None for pairs, which are not packed."""
    global_batch_size: int
    micro_batch_size: int
    micro_batch_is_open: bool
    """The planner chooses the micro-batch when the run starts: no larger than this, and padding no more."""
    tokens_per_second: float | None
    """Positions per second of all processes."""
    speed_from: str | None
    """Source of the speed."""
    examples: list[ShownRow]
    left_out: list[LeftOut]
    left_out_files: list[str]
    """Files with every unused row and its text."""
    refusal: str | None
    """Why a run would refuse these data; None if it would not."""


def report(
    train: Rows,
    held_out: Rows | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_sources: Sequence[Source],
    held_out_sources: Sequence[Source],
    columns: Mapping[str, str],
    max_length: int,
    packing: bool | Literal["concatenate"],
    paired: bool,
    flat: bool,
    global_batch_size: int,
    micro_batch_size: int | None,
    epochs: float,
    steps: int | None,
    seed: int,
    skips_bad_rows: bool,
    problems: Sequence[str],
    tokens_per_second: float | None,
    speed_from: str | None,
    shown_rows: int,
    shown_left_out: int | None,
) -> Report:
    """The figures of a run's data.

    Args:
        train: training rows of an epoch, repeated as the weights of their sources say.
        held_out: held-out rows, of their own sources or split off the training rows; None if there are none.
        train_sources: what the training rows were read from, in their order.
        held_out_sources: what the held-out rows were read from; none if they were split off.
        paired: whether every two rows are a chosen and a rejected answer.
        flat: whether rows that are not packed lie end to end, without padding.
        micro_batch_size: None where the planner chooses it; then padding is that of the whole global batch at a time.
        epochs, steps: length of the run; steps win.
        skips_bad_rows: whether a run trains on the rest where rows are rejected.
        problems: why else a run would refuse the rows.
        tokens_per_second: positions per second of all processes, if known.
        shown_rows: rows to show as the model sees them.
        shown_left_out: records to name that are not trained, at most; None for all.
    """
    stored = train if train.chosen is None else Rows(train.folder, np.unique(train.chosen))
    distinct, per_epoch = _trained(stored), _trained(train)
    uncut = distinct.column("uncut_tokens")
    stores = list({rows.folder: rows for rows in (train, held_out) if rows is not None}.values())
    rejected = sum(store.summary["rejected"] for store in stores)
    run: dict[str, Any] = {
        "max_length": max_length,
        "steps": steps,
        "epochs": epochs,
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size or global_batch_size,
        "seed": seed,
    }
    rejects = [rejected_problem(rejected, len(distinct))] if rejected and not skips_bad_rows else []
    both = Inputs(stored, flat=True, paired=paired)
    chosen = spread(both.lengths, stored.column("origin")[:: 1 + paired], shown_rows)
    return Report(
        sources=_source_figures(per_epoch, held_out, train_sources, held_out_sources),
        formats=_added_up(stores, "formats"),
        columns=dict(columns),
        prepared_rows=sum(len(_trained(Rows(store.folder))) for store in stores),
        dropped_by_template=_added_up(stores, "left_out"),
        rows=RowFigures(
            training=len(distinct),
            held_out=0 if held_out is None else len(_trained(held_out)),
            per_epoch=len(per_epoch),
            rejected=rejected,
            dropped=sum(store.summary["dropped"] for store in stores),
            truncated=int((uncut > distinct.lengths).sum()),
            tokens_cut=_sum(uncut) - _sum(distinct.lengths),
            duplicates=len(distinct) - len(np.unique(distinct.column("token_hash"))),
            shared_with_held_out=0 if held_out is None else shared_with(_trained(held_out), distinct),
        ),
        tokens=TokenFigures(
            total=_sum(distinct.lengths),
            trained=_sum(distinct.trained_tokens),
            per_epoch=_sum(per_epoch.lengths),
            trained_per_epoch=_sum(train.trained_tokens),
        ),
        max_length=max_length,
        lengths=length_figures(uncut, max_length),
        packing=packing,
        paired=paired,
        unpacked=_input_figures(Batches(train, packing=False, paired=paired, flat=flat, **run), tokens_per_second),
        packed=None if paired else _input_figures(_packed(train, packing, run), tokens_per_second),
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size or global_batch_size,
        micro_batch_is_open=micro_batch_size is None,
        tokens_per_second=tokens_per_second,
        speed_from=speed_from,
        examples=[each for place in chosen for each in _shown(both.documents(place), tokenizer)],
        left_out=_left_out(stores, shown_left_out),
        left_out_files=[
            str(store.folder / "rejected.jsonl")
            for store in stores
            if store.summary["rejected"] + store.summary["dropped"]
        ],
        refusal=" ".join([*rejects, *problems]) or None,
    )


def _packed(rows: Rows, packing: bool | Literal["concatenate"], run: dict[str, Any]) -> Batches:
    if packing == "concatenate":
        return Batches(Concatenated(rows, run["max_length"]), packing=False, flat=True, **run)
    return Batches(rows, packing=True, flat=True, **run)


def _added_up(stores: Sequence[Rows], counts: str) -> dict[str, int]:
    return dict(sum((Counter(store.summary[counts]) for store in stores), Counter()).most_common())


def _trained(rows: Rows) -> Rows:
    """Without those that hold the place of the other answer to one that is judged alone."""
    return rows if rows.trained_tokens.all() else rows.choose(np.flatnonzero(rows.trained_tokens))


def _sum(numbers: np.ndarray) -> int:
    return int(numbers.sum(dtype=np.int64))


def _source_figures(
    train: Rows, held_out: Rows | None, train_sources: Sequence[Source], held_out_sources: Sequence[Source]
) -> list[SourceFigures]:
    per_epoch = np.bincount(train.column("origin"), minlength=len(train_sources)).tolist()
    figures = [
        SourceFigures(source.path, "training", source.weight, rows, used)
        for source, rows, used in zip(train_sources, _rows_of_source(train, train_sources), per_epoch)
    ]
    if held_out is not None and held_out_sources:
        figures += [
            SourceFigures(source.path, "held-out", 1.0, rows, 0)
            for source, rows in zip(held_out_sources, _rows_of_source(held_out, held_out_sources))
        ]
    return figures


def _shown(documents: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[ShownRow]:
    """The documents of a row, those of a pair with the names of their sides."""
    sides = SIDES if len(documents) == len(SIDES) else ("",)
    return [shown_row(each, tokenizer, side) for each, side in zip(documents, sides) if each.trained_tokens]


def _rows_of_source(rows: Rows, sources: Sequence[Source]) -> list[int]:
    """Prepared rows of each source, whether chosen or not."""
    counts: list[int] = np.bincount(_trained(Rows(rows.folder)).column("origin"), minlength=len(sources)).tolist()
    return counts


def _input_figures(batches: Batches, tokens_per_second: float | None) -> InputFigures:
    rows, tokens = batches.rows_in_epoch, _sum(batches.tokens)
    order = epoch_order(rows, batches.order["seed"], 0)
    global_batch_size = batches.order["global_batch_size"]
    how = {"global_batch_size": global_batch_size, "micro_batch_size": batches.micro_batch_size}
    positions = tokens if batches.flat else padded_positions(batches.lengths[order], **how)
    return InputFigures(
        rows_per_epoch=rows,
        positions_per_epoch=positions,
        padding=1 - tokens / positions,
        room_used=tokens / (rows * (1 + batches.paired) * batches.max_length),
        trained_tokens_per_step=_sum(batches.trained_tokens) / rows * global_batch_size,
        steps_per_epoch=rows / global_batch_size,
        steps=batches.steps,
        seconds_per_epoch=None if tokens_per_second is None else positions / tokens_per_second,
    )


def padded_positions(lengths: np.ndarray, *, global_batch_size: int, micro_batch_size: int) -> int:
    """Positions of rows in this order, each micro-batch padded to its longest row; the last may have fewer rows."""
    steps = np.append(lengths, np.zeros(-len(lengths) % global_batch_size, np.int64)).reshape(-1, global_batch_size)
    steps = np.pad(steps, ((0, 0), (0, -global_batch_size % micro_batch_size)))  # which a run refuses
    sizes = np.take_along_axis(steps, dealt(steps, micro_batch_size, flat=False), axis=1).reshape(-1, micro_batch_size)
    return int((sizes.max(axis=1) * (sizes > 0).sum(axis=1)).sum())


def _left_out(stores: Sequence[Rows], most: int | None) -> list[LeftOut]:
    """In the order in which they were read."""
    lines = map(json.loads, islice(chain.from_iterable(map(rejected_lines, stores)), most))
    return [LeftOut(entry["source"], entry["reason"]) for entry in lines]
