"""Rows of the model's input, the batches they form, and the tensors of a micro-batch.

A row of the input is one document, or several with packing. ``Batches`` knows which rows belong to which optimizer
step; ``collate`` lays the rows of a micro-batch end to end with the bounds of their documents, or pads them to the
longest.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from finetune.cache import key_of
from finetune.data.dataset import describe, rejected_lines
from finetune.data.encoding import Row
from finetune.data.packing import Packs, efficiency, pack_apart
from finetune.data.rows import Rows
from finetune.data.sampler import EMPTY, dealt_batch, global_batch, heaviest_micro_batch, positions_in

IGNORED = -100
"""Label of a position that is not trained (the ``ignore_index`` of PyTorch and transformers)."""
NOTHING = Row(np.zeros(1, np.int32), [], "")
"""The document of a row that is not there: a single token that is not trained."""


@dataclass(frozen=True)
class Batch:
    """The rows of one optimizer step, over all processes."""

    places: list[int]
    """Numbers of the rows, micro-batch after micro-batch; ``EMPTY`` where the run has no more."""
    trained_tokens: int
    tokens: int
    """Tokens of the documents, without padding."""
    total_tokens: int
    """Positions that all processes compute, padding included."""
    sources: Callable[[], list[str]] = field(compare=False)
    """Returns ``file:line`` of each row of the input, for all of its documents."""

    @property
    def rows(self) -> int:
        """Rows that there are."""
        return sum(place != EMPTY for place in self.places)


class Inputs:
    """Rows of the input: each a document, or several.

    Args:
        rows: the documents.
        flat: whether the rows of a micro-batch lie end to end, without padding.
        paired: whether every two documents that follow one another are a row.
        packs: or which of them are.
    """

    def __init__(self, rows: Rows, *, flat: bool, paired: bool = False, packs: Packs | None = None) -> None:
        if paired:
            packs = Packs(np.arange(len(rows), dtype=np.int32), np.arange(0, len(rows) + 1, 2))
        self.rows, self.packs, self.flat, self.paired = rows, packs, flat, paired
        self.tokens = rows.lengths if packs is None else packs.tokens(rows.lengths)
        """Of each row."""
        self.trained_tokens = rows.trained_tokens if packs is None else packs.tokens(rows.trained_tokens)
        self.lengths = self.tokens if packs is None or flat else packs.padded(rows.lengths)
        """Positions of each row: its tokens; padded, those of its longest document for each of its documents."""
        self.references: np.ndarray | None = None
        """What ``Row.reference`` is of each document."""

    def __len__(self) -> int:
        return len(self.lengths)

    def documents(self, place: int) -> list[Row]:
        """The documents of a row of the input; none for ``EMPTY``."""
        if place == EMPTY:
            return []
        numbers = [place] if self.packs is None else self.packs[place].tolist()
        known = self.references
        if known is None:
            return [self.rows[i] for i in numbers]
        return [replace(self.rows[i], reference=float(known[i])) for i in numbers]


class Batches(Inputs):
    """Which documents are trained in which step: a function of (seed, epoch, step) only, for any number of processes.

    Args:
        rows: the documents.
        packing: whether documents share rows of ``max_length`` tokens.
        paired: whether every two documents that follow one another are a row, instead of packing.
        flat: whether the rows of a micro-batch lie end to end, without padding; packed rows always do.
        steps: optimizer steps of the run; None for ``epochs``.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        packing: bool,
        flat: bool,
        max_length: int,
        steps: int | None,
        epochs: float,
        global_batch_size: int,
        micro_batch_size: int,
        seed: int,
        paired: bool = False,
    ) -> None:
        packs = pack_apart(rows.lengths, rows.copy, max_length) if packing else None
        super().__init__(rows, flat=flat or packing, paired=paired, packs=packs)
        self.packing, self.max_length = packing, max_length
        self._rejected = rejected_lines(rows)
        self.rows_in_epoch = len(self)
        rows_in_run = steps * global_batch_size if steps else max(1, round(self.rows_in_epoch * epochs))
        self.steps = math.ceil(rows_in_run / global_batch_size)
        self.order = {"rows_in_run": rows_in_run, "global_batch_size": global_batch_size, "seed": seed}
        self.micro_batch_size = micro_batch_size

    def step(self, step: int) -> Batch:
        """The rows of an optimizer step, from 1."""
        how: dict[str, Any] = {"micro_batch_size": self.micro_batch_size, "flat": self.flat}
        places = dealt_batch(global_batch(step, rows=self.rows_in_epoch, **self.order), self.lengths, **how)
        taken = [place for place in places if place != EMPTY]
        return Batch(
            places,
            trained_tokens=int(self.trained_tokens[taken].sum()),
            tokens=int(self.tokens[taken].sum()),
            total_tokens=positions_in(places, self.lengths, **how),
            sources=lambda: sources_of(map(self.documents, places)),
        )

    def heaviest(self) -> list[list[Row]]:
        """Documents of the micro-batch with the most positions of the whole run."""
        places = heaviest_micro_batch(
            self.lengths, micro_batch_size=self.micro_batch_size, flat=self.flat, **self.order
        )
        return [self.documents(place) for place in places]

    @property
    def fingerprint(self) -> str:
        """Hash of tokens and masks, in order, and of how they are packed."""
        return key_of([self.rows.fingerprint, self.max_length]) if self.packing else self.rows.fingerprint

    @property
    def mean_document_tokens(self) -> float:
        """Tokens of a document."""
        return float(self.rows.lengths.mean())

    @property
    def attended_tokens(self) -> float:
        """Tokens of the document of a token, on average over tokens: E[l^2] / E[l]. A token attends to half of them.

        Of documents of 100 and 900 tokens it is 820, where their mean is 500.
        """
        lengths = self.rows.lengths.astype(float)
        return float((lengths**2).sum() / lengths.sum())

    def newly_rejected(self) -> Iterator[str]:
        """Unused records as lines of JSON, each returned once."""
        lines, self._rejected = self._rejected, iter(())
        return lines

    def describe(self) -> list[str]:
        """Lines for the run's output."""
        lines = [describe(self.rows, "training")]
        if self.packing and self.packs is not None:
            full = efficiency(self.rows.lengths, self.packs, self.max_length)
            lines.append(f"packed into {len(self.packs):,} rows of {self.max_length:,} tokens, {full:.1%} full")
        return lines


