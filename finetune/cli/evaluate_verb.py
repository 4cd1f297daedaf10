"""``finetune evaluate``: what a model scores on rows, or two models on the same rows."""

import argparse
import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from finetune.cli.generate_verb import beside, lost_keys, opened, unloaded, write_line
from finetune.config import sections
from finetune.data import dataset
from finetune.data.columns import renamed
from finetune.data.encoding import Row
from finetune.data.formats import detect
from finetune.data.sources import Source, named_sources
from finetune.errors import InputError, first_line, refuse_if_any
from finetune.export.results import result_at
from finetune.generation.judging import Judgement, Measured, judge
from finetune.generation.manner import Manner
from finetune.generation.speaker import Known, Speaker
from finetune.hub_access import is_hub_id
from finetune.output.run_reading import finite
from finetune.run.inputs import settings_of
from finetune.scoring.asked_rows import AskedRows, asked_rows
from finetune.scoring.intervals import Interval
from finetune.scoring.scores import Score, score_of
from finetune.scoring.task_rows import TaskRow, read_task_rows, refuse_unfit, shortened

LOSS = "loss"
"""A score beside those of ``scoring.scores``: of the expected answers, by their tokens."""
WIDTH = 80
_EVALUATION = "evaluation"


@dataclass(frozen=True)
class Asked:
    """What is asked of each model."""

    sources: list[Source]
    settings: sections.Data
    """How a run would read them, for the loss."""
    rows: list[TaskRow]
    scores: list[Score]
    has_loss: bool
    is_part: bool = False
    """More rows may follow, which are not asked."""
    held_out: frozenset[str] | None = None
    """Which rows of the sources are asked, as ``file:line``; None for all."""


@dataclass(frozen=True)
class Ready:
    """What is asked, as one model takes it."""

    rows: AskedRows
    held_out: list[Row] | None
    """Of which the loss is computed; None for no loss."""


def evaluate(options: argparse.Namespace) -> int:
    """Run the verb; returns the exit code.

    Raises:
        InputError: for wrong input, before weights load where that can be known.
    """
    refuse_if_any(_contradictions(options))
    manner = Manner(max_new_tokens=options.max_new_tokens)
    for path in filter(None, (options.model, options.other)):
        _refuse_no_model(path)
    first = cache(lambda: unloaded(options.model, options))
    asked = _asked(options, lambda: first().known[-1])
    output = None if options.output is None else Path(options.output)
    if output is not None and output.exists():
        raise InputError(f"--output {output} already exists; choose another file. Nothing was written.")
    lost = lost_keys([row.prompt for row in asked.rows], (_EVALUATION,)) if output is not None else []
    refuse_if_any(shortened(lost, "kept as they are"))
    with opened(output, whole=True) if output else nullcontext() as file:
        models = [first()] + ([unloaded(options.other, options)] if options.other else [])
        ready = [[_ready(known, asked, options) for known in each.known] for each in models]
        names = [known.name for each in models for known in each.known]
        judged: list[Judgement] = []
        for each, own in zip(models, ready):
            speakers = each.load()
            judged += [_judgement(*pair, asked, manner, options) for pair in zip(speakers, own)]
            del speakers
            gc.collect()  # the GPU may have no room for both models
        if options.json:
            print(json.dumps(finite(_record(asked, names, judged)), indent=2, ensure_ascii=False))
        else:
            _print(Console(highlight=False, width=min(WIDTH, Console().width)), asked, names, judged)
        if file is not None:  # after the scores, which no full disk then takes away
            for line in _lines(asked, names, judged):
                write_line(file, line)
    if output is not None and not options.json:
        print(f"{len(asked.rows):,} rows with their answers are in {output}")
    return 0


def _contradictions(options: argparse.Namespace) -> list[str]:
    found = {
        f"--limit {options.limit}: give a number from 1 on.": options.limit is not None and options.limit < 1,
        f"--batch-size {options.batch_size}: give a number from 1 on.": options.batch_size < 1,
        "--compare takes the model that it was trained from, and OTHER names a second one; leave one of them out.": (
            options.compare and options.other is not None
        ),
    }
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def _refuse_no_model(path: str) -> None:
    """What can be known of both folders before rows are read."""
    if not is_hub_id(path):
        result_at(Path(path))


