"""Batches straight from the files, for corpora not worth caching: nothing is stored, and memory stays bounded.

Every process reads, tokenises and packs the whole stream, so it knows the trained tokens of each step without
communication. The rows of a step depend only on files and seed, whatever the number of processes. Limits: a later step
is reached by reading up to it, and rows are shuffled only within a window.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.cache import key_of
from finetune.data.batches import Batch, sources_of
from finetune.data.columns import OPTIONAL, unknown_problems
from finetune.data.encoding import Encoder, Row, Settings
from finetune.data.encoding_workers import Refused, encoded
from finetune.data.packing import pack
from finetune.data.sampler import dealt_batch, positions_in
from finetune.data.sources import Source, extent
from finetune.data.sources.turns import in_turns, readings_of
from finetune.errors import InputError, RunStopped, refuse_if_any

WINDOW = 1000
"""Documents that are shuffled and packed together."""


class Stream:
    """The batches of a run, in order; used as ``batches.Batches`` is, but one step after the other.

    Args:
        steps: optimizer steps of the run.
        vocabulary: tokens that the model knows.
        skip_bad_rows: skip unusable rows; otherwise the run stops there.

    Raises:
        InputError: if there is no row to train on.
    """

    paired = False

    def __init__(
        self,
        entries: Sequence[Source],
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        *,
        packing: bool,
        flat: bool,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        steps: int,
        vocabulary: int,
        skip_bad_rows: bool,
    ) -> None:
        self.entries, self.settings = entries, settings
        self.packing, self.flat = packing, flat or packing
        self.encoder = Encoder(tokenizer, settings)
        self.global_batch_size, self.micro_batch_size, self.seed = global_batch_size, micro_batch_size, seed
        self.steps, self.vocabulary, self.skip_bad_rows = steps, vocabulary, skip_bad_rows
        self._rejected: list[str] = []
        self._with_column: set[str] = set()
        self._first_keys: list[str] = []
        self.next_step = 1
        self.current: list[list[Row]] = []
        windows = self._windows()
        try:
            self.first_window = next(windows)  # reports problems with the files before the run begins
        except RunStopped as error:
            raise InputError(str(error)) from error
        refuse_if_any(self._unknown_columns(optional=False))
        rows = [[row.tokens.tolist(), row.spans] for row in self.first_window]
        names = [[entry.path, entry.subset, entry.hub_split, entry.weight, extent(entry)] for entry in entries]
        self.fingerprint = key_of([names, vars(settings), rows])
        """Hash of what is read, as far as it is known before: names, sizes, settings, and the first window."""
        self._places = self._shuffled(windows)

    @property
    def mean_document_tokens(self) -> float:
        """Of the first window."""
        return sum(len(row.tokens) for row in self.first_window) / len(self.first_window)

    @property
    def attended_tokens(self) -> float:
        """Tokens of the document of a token, on average over the tokens of the first window: E[l^2] / E[l]."""
        lengths = [len(row.tokens) for row in self.first_window]
        return sum(length**2 for length in lengths) / sum(lengths)

    def describe(self) -> list[str]:
        """Lines for the run's output."""
        names = ", ".join(entry.path for entry in self.entries)
        packed = f", packed into rows of {self.settings.max_length:,} tokens" if self.packing else ""
        lost = Counter(what for row in self.first_window for what in row.dropped)
        first = f"of the first {len(self.first_window):,} documents"
        return [
            *self._unknown_columns(optional=True),
            f"streaming {names}: nothing is cached; rows are shuffled in windows of {WINDOW:,} documents{packed}",
            *(f"{first}, the chat template leaves out {what} of {rows:,}" for what, rows in lost.most_common()),
        ]

    def step(self, step: int) -> Batch:
        """The rows of an optimizer step, from 1; steps before it are read and passed over.

        Raises:
            RunStopped: at an unusable row, unless such rows are skipped.
        """
        assert step >= self.next_step, "a stream does not go back"
        while self.next_step <= step:
            self.current = list(islice(self._places, self.global_batch_size))
            self.next_step += 1
        lengths = np.array([sum(len(row.tokens) for row in documents) for documents in self.current])
        how: dict[str, Any] = {"micro_batch_size": self.micro_batch_size, "flat": self.flat}
        places = dealt_batch(range(self.global_batch_size), lengths, **how)
        return Batch(
            places,
            trained_tokens=sum(row.trained_tokens for documents in self.current for row in documents),
            tokens=int(lengths.sum()),
            total_tokens=positions_in(places, lengths, **how),
            sources=partial(sources_of, [self.current[place] for place in places]),
        )

    def documents(self, place: int) -> list[Row]:
        """The documents of a row of the current step."""
        return self.current[place]

    def newly_rejected(self) -> list[str]:
        """Unused records as lines of JSON, each returned once."""
        lines, self._rejected = self._rejected, []
        return lines

    def heaviest(self) -> list[list[Row]]:
        """The largest possible micro-batch: full rows."""
        full = np.zeros(self.settings.max_length, np.int32)
        row = Row(full, [(1, len(full))], f"rows of data.max_length {len(full)}")
        return [[row]] * self.micro_batch_size

    def _unknown_columns(self, *, optional: bool) -> list[str]:
        """Columns that are missing so far, as sentences. Of an optional field they may come later, unless the first
        window is all that there is."""
        is_all = len(self.first_window) < WINDOW
        columns = [each for each in self.settings.columns if (each[0] in OPTIONAL and not is_all) == optional]
        looked_at = "no row" if is_all else f"none of the first {WINDOW:,} documents"
        return unknown_problems(tuple(columns), self._with_column, self._first_keys, looked_at)

    def _shuffled(self, windows: Iterator[list[Row]]) -> Iterator[list[Row]]:
        window, number = self.first_window, 0
        while True:
            order = np.random.default_rng([self.seed, number])
            places = [[row] for row in window]
            if self.packing:
                packs = pack(np.array([len(row.tokens) for row in window]), self.settings.max_length)
                places = [[window[int(i)] for i in packs[number]] for number in range(len(packs))]
            for place in order.permutation(len(places)):
                yield places[place]
            window, number = next(windows), number + 1

    def _windows(self) -> Iterator[list[Row]]:
        """Windows of documents, pass after pass over the sources; the last of a pass may be smaller."""
        for number in count():
            rows = self._one_pass(is_first=number == 0)
            found = False
            while window := list(islice(rows, WINDOW)):
                found = True
                yield window
            if not found:
                names = ", ".join(entry.path for entry in self.entries)
                raise InputError(f"{names}: no row can be trained on; check the files with: finetune data.")

    def _one_pass(self, *, is_first: bool) -> Iterator[Row]:
        """The rows of all sources in turns, of each as often as its weight says."""
        readings = readings_of(self.entries)
        for batch in encoded(in_turns(readings), self.encoder, self.settings):
            self._with_column |= set(batch.columns)
            self._first_keys = self._first_keys or batch.first_keys
            if is_first:
                self._reject([each for each in batch.refused if readings[each.origin].is_first])
            for row, origin, weight_hash in zip(batch.rows, batch.origins, batch.weight_hashes):
                self._refuse_if_unknown(row)
                share = readings[origin].share
                if share == 1 or weight_hash / 2.0**64 < share:
                    yield row

    def _reject(self, records: Sequence[Refused]) -> None:
        for refused in sorted(records, key=lambda each: each.position):
            self._rejected.append(json.dumps(vars(refused.line)))
            if not (self.skip_bad_rows or refused.too_long):
                raise RunStopped(
                    f"{refused.line.source}: {refused.line.reason}. The run stops at this row; fix it, or skip such "
                    "rows with --data.on_bad_row skip."
                )

    def _refuse_if_unknown(self, row: Row) -> None:
        refuse_if_any(vocabulary_problems(int(row.tokens.max()), self.vocabulary))


def vocabulary_problems(largest_token: int, vocabulary: int) -> list[str]:
    """Tokens that the model has no embedding for.

    Args:
        vocabulary: tokens that the model knows.
    """
    if largest_token < vocabulary:
        return []
    return [
        f"The tokenizer produces token {largest_token}, but the model's vocabulary has only {vocabulary} tokens; set "
        "model.tokenizer to the model's own."
    ]


def problems(held_out: object, steps: int | None) -> list[str]:
    """Why a run cannot stream with these settings, as sentences."""
    found = []
    if isinstance(held_out, float):
        found.append(
            f"data.streaming cannot hold out a fraction, but data.eval is {held_out}; name a file of held-out data."
        )
    if steps is None:
        found.append("data.streaming does not know the length of an epoch; set train.steps.")
    return found