def sources_of(places: Iterable[Sequence[Row]]) -> list[str]:
    """``file:line`` of each row of the input, given its documents; an empty text for a place without a row."""
    return [", ".join(row.source for row in documents) for documents in places]


def describe_batch(places: Sequence[Sequence[Row]]) -> str:
    """The size of a micro-batch, and where its documents come from."""
    tokens = [sum(len(row.tokens) for row in documents) for documents in places]
    named = [row.source for documents in places for row in documents]
    more = ", ..." if len(named) > 3 else ""
    rows = f"{len(places)} row{'s' if len(places) > 1 else ''}"
    return f"The largest micro-batch of the run ({rows} of up to {max(tokens):,} tokens: {', '.join(named[:3])}{more})"


def collate(
    places: Sequence[Sequence[Row]], device: torch.device, *, flat: bool
) -> tuple[torch.Tensor, dict[str, Any]]:
    """One micro-batch on its device: the tokens to predict, and the model's keyword arguments.

    Flat: one row of all documents without padding, with their bounds, which ``finetune.models.attention`` respects.
    Padded: each document a line, on the right to the longest, without an attention mask: with causal attention nothing
    looks at what stands to its right, and no loss is taken at padded positions; so attention keeps its fastest path.

    Args:
        places: the documents of each row of the input. A row without documents becomes one of ``NOTHING``.

    Returns:
        ``next_tokens`` (labels, shifted already; ``IGNORED`` where nothing is trained) and ``input_ids``, each of
        shape (documents, positions) and int64; flat, of shape (1, positions), and with the bounds of the documents.
        Labels carry the ``trained_positions``, and padded the tokens of each line, ``line_tokens``.
    """
    every = [document for documents in places for document in (documents or [NOTHING])]
    lines = [every] if flat else [[document] for document in every]
    positions = max(sum(len(row.tokens) for row in documents) for documents in lines)
    input_ids = torch.zeros(len(lines), positions, dtype=torch.int64)
    next_tokens = torch.full_like(input_ids, IGNORED)
    for line, documents in enumerate(lines):
        start = 0
        for row in documents:
            tokens = torch.from_numpy(np.asarray(row.tokens, np.int64))
            input_ids[line, start : start + len(tokens)] = tokens
            for first, end in row.spans:
                next_tokens[line, start + first - 1 : start + end - 1] = tokens[first:end]
            start += len(tokens)
    bounds = document_bounds([len(row.tokens) for row in lines[0]], device) if flat else {}
    labels: Any = on_device(next_tokens, device)
    labels.trained_positions = on_device(trained_positions(next_tokens), device)
    if not flat:
        labels.line_tokens = on_device(torch.tensor([len(row.tokens) for (row,) in lines]), device)
    return labels, {"input_ids": on_device(input_ids, device), **bounds}


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor of the host; to a GPU from pinned memory, so that the host does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def trained_positions(next_tokens_BT: torch.Tensor) -> torch.Tensor:
    """Positions whose next token is trained, rows end to end; the first of all where none is.

    ``collate`` finds them on the host, and labels carry them: else the host waits for a GPU, which has nothing to do
    when it goes on. Labels that are made from others carry none.
    """
    known: torch.Tensor | None = getattr(next_tokens_BT, "trained_positions", None)
    if known is not None:
        return known
    found = (next_tokens_BT.flatten() != IGNORED).nonzero().flatten()
    return found if len(found) else found.new_zeros(1)


def document_bounds(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Keyword arguments for the model's forward, built on the host once per batch: no layer waits for the device.

    Args:
        lengths: tokens of each document in the row, in its order. They cover the whole row: padding, where there
            is some, is a document too.

    Returns:
        ``position_ids``, of shape (1, T) and int64, from 0 in each document; ``cu_seq_lens_q`` and
        ``cu_seq_lens_k``, the same tensor of shape (documents + 1,) and int32: where each document begins, and T;
        ``max_length_q`` and ``max_length_k``, the tokens of the longest document.

    Raises:
        ValueError: if there is no document, or an empty one.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"documents have {list(lengths)[:8]} tokens; give at least one document, none of them empty")
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = sizes.cumsum(0)
    positions = torch.arange(int(ends[-1])) - (ends - sizes).repeat_interleave(sizes)
    bounds = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    bounds = on_device(bounds, device)
    longest = max(lengths)
    return {
        "position_ids": on_device(positions[None], device),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