def _asked(options: argparse.Namespace, known: Callable[[], Known]) -> Asked:
    own, is_preference = _data_of_run(options.model)
    held_out = None
    written = options.score or []
    scores = [score_of(each) for each in written if each != LOSS]
    if options.data is not None:
        named, key = [Source(options.data)], "--data"
    elif own is not None and own.eval is not None and is_preference:
        raise InputError(
            f"The run {options.model} learnt preferences, and its held-out rows have no right answer; name a file with "
            "--data."
        )
    elif own is not None and isinstance(own.eval, float):
        named, key = named_sources(own.train), f"data.train of {options.model}:"
        held_out = _held_out_fraction(named, own, own.eval, known())
    else:
        named, key = _held_out(options.model, own), f"data.eval of {options.model}:"
    settings = own or sections.Data(train=named[0].path)
    columns = tuple(settings.columns.items())
    rows = read_task_rows(named, key, columns=columns, limit=options.limit, only=held_out)
    present = {field: column for field, column in columns if any(column in row.prompt.record for row in rows)}
    settings = settings.model_copy(update={"columns": present})  # those of a run may be other files' columns
    if options.data is not None:
        settings = settings.model_copy(update={"format": "auto", "split_key": None})
    is_trained = all(detect(renamed(row.prompt.record, columns)) is not None for row in rows)
    if LOSS in written and not is_trained:
        raise InputError(
            "--score loss: the loss is that of rows in a format that training reads, and some of these are in none; "
            "give prompt and completion, for example, or leave it out."
        )
    has_choices, has_answers = any(row.choices for row in rows), any(row.expected is not None for row in rows)
    if not written and (has_choices or has_answers):
        scores = [score_of(name) for name in (("choice", "choice_norm") if has_choices else ("exact_match",))]
    refuse_unfit(rows, scores)
    has_loss = LOSS in written or (not written and is_trained and not has_choices)
    if not scores and not has_loss:
        raise InputError(f"{key} has questions without answers, of which there is nothing to score; add an answer.")
    return Asked(named, settings, rows, scores, has_loss, options.limit is not None, held_out)


def _data_of_run(path: str) -> tuple[sections.Data | None, bool]:
    """The section data of a run's configuration (None for a model that no run left), and whether it learnt
    preferences."""
    run = result_at(Path(path)).run if Path(path).exists() else None
    if run is None:
        return None, False
    try:
        config = yaml.safe_load(run.read_text(encoding="utf-8"))["config"]
        written = config["data"]
        # rows are scored one by one; the packing of a corpus has a choice more than that of other recipes
        known = {key: value for key, value in written.items() if key in sections.Data.model_fields and key != "packing"}
        return sections.Data.model_validate(known), "dpo" in config
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"{run} is not the record of a run ({first_line(error)}); copy the model elsewhere without it."
        ) from error


def _held_out(path: str, data: sections.Data | None) -> list[Source]:
    """
    Raises:
        InputError: if no run says which rows were held out.
    """
    if data is None:
        raise InputError(f"No run.yaml says which rows were held out for {path}; name a file with --data.")
    if data.eval is None:
        raise InputError(f"The run {path} held none out; name a file with --data.")
    assert not isinstance(data.eval, float)
    return named_sources(data.eval)


def _held_out_fraction(train: list[Source], data: sections.Data, fraction: float, known: Known) -> frozenset[str]:
    """The training rows that a run did not train, as ``file:line``.

    Raises:
        InputError: if the sources hold none, or cannot be read; if these are pieces of texts that it trained too.
    """
    settings = settings_of(data, known.tokenizer, known.end_tokens)
    rows = dataset.read_rows(train, known.tokenizer, settings, skip_bad_rows=data.on_bad_row == "skip")
    trained, held_out = ({row.source for row in side} for side in dataset.split(rows, fraction))
    if held_out & trained:
        raise InputError(
            f"The run held out {fraction:g} of the pieces of its texts, and trained others of the same texts; name a "
            "file with --data."
        )
    return frozenset(held_out)


def _ready(known: Known, asked: Asked, options: argparse.Namespace) -> Ready:
    rows = asked_rows(asked.rows, known.tokenizer, known.positions, plain=options.plain, name=known.name)
    return Ready(rows, _held_out_rows(known, asked) if asked.has_loss else None)


def _judgement(speaker: Speaker, ready: Ready, asked: Asked, manner: Manner, options: argparse.Namespace) -> Judgement:
    name, console = escape(speaker.name)[-40:], Console(stderr=True)

    def shown(batches: Sequence[Sequence[int]]) -> Iterable[Sequence[int]]:
        return track(batches, name, console=console, transient=True, disable=not console.is_terminal)

    settings: dict[str, Any] = {"batch_size": options.batch_size, "shown": shown}
    return judge(speaker, ready.rows, asked.scores, ready.held_out, manner, **settings)


def _held_out_rows(speaker: Known, asked: Asked) -> list[Row]:
    """The rows that are asked as a run would hold them out, for this model's tokenizer.

    Raises:
        InputError: if a row cannot be used, or none has a loss.
    """
    data = asked.settings
    if speaker.positions is not None and data.max_length > speaker.positions:
        data = data.model_copy(update={"max_length": speaker.positions})
    settings = settings_of(data, speaker.tokenizer, speaker.end_tokens)
    skip = data.on_bad_row == "skip"
    rows = dataset.read_rows(asked.sources, speaker.tokenizer, settings, skip_bad_rows=skip or asked.is_part)
    if not skip and asked.is_part:  # bad rows behind the last one that is asked are no matter
        names = {row.prompt.source for row in asked.rows}
        bad = [f"{source}: {why}." for source, why in rows.summary["first_rejected"] if source in names]
        refuse_if_any(bad)
    chosen = rows if asked.held_out is None else (row for row in rows if row.source in asked.held_out)
    found = [row for row in _made_of(asked.rows, chosen) if row.trained_tokens]
    if not found:
        raise InputError(
            f"At data.max_length {data.max_length} no trained token is left of what is asked, so that it "
            "has no loss; take more rows, or name other scores with --score."
        )
    return found


