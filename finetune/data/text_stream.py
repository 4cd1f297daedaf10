"""A corpus straight from its files, for one that is too large to be prepared: see ``streaming`` and its limits."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain

import numpy as np

from finetune.cache import key_of
from finetune.config.token_budget import Stage
from finetune.data.batches import Batch
from finetune.data.concatenation import behind_its_first_token, cut_row
from finetune.data.encoding import Row
from finetune.data.stages import stage_lines
from finetune.data.streaming import WINDOW, Stream


class ConcatenatedStream(Stream):
    """Documents end to end, cut wherever a row is full; the rows that a window fills are shuffled.

    Example: documents of 3, 6 and 5 tokens in rows of 4 are 3 rows; the 2 tokens that are left begin the next window's
    first row.
    """

    @property
    def mean_document_tokens(self) -> float:
        """Of a row, which is full."""
        return self.settings.max_length

    @property
    def attended_tokens(self) -> float:
        """Of a row as well: it is one document to the model."""
        return self.settings.max_length

    def describe(self) -> list[str]:
        """Lines for the run's output."""
        names, length = ", ".join(entry.path for entry in self.entries), self.settings.max_length
        return [
            f"streaming {names}: nothing is cached; documents lie end to end in rows of {length:,} tokens, which are "
            f"shuffled among those of {WINDOW:,} documents"
        ]

    def _shuffled(self, windows: Iterator[list[Row]]) -> Iterator[list[Row]]:
        length, left = self.settings.max_length, list[Row]()
        last: Row | None = None
        for number, window in enumerate(chain([self.first_window], windows)):
            for row in window:
                is_next = last is not None and _continues(last, row, length)
                left.append(behind_its_first_token(row) if is_next else row)
                last = row
            ends = np.cumsum([len(row.tokens) for row in left])
            full = int(ends[-1]) // length
            rows = [cut_row(left, ends, place * length, (place + 1) * length) for place in range(full)]
            for place in np.random.default_rng([self.seed, number]).permutation(full):
                yield [rows[place]]
            begin, end = full * length, int(ends[-1])
            left = [cut_row(left, ends, begin, end)] if begin < end else []


def _continues(part: Row, next_part: Row, length: int) -> bool:
    """As ``Rows.continues``, of two rows."""
    is_full = len(part.tokens) == length and part.source == next_part.source
    return is_full and bool(part.tokens[-1] == next_part.tokens[0])


class StagedStream(Stream):
    """A stream whose sources or whose batches change on its way; used as ``Stream`` is.

    Args:
        stages: one after the other.
        stream_of_mix: opens the sources of a mix, by its number, for so many steps of so many rows each.
    """

    def __init__(self, stages: Sequence[Stage], stream_of_mix: Callable[[int, int, int], Stream]) -> None:
        self.stages = stages
        self._ends = list(accumulate(stage.steps for stage in stages))
        self.steps = self._ends[-1]
        mixes = range(max(stage.mix for stage in stages) + 1)
        self.streams = [stream_of_mix(mix, self.steps, stages[0].rows) for mix in mixes]
        self.active, self.next_step = self.streams[0], 1
        self.flat, self.micro_batch_size = self.active.flat, self.active.micro_batch_size
        names = [[stage.steps, stage.rows, stage.mix] for stage in stages]
        self.fingerprint = key_of([[stream.fingerprint for stream in self.streams], names[:-1], names[-1][1:]])
        """Hash of what is known of the sources, and of where they and the batches change; a longer run has the same."""

    @property
    def mean_document_tokens(self) -> float:
        """Of the first window of the first sources."""
        return self.streams[0].mean_document_tokens

    @property
    def attended_tokens(self) -> float:
        """Tokens of the document of a token, on average, there."""
        return self.streams[0].attended_tokens

    def step(self, step: int) -> Batch:
        """The rows of an optimizer step, from 1; steps before it are read and passed over.

        Raises:
            RunStopped: at an unusable row, unless such rows are skipped.
        """
        assert step >= self.next_step, "a stream does not go back"
        while self.next_step <= step:
            stage = self.stages[int(np.searchsorted(self._ends, self.next_step))]
            self.active = self.streams[stage.mix]
            self.active.global_batch_size, self.active.micro_batch_size = stage.rows, self.micro_batch_size
            batch = self.active.step(self.active.next_step)
            self.next_step += 1
        return batch

    def documents(self, place: int) -> list[Row]:
        """The documents of a row of the current step."""
        return self.active.documents(place)

    def heaviest(self) -> list[list[Row]]:
        """The largest possible micro-batch: full rows."""
        self.active.micro_batch_size = self.micro_batch_size
        return self.active.heaviest()

    def newly_rejected(self) -> list[str]:
        """Unused records as lines of JSON, each returned once."""
        return [line for stream in self.streams for line in stream.newly_rejected()]

    def describe(self) -> list[str]:
        """Lines for the run's output."""
        return [*(line for stream in self.streams for line in stream.describe()), *stage_lines(self.stages)]
