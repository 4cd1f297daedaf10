"""Prepared rows, memory-mapped: all processes share them."""

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from finetune.data.encoding import Row
from finetune.errors import InputError


class Rows:
    """The rows of a folder that ``preparation.prepare`` wrote, or a choice of them.

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