def _made_of(asked: Sequence[TaskRow], rows: Iterable[Row]) -> Iterator[Row]:
    """Of encoded rows, in the order of their records, those made of the first records: several of one, or none.

    A name may stand for several records, since subsets of a hub dataset have the same.
    """
    left = iter([row.prompt.source for row in asked])
    for source, made in groupby(rows, key=lambda row: row.source):
        if source not in left:  # which goes on to behind it
            return
        yield from made


def _lines(asked: Asked, names: Sequence[str], judged: Sequence[Judgement]) -> Iterator[dict[str, Any]]:
    """Each row as it stands, with what each model said and scored."""
    for place, row in enumerate(asked.rows):
        found = []
        for name, judgement in zip(names, judged):
            said: dict[str, Any] = {"model": name}
            if judgement.answers is not None:
                said["answer"] = judgement.answers[place].text
            if judgement.choices is not None:
                said["log_probabilities"] = judgement.choices[place]
            said["scores"] = {each.name: each.totals[place] for each in judgement.measured if each.name != LOSS}
            found.append(said)
        yield beside(row.prompt.record, {_EVALUATION: found})


def _record(asked: Asked, names: Sequence[str], judged: Sequence[Judgement]) -> dict[str, Any]:
    models = [
        {"model": name, "scores": {each.name: _scored(each) for each in judgement.measured}}
        for name, judgement in zip(names, judged)
    ]
    found: dict[str, Any] = {"data": [source.path for source in asked.sources], "rows": len(asked.rows)}
    found["models"] = models
    if len(judged) > 1:
        pairs = list(zip(judged[0].measured, judged[1].measured))
        differences = {one.name: one.difference(other) for one, other in pairs if one.is_comparable(other)}
        found["differences"] = {
            name: {"value": each.value, "interval": _finite(each.interval), "p": each.p}
            for name, each in differences.items()
        }
    return found


def _scored(measured: Measured) -> dict[str, Any]:
    found = {"value": measured.value, "interval": _finite(measured.interval), "rows": len(measured.totals)}
    return found | ({"perplexity": _perplexity(measured.value)} if measured.name == LOSS else {})


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 or math.isnan(loss) else math.inf


def _finite(interval: Interval) -> list[float] | None:
    """None of a single row, which says nothing of others."""
    return list(interval) if all(map(math.isfinite, interval)) else None


def _print(console: Console, asked: Asked, names: Sequence[str], judged: Sequence[Judgement]) -> None:
    """The scores of one model with their intervals, or those of two with the difference."""
    if len(judged) == 1:
        table = _table("score", "value", "95 % interval", "rows")
        for measured in judged[0].measured:
            table.add_row(escape(measured.name), *_told(measured), f"{len(measured.totals):,}")
            if measured.name == LOSS:
                value, *ends = map(_perplexity, (measured.value, *(_finite(measured.interval) or ())))
                table.add_row("perplexity", f"{value:.4g}", " to ".join(f"{each:.4g}" for each in ends), "")
        console.print(table)
        return
    for letter, name in zip("AB", names):
        console.print(escape(f"{letter}: {name}"), soft_wrap=True)
    table = _table("score", "A", "B", "B - A", "95 % interval", "p", "rows")
    for one, other in zip(judged[0].measured, judged[1].measured):
        told = ["", "other tokens", ""]
        if one.is_comparable(other):
            difference = one.difference(other)
            told = [*_of(one, difference.value, difference.interval, sign="+"), _p(difference.p)]
        table.add_row(escape(one.name), _told(one)[0], _told(other)[0], *told, f"{len(one.totals):,}")
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify: Any = "left" if column == "score" else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column != "score")
    return table


def _told(measured: Measured) -> tuple[str, str]:
    return _of(measured, measured.value, measured.interval)


def _of(measured: Measured, value: float, interval: Interval, sign: str = "") -> tuple[str, str]:
    """A value and its interval in words: a loss in nats, anything else in percent."""
    is_loss, known = measured.name == LOSS, _finite(interval)
    shown = [f"{each:{sign}.4f}" if is_loss else f"{100 * each:{sign}.1f}" for each in (value, *(known or ()))]
    unit = "" if is_loss else " %"
    return shown[0] + unit, f"{shown[1]} to {shown[2]}{unit}" if known else ""


def _p(p: float) -> str:
    return "" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"
