"""Sources to encoded rows, in batches and in their order.

Threads share the work: the tokenizer leaves Python's lock while it computes.
"""

import gc
import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data import columns, formats, sources
from finetune.data.encoding import Encoder, Row, Settings, TooLong
from finetune.data.formats import Example
from finetune.data.messages import reasoning_of
from finetune.data.sources import Record, Rejected, Source
from finetune.data.special_edges import refuse_special_edges
from finetune.errors import BadRow
from finetune.hardware import cores

RECORDS_AT_ONCE = 128
TOKENS_OF_PLACE = 8


@dataclass(frozen=True)
class Refused:
    """A record that is not used."""

    position: int
    """Among the records of its batch."""
    origin: int
    """Number of the source."""
    line: Rejected
    too_long: bool = False
    """Whether only because it is too long for ``max_length``."""


@dataclass
class Encoded:
    """The results of some consecutive records."""

    rows: list[Row] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    split_hashes: list[int] = field(default_factory=list)
    """Of what is trained, or of the value of ``split_key``: they decide the side of a train/eval split."""
    weight_hashes: list[int] = field(default_factory=list)
    """Of what is trained, independent of the former: they decide which rows a weight below 1 keeps."""
    formats: Counter[str] = field(default_factory=Counter)
    """Of the records that rows were made of."""
    dropped: Counter[str] = field(default_factory=Counter)
    """What the chat template leaves out, by what it is, with the number of conversations."""
    columns: Counter[str] = field(default_factory=Counter)
    """Records that have each of the columns that ``Settings.columns`` names."""
    first_keys: list[str] = field(default_factory=list)
    """Of the first record that has some."""
    refused: list[Refused] = field(default_factory=list)
    """In no order."""


def first_rows(
    entries: Sequence[Source], tokenizer: PreTrainedTokenizerBase, settings: Settings, *, count: int
) -> list[Row]:
    """The first usable rows of the sources, without the cache."""
    encoder = Encoder(tokenizer, settings)
    batches = encoded(records_of(entries), encoder, settings)
    return list(islice((row for batch in batches for row in batch.rows), count))


def records_of(entries: Sequence[Source]) -> Iterator[tuple[int, Record | Rejected]]:
    """The records of one source after the other, each with the number of its source.

    Raises:
        InputError: if a source cannot be read.
    """
    return ((origin, record) for origin, entry in enumerate(entries) for record in sources.read(entry))


def encoded(
    records: Iterator[tuple[int, Record | Rejected]], encoder: Encoder, settings: Settings
) -> Iterator[Encoded]:
    """The rows of these records in batches, in their order, made on several threads.

    A few batches are under way at a time, so that memory does not grow with the data.

    Args:
        records: each with the number of its source.
    """
    threads = min(8, cores.usable() + 1)  # one more than cores, because they take turns at what Python does itself
    pool = ThreadPoolExecutor(threads)
    under_way: deque[Future[Encoded]] = deque()
    try:
        while chunk := list(islice(records, RECORDS_AT_ONCE)):
            under_way.append(pool.submit(_encode, chunk, encoder, settings))
            if len(under_way) > 2 * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        # not waiting: whoever leaves off, maybe by the garbage collector in a thread like these, may hold their lock
        pool.shutdown(wait=False, cancel_futures=True)


