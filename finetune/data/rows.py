"""Rows on disk: read, converted, rendered, tokenised and masked once, by one process; then mapped into all of them.

A folder of the cache holds them as Arrow. Its key is a fingerprint of files, tokenizer, template, settings and this
code.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from finetune.cache import data_cache_folder, filled_once, key_of, refuse_if_damaged, write_checksums
from finetune.data import (
    call_arguments,
    chat_template,
    columns,
    encoding,
    encoding_workers,
    formats,
    messages,
    prompt_texts,
    sources,
    special_edges,
    template_process,
    templates,
)
from finetune.data.encoding import Encoder, Row, Settings
from finetune.data.encoding_workers import (
    Encoded,
    encoded,
    hash_of,
    one_thread_a_call,
    rarely_collecting_garbage,
    records_of,
)
from finetune.data.sources import Source
from finetune.errors import InputError

SHOWN = 10
"""Rows that a summary names."""
SCHEMA = pa.schema(
    [
        ("tokens", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.int32())),
        ("source", pa.string()),
        ("question", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("uncut_tokens", pa.int32()),
        ("origin", pa.int32()),
        ("token_hash", pa.uint64()),
        ("split_hash", pa.uint64()),
        ("weight_hash", pa.uint64()),
    ]
)


def prepare(
    entries: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    *,
    tell: Callable[[str, int], None],
) -> Path:
    """The folder with the rows of these sources, prepared now unless they are in the cache.

    It contains ``rows.arrow`` (schema ``SCHEMA``), ``rejected.jsonl`` and ``summary.json``.

    Args:
        tell: called repeatedly with the current activity and the number of rows that are ready.

    Raises:
        InputError: if a source cannot be read, or the cache cannot be written or is damaged.
    """
    key = key_of([sources.identity(entries), identity_of(tokenizer), vars(settings), _identity_of_code()])
    names = ", ".join(entry.path for entry in entries)

    def fill(work: Path) -> None:
        encoder = Encoder(tokenizer, settings)
        with one_thread_a_call(), rarely_collecting_garbage():
            _write(work, entries, encoder, settings, lambda rows: tell(f"Preparing {names}", rows))

    folder = filled_once(
        data_cache_folder() / key,
        fill,
        on_start=lambda: tell(f"Preparing {names}", 0),
        on_wait=lambda: tell(f"Waiting for another process to prepare {names}", 0),
    )
    refuse_if_damaged(folder)
    with contextlib.suppress(OSError):  # another user's, or on a disk that can only be read
        os.utime(folder)  # `finetune data --cache` tells since when it was not used
    return folder


def identity_of(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Everything that the output of a tokenizer depends on, as JSON values."""
    backend = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    template = tokenizer.chat_template
    return [backend, template, tokenizer.special_tokens_map]


def _identity_of_code() -> list[str]:
    """Other code may prepare other rows: libraries count by their version, ours by its text."""
    modules = [call_arguments, chat_template, columns, encoding, encoding_workers, formats, messages, prompt_texts]
    modules += [special_edges, template_process, templates]
    files = [*(Path(str(module.__file__)) for module in modules), Path(__file__)]
    files += sorted(Path(str(sources.__file__)).parent.glob("*.py"))
    ours = [file.read_bytes() for file in files]
    return [hashlib.sha256(b"".join(ours)).hexdigest(), transformers.__version__, tokenizers.__version__]


