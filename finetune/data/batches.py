"""Rows of the model's input, and the batches they form.

A row of the input is one document, or several with packing. ``Batches`` knows which rows belong to which optimizer
step, and ``finetune.data.collation`` makes tensors of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from finetune.cache import key_of
from finetune.data.dataset import describe, rejected_lines
from finetune.data.encoding import Row
from finetune.data.packing import efficiency, pack_apart
from finetune.data.rows import Rows
from finetune.data.sampler import EMPTY, global_batch, heaviest_micro_batch, positions_in


@dataclass(frozen=True)
class Batch:
    """The rows of one optimizer step, over all processes."""

    places: list[int]
    """Numbers of the rows, ``EMPTY`` where the run has no more."""
    trained_tokens: int
    tokens: int
    """Tokens of the documents, without padding."""
    total_tokens: int
    """Positions that all processes compute, padding included."""
    sources: Callable[[], list[str]] = field(compare=False)
    """Returns ``file:line`` of each row of the input, for all of its documents."""


class Batches:
    """Which documents are trained in which step: a function of (seed, epoch, step) only, for any number of processes.

    Args:
        rows: the documents.
        packing: whether documents share rows of ``max_length`` tokens.
        steps: optimizer steps of the run; None for ``epochs``.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        packing: bool,
        max_length: int,
        steps: int | None,
        epochs: float,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
    ) -> None:
        self.rows, self.max_length = rows, max_length
        self._rejected = rejected_lines(rows)
        self.packs = pack_apart(rows.lengths, rows.copy, max_length) if packing else None
        self.rows_in_epoch = len(rows) if self.packs is None else len(self.packs)
        rows_in_run = steps * global_batch_size if steps else max(1, round(self.rows_in_epoch * epochs))
        self.steps = math.ceil(rows_in_run / global_batch_size)
        self.order = {"rows_in_run": rows_in_run, "global_batch_size": global_batch_size, "seed": seed}
        self.micro_batch_size = micro_batch_size
        lengths, trained = rows.lengths, rows.trained_tokens
        self.lengths = lengths if self.packs is None else self.packs.tokens(lengths)
        self.trained_tokens = trained if self.packs is None else self.packs.tokens(trained)

    def step(self, step: int) -> Batch:
        """The rows of an optimizer step, from 1."""
        places = global_batch(step, rows=self.rows_in_epoch, **self.order)
        taken = [place for place in places if place != EMPTY]
        return Batch(
            places,
            trained_tokens=int(self.trained_tokens[taken].sum()),
            tokens=int(self.lengths[taken].sum()),
            total_tokens=positions_in(places, self.lengths, self.micro_batch_size, padded=self.packs is None),
            sources=lambda: sources_of(map(self.documents, taken)),
        )

    def documents(self, place: int) -> list[Row]:
        """The documents of a row of the input; none for ``EMPTY``."""
        if place == EMPTY:
            return []
        return [self.rows[place]] if self.packs is None else [self.rows[int(i)] for i in self.packs[place]]

    def heaviest(self) -> list[list[Row]]:
        """Documents of the micro-batch with the most positions of the whole run."""
        places = heaviest_micro_batch(
            self.lengths, micro_batch_size=self.micro_batch_size, padded=self.packs is None, **self.order
        )
        return [self.documents(place) for place in places]

    @property
    def fingerprint(self) -> str:
        """Hash of tokens and masks, in order, and of how they are packed."""
        return self.rows.fingerprint if self.packs is None else key_of([self.rows.fingerprint, self.max_length])

    @property
    def mean_document_tokens(self) -> float:
        """Tokens of a document; a token attends to half of them."""
        return float(self.rows.lengths.mean())

    def newly_rejected(self) -> Iterator[str]:
        """Unused records as lines of JSON, each returned once."""
        lines, self._rejected = self._rejected, iter(())
        return lines

    def describe(self) -> list[str]:
        """Lines for the run's output."""
        lines = [describe(self.rows, "training")]
        if self.packs is not None:
            full = efficiency(self.rows.lengths, self.packs, self.max_length)
            lines.append(f"packed into {len(self.packs):,} rows of {self.max_length:,} tokens, {full:.1%} full")
        return lines


def sources_of(places: Iterable[Sequence[Row]]) -> list[str]:
    """``file:line`` of each row of the input, given its documents."""
    return [", ".join(row.source for row in documents) for documents in places]


def describe_batch(places: Sequence[Sequence[Row]]) -> str:
    """The size of a micro-batch, and where its documents come from."""
    tokens = [sum(len(row.tokens) for row in documents) for documents in places]
    named = [row.source for documents in places for row in documents]
    more = ", ..." if len(named) > 3 else ""
    rows = f"{len(places)} row{'s' if len(places) > 1 else ''}"
    return f"The largest micro-batch of the run ({rows} of up to {max(tokens):,} tokens: {', '.join(named[:3])}{more})"
