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
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.data import formats, sources
from finetune.data.encoding import Encoder, Row
from finetune.data.sources import Record, Rejected, Source
from finetune.errors import BadRow
from finetune.hardware import cores

RECORDS_AT_ONCE = 128


@dataclass(frozen=True)
class Settings:
    """Settings that change the rows, beside files and tokenizer."""

    max_length: int
    """Maximum tokens of a row."""
    format: str = "auto"
    """One of ``formats.FORMATS``, or auto."""
    train_on: str = "assistant"
    """assistant, last or all."""
    split_key: str | None = None
    """Field whose value, instead of the whole row, decides the side of a train/eval split."""


@dataclass
class Encoded:
    """The results of some consecutive records."""

    rows: list[Row] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    split_hashes: list[int] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[int, Rejected, bool]] = field(default_factory=list)
    """Position of the record, why it is not used, and whether only because ``max_length`` left no trained token."""


def first_rows(
    entries: Sequence[Source], tokenizer: PreTrainedTokenizerBase, settings: Settings, *, count: int
) -> list[Row]:
    """The first usable rows of the sources, without the cache."""
    encoder = Encoder(tokenizer, train_on=settings.train_on, max_length=settings.max_length)
    return list(islice((row for batch in encoded(entries, encoder, settings) for row in batch.rows), count))


def encoded(
    entries: Sequence[Source], encoder: Encoder, settings: Settings, *, streaming: bool = False
) -> Iterator[Encoded]:
    """The rows of these sources in batches, in their order, made on several threads.

    A few batches are under way at a time, so that memory does not grow with the data.

    Args:
        streaming: read datasets of the hub from there, without a copy on disk.

    Raises:
        InputError: if a source cannot be read.
    """
    records = ((origin, record) for origin, entry in enumerate(entries) for record in sources.read(entry, streaming))
    threads = min(8, cores.usable() + 1)  # one more than cores, because they take turns at what Python does itself
    with ThreadPoolExecutor(threads) as pool:
        under_way: deque[Future[Encoded]] = deque()
        try:
            while chunk := list(islice(records, RECORDS_AT_ONCE)):
                under_way.append(pool.submit(_encode, chunk, encoder, settings))
                if len(under_way) > 2 * threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def _encode(chunk: Sequence[tuple[int, Record | Rejected]], encoder: Encoder, settings: Settings) -> Encoded:
    batch = Encoded()
    kept = []
    for position, (origin, record) in enumerate(chunk):
        if isinstance(record, Rejected):
            batch.refused.append((position, record, False))
            continue
        try:
            name = formats.detect(record.value) if settings.format == "auto" else settings.format
            example = formats.convert(record.value, settings.format)
            kept.append((position, origin, record, name, example, _split_hash(record.value, settings.split_key)))
        except BadRow as reason:
            batch.refused.append((position, _reject(record, str(reason)), False))
    results = encoder.encode([(record.source, example) for _, _, record, _, example, _ in kept])
    for (position, origin, record, name, _, split_hash), result in zip(kept, results):
        if isinstance(result, BadRow):
            batch.refused.append((position, _reject(record, str(result)), False))
            continue
        batch.formats[str(name)] += 1
        rows = [row for row in result if row.trained_tokens]
        if not rows:
            lost = f"no trained token is left of it at max_length {encoder.max_length}"
            batch.refused.append((position, _reject(record, lost), True))
        batch.rows += rows
        batch.origins += [origin] * len(rows)
        if len(result) > 1 and settings.split_key is None:  # a long text: each of its rows for itself
            # another hash than that of the tokens alone, by which a weight below 1 chooses
            batch.split_hashes += [hash_of(b"split" + row.tokens.tobytes()) for row in rows]
        else:
            batch.split_hashes += [split_hash] * len(rows)
    return batch


def _split_hash(value: Any, key: str | None) -> int:
    if key is not None:
        if key not in value:
            raise BadRow(f"it has no key {key!r}, which data.split_key names")
        value = value[key]
    return hash_of(json.dumps(value, sort_keys=True, default=str).encode())


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