def _write(
    work: Path, entries: Sequence[Source], encoder: Encoder, settings: Settings, count: Callable[[int], None]
) -> None:
    summary: dict[str, Any] = {
        "rows": 0,
        "truncated": 0,
        "largest_token": 0,
    }
    seen_formats, left_out = Counter[str](), Counter[str]()
    with_column, first_keys = Counter[str](), list[str]()
    rejected, dropped = 0, 0
    first_rejected: list[tuple[str, str]] = []
    first_dropped: list[str] = []
    digest = hashlib.sha256()
    with (
        pa.OSFile(str(work / "rows.arrow"), "wb") as file,
        pa.ipc.new_file(file, SCHEMA) as arrow,
        (work / "rejected.jsonl").open("w", encoding="utf-8") as rejected_file,
    ):
        for batch in encoded(records_of(entries), encoder, settings):
            arrow_batch = _to_arrow(batch)
            arrow.write_batch(arrow_batch)
            for name in ("tokens", "spans"):
                digest.update(arrow_batch.column(name).flatten().to_numpy().tobytes())
                digest.update(np.diff(arrow_batch.column(name).offsets.to_numpy()).tobytes())
            flat = arrow_batch.column("tokens").flatten().to_numpy()
            summary["largest_token"] = max(summary["largest_token"], int(flat.max(initial=0)))
            summary["rows"] += len(batch.rows)
            count(summary["rows"])
            cut = [row for row in batch.rows if row.uncut_tokens > len(row.tokens)]
            summary["truncated"] += len(cut)
            seen_formats.update(batch.formats)
            left_out.update(batch.dropped)
            with_column.update(batch.columns)
            first_keys = first_keys or batch.first_keys
            for refused in sorted(batch.refused, key=lambda each: each.position):
                line = refused.line
                rejected_file.write(json.dumps(vars(line)) + "\n")
                if refused.too_long:
                    first_dropped += [line.source] if dropped < SHOWN else []
                    dropped += 1
                else:
                    first_rejected += [(line.source, line.reason)] if rejected < SHOWN else []
                    rejected += 1
    summary |= {
        "sources": [entry.path for entry in entries],
        "formats": dict(seen_formats.most_common()),
        "left_out": dict(left_out.most_common()),
        "columns": dict(with_column),
        "first_keys": first_keys,
        "rejected": rejected,
        "first_rejected": first_rejected,
        "dropped": dropped,
        "first_dropped": first_dropped,
        "fingerprint": digest.hexdigest(),
    }
    (work / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    write_checksums(work)


def _to_arrow(batch: Encoded) -> pa.RecordBatch:
    rows = batch.rows
    tokens = [row.tokens for row in rows]
    spans = [np.fromiter(chain.from_iterable(row.spans), np.int32, 2 * len(row.spans)) for row in rows]
    columns = [
        _lists(tokens),
        _lists(spans),
        [row.source for row in rows],
        [row.question for row in rows],
        [row.prompt_tokens for row in rows],
        [row.uncut_tokens for row in rows],
        batch.origins,
        [hash_of(row.tobytes()) for row in tokens],
        batch.split_hashes,
        batch.weight_hashes,
    ]
    arrays = [
        pa.array(column, kind.type) if isinstance(column, list) else column for column, kind in zip(columns, SCHEMA)
    ]
    return pa.record_batch(arrays, schema=SCHEMA)


def _lists(rows: list[np.ndarray]) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    flat = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


class Rows:
    """The rows of a folder that ``prepare`` wrote, or a choice of them.

    Args:
        folder: with rows.arrow, rejected.jsonl and summary.json.
        chosen: indices into the folder's rows, in order, with repetitions; None for all rows.

    Raises:
        InputError: if the folder is damaged.
    """

    def __init__(self, folder: Path, chosen: np.ndarray | None = None) -> None:
        self.folder, self.chosen = folder, chosen
        try:
            self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            self._file = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow")))
        except (OSError, ValueError) as error:  # of which Arrow's are some
            raise InputError(
                f"{folder}: the prepared rows are damaged ({str(error).splitlines()[0]}); delete the folder, and "
                "they are prepared again."
            ) from error
        self._batch = lru_cache(maxsize=64)(self._file.get_batch)

    def __len__(self) -> int:
        return self.summary["rows"] if self.chosen is None else len(self.chosen)

    def __getitem__(self, index: int) -> Row:
        """Row by its number, from 0.

        Raises:
            IndexError: if there is no such row.
        """
        stored = index if self.chosen is None else int(self.chosen[index])
        if not 0 <= stored < self.summary["rows"]:
            raise IndexError(f"there are {len(self)} rows, so none with number {index}")
        number = int(np.searchsorted(self._first_of_batch, stored, side="right")) - 1
        batch, i = self._batch(number), stored - int(self._first_of_batch[number])
        spans = batch.column("spans")[i].values.to_numpy().tolist()
        return Row(
            tokens=batch.column("tokens")[i].values.to_numpy(),
            spans=list(zip(spans[::2], spans[1::2])),
            source=batch.column("source")[i].as_py(),
            prompt_tokens=batch.column("prompt_tokens")[i].as_py(),
            question=batch.column("question")[i].as_py(),
            uncut_tokens=batch.column("uncut_tokens")[i].as_py(),
        )

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    def choose(self, chosen: np.ndarray) -> "Rows":
        """Some of these rows, by their numbers."""
        return Rows(self.folder, chosen if self.chosen is None else self.chosen[chosen])

    def column(self, name: str) -> np.ndarray:
        """One of the numbers that are kept for each row: origin, uncut_tokens, token_hash, split_hash ..."""
        parts = [batch.column(name).to_numpy() for batch in self._batches()]
        return self._take(np.concatenate(parts) if parts else np.zeros(0, np.int64))

    @property
    def copy(self) -> np.ndarray:
        """How often each row stands before itself among those chosen, from 0; shape (rows,)."""
        if self.chosen is None:
            return np.zeros(len(self), np.int32)
        order = np.argsort(self.chosen, kind="stable")
        ordered = self.chosen[order]
        first = np.searchsorted(ordered, ordered, side="left")
        copy = np.empty(len(self), np.int32)
        copy[order] = np.arange(len(self)) - first
        return copy

    def continues(self, length: int) -> np.ndarray:
        """Whether each row is the next part of the text of the row before it, and begins with that one's last token.

        Args:
            length: tokens at which texts were cut.

        Returns:
            bool, of shape (rows,).
        """
        first, last, lengths, sources = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[pa.Array]()
        for batch in self._batches():
            column = batch.column("tokens")
            tokens, edges = column.flatten().to_numpy(), column.offsets.to_numpy()
            first.append(tokens[edges[:-1]])
            last.append(tokens[edges[1:] - 1])
            lengths.append(np.diff(edges))
            sources.append(batch.column("source"))
        source = pa.chunked_array(sources, pa.string())
        is_same = pc.call_function("equal", [source[1:], source[:-1]]).to_numpy()
        is_full = np.concatenate(lengths)[:-1] == length
        stored = is_same & is_full & (np.concatenate(last)[:-1] == np.concatenate(first)[1:])
        found = np.concatenate([[False], stored])
        if self.chosen is None:
            return found
        return found[self.chosen] & np.concatenate([[False], np.diff(self.chosen) == 1])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int32."""
        parts = [np.diff(batch.column("tokens").offsets.to_numpy()) for batch in self._batches()]
        return self._take(np.concatenate([np.zeros(0, np.int32), *parts]))

    @cached_property
    def trained_tokens(self) -> np.ndarray:
        """Trained tokens of each row, int32."""
        parts = []
        for batch in self._batches():
            column = batch.column("spans")
            edges, bounds = column.flatten().to_numpy(), column.offsets.to_numpy()
            parts.append(np.add.reduceat(edges[1::2] - edges[::2], bounds[:-1] // 2) if len(edges) else edges)
        return self._take(np.concatenate([np.zeros(0, np.int32), *parts]))

    @property
    def fingerprint(self) -> str:
        """Hash of tokens and masks, in order."""
        chosen = b"" if self.chosen is None else self.chosen.astype(np.int64).tobytes()
        return hashlib.sha256(self.summary["fingerprint"].encode() + chosen).hexdigest()

    def _batches(self) -> Any:
        return map(self._file.get_batch, range(self._file.num_record_batches))

    def _take(self, values: np.ndarray) -> np.ndarray:
        return values if self.chosen is None else values[self.chosen]

    @cached_property
    def _first_of_batch(self) -> np.ndarray:
        sizes = [batch.num_rows for batch in self._batches()]
        return np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(np.int64)