def _encode(chunk: Sequence[tuple[int, Record | Rejected]], encoder: Encoder, settings: Settings) -> Encoded:
    batch = Encoded()
    kept = list[tuple[int, int, Record, str | None, tuple[Example | None, ...]]]()
    for position, (origin, record) in enumerate(chunk):
        if isinstance(record, Rejected):
            batch.refused.append(Refused(position, origin, record))
            continue
        value, lacking = record.value, ""
        if settings.columns and isinstance(value, dict):
            batch.columns.update(column for _, column in settings.columns if column in value)
            batch.first_keys = batch.first_keys or [*value]
            value, lacking = columns.renamed(value, settings.columns), columns.lacking(value, settings.columns)
        try:
            if settings.split_key is not None and isinstance(record.value, dict):
                _value(record.value, settings.split_key)
            if settings.paired:
                name: str | None = formats.PREFERENCE
                examples: tuple[Example | None, ...] = formats.convert_compared(value)
            else:
                name = formats.detect(value) if settings.format == "auto" else settings.format
                example = replace(formats.convert(value, settings.format), begins=record.begins, ends=record.ends)
                if example.untrained and settings.train_on == "all":
                    raise BadRow("an answer is marked as not trained, but data.train_on is all; remove one of the two")
                examples = (example,)
            if settings.on_dropped == "error":
                for side in filter(None, examples):
                    refuse_special_edges(side, encoder.shield_of)
            kept.append((position, origin, record, name, examples))
        except BadRow as reason:
            batch.refused.append(Refused(position, origin, _reject(record, f"{reason}{lacking}")))
    encoded_examples = iter(
        encoder.encode([(each[2].source, example) for each in kept for example in each[4] if example is not None])
    )
    for position, origin, record, name, examples in kept:
        encoded = [None if example is None else next(encoded_examples) for example in examples]
        result = _pair(encoded, encoder.max_length) if settings.paired else encoded[0]
        assert result is not None
        if isinstance(result, BadRow):
            line = _reject(record, str(result))
            batch.refused.append(Refused(position, origin, line, isinstance(result, TooLong)))
            continue
        rows = result if settings.paired else [row for row in result if row.trained_tokens]
        if not rows:
            lost = f"nothing to train is left of it within data.max_length {encoder.max_length}"
            batch.refused.append(Refused(position, origin, _reject(record, lost), too_long=True))
            continue
        if len(rows) < len(result):
            many = len(result) - len(rows)
            lost = f"answers of which nothing is left within data.max_length {encoder.max_length}: {many}"
            batch.refused.append(Refused(position, origin, _reject(record, lost), too_long=True))
        batch.formats[str(name)] += 1
        batch.dropped.update({lost for row in rows for lost in row.dropped})
        batch.rows += rows
        batch.origins += [origin] * len(rows)
        said = "".join("-" if example is None else _what_is_trained(example) for example in examples)
        # a long text: each of its rows for itself
        is_long = not settings.paired and examples[0] is not None and examples[0].messages is None
        each = [f"{said}{number}" for number in range(len(rows))] if is_long else [said] * len(rows)
        batch.weight_hashes += [hash_of(f"weight{words}".encode()) for words in each]
        if settings.split_key is None:
            batch.split_hashes += [hash_of(f"split{words}".encode()) for words in each]
        else:
            batch.split_hashes += [hash_of(_value(record.value, settings.split_key).encode())] * len(rows)
    return batch


def _pair(sides: Sequence[list[Row] | BadRow | None], max_length: int) -> list[Row] | BadRow:
    """The rows of a chosen and a rejected answer, or why they cannot be used.

    In the place of one that there is not, a row without trained tokens, which no other document sees.
    """
    rows = list[Row]()
    for side, name in zip(sides, formats.SIDES):
        if side is None:
            continue
        if isinstance(side, BadRow):
            return type(side)(f"the {name} answer: {side}")
        if len(side) != 1:
            return BadRow(f"the {name} answer: the chat template writes it in {len(side)} texts; give a single turn")
        rows += side
    if None in sides:
        rows.insert(sides.index(None), _place_of_another(rows[0]))
    if not all(row.trained_tokens for row, side in zip(rows, sides) if side is not None):
        return TooLong(f"no token of one of its answers is left at max_length {max_length}")
    if np.array_equal(rows[0].tokens, rows[1].tokens):
        return BadRow(f"its two answers are the same tokens at max_length {max_length}, so there is nothing to prefer")
    return rows


def _place_of_another(answer: Row) -> Row:
    """A short row without trained tokens, beside an answer that is judged alone.

    Of some of its tokens, drawn by a hash of all: places beside answers that differ differ too, so that they are not
    counted as copies of one another.
    """
    drawn = np.random.default_rng(hash_of(answer.tokens.tobytes())).choice(answer.tokens, TOKENS_OF_PLACE)
    return replace(answer, tokens=drawn, spans=[(1, 1)], prompt_tokens=0, question="", uncut_tokens=TOKENS_OF_PLACE)


def _what_is_trained(example: Example) -> str:
    """An example as text, the same for copies that differ in ids, dates or whatever else is not trained."""
    messages = [
        [message["role"], message["content"], reasoning_of(message)]
        + [call["function"] for call in message.get("tool_calls", ())]
        for message in example.messages or ()
    ]
    return json.dumps([messages, example.tools, example.prompt, example.completion], sort_keys=True, default=str)


def _value(record: Any, key: str) -> str:
    if key not in record:
        raise BadRow(f"it has no key {key!r}, which data.split_key names")
    return json.dumps(record[key], sort_keys=True, default=str)


def hash_of(content: bytes) -> int:
    """64 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _reject(record: Record, reason: str) -> Rejected:
    return Rejected(record.source, reason, json.dumps(record.value, ensure_ascii=False, default=str))


@contextmanager
def rarely_collecting_garbage() -> Iterator[None]:
    """Collect garbage rarely, and not among the objects of libraries (saves a sixth of the time)."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.freeze()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:  # by whoever called
            gc.unfreeze()


@contextmanager
def one_thread_a_call() -> Iterator[None]:
    """Keep the tokenizer from starting threads in each of ours, where they wait for one another (a sixth of the time).

    It can be told by the environment only, which it asks at every call.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
