"""Which rows are trained in which optimizer step: a pure function of (seed, epoch, step).

The order does not depend on the number of processes or on the strategy. A run is one stream of rows,
epoch after epoch, cut into global batches. Every row is used exactly once per epoch, and only the last
step of the run may have fewer rows than the others.

Example, 5 rows, 2 epochs, global batches of 4, seed 0. The epochs visit 2 4 3 0 1 and 1 4 3 0 2, so the steps train
[2 4 3 0], [1 1 4 3] and [0 2 - -]. Two processes with micro-batches of one row take turns: in step 2, process 0
computes [1] and [4], process 1 computes [1] and [3].
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

EMPTY = -1
"""Index that means no row: it fills up a last step with fewer rows than a global batch."""


@lru_cache(maxsize=4)
def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of ``range(rows)`` in which an epoch (from 0) visits the rows."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


def global_batch(step: int, *, rows: int, rows_in_run: int, global_batch_size: int, seed: int) -> list[int]:
    """Indices of the rows of one optimizer step (from 1), filled with ``EMPTY`` past the end of the run."""
    first = (step - 1) * global_batch_size
    positions = range(first, first + global_batch_size)
    return [int(epoch_order(rows, seed, p // rows)[p % rows]) if p < rows_in_run else EMPTY for p in positions]


def micro_batches(batch: Sequence[int], *, rank: int, world_size: int, micro_batch_size: int) -> list[list[int]]:
    """One process's share of a global batch, as its micro-batches in order of accumulation.

    The global batch is cut into consecutive micro-batches that are dealt to the processes in turn, so
    that ``len(batch)`` must be a multiple of ``world_size * micro_batch_size``.
    """
    cut = [list(batch[i : i + micro_batch_size]) for i in range(0, len(batch), micro_batch_size)]
    return cut[rank::world_size]


def positions_in(
    batch: Sequence[int], lengths: Sequence[int] | np.ndarray, micro_batch_size: int, *, padded: bool
) -> int:
    """Positions that all processes compute for a global batch, each micro-batch padded to its longest row, or flat."""
    sizes = [int(lengths[i]) if i != EMPTY else 1 for i in batch]
    if not padded:
        return sum(sizes)
    cut = [sizes[i : i + micro_batch_size] for i in range(0, len(sizes), micro_batch_size)]
    return sum(len(rows) * max(rows) for rows in cut)


def heaviest_micro_batch(
    lengths: np.ndarray,
    *,
    rows_in_run: int,
    global_batch_size: int,
    micro_batch_size: int,
    seed: int,
    padded: bool,
    rows_at_once: int = 1_000_000,
) -> list[int]:
    """Rows of the micro-batch of the whole run that has the most positions, the first of equals.

    It searches every epoch, so that nothing heavier comes later; ``EMPTY`` where the micro-batch ends the run.

    Example: rows of 3, 9, 2, 7 and 5 tokens in the module's order, two rows to a micro-batch. Padded, [2 4] takes
    2 x 5 = 10 positions, [3 0] takes 14, and [1 1], the end of epoch 1 with the begin of epoch 2, takes 18: the result.

    Args:
        rows_at_once: rows to search at a time, to bound memory; at least an epoch and a micro-batch.
    """
    rows = len(lengths)
    heaviest: tuple[int, list[int]] = (0, [])
    epochs_at_once = max(math.ceil(micro_batch_size / rows), rows_at_once // rows)
    for first in range(0, math.ceil(rows_in_run / rows), epochs_at_once):
        begin = first * rows // micro_batch_size * micro_batch_size
        end = (first + epochs_at_once) * rows
        end = end // micro_batch_size * micro_batch_size if end < rows_in_run else rows_in_run
        order = np.concatenate(
            [epoch_order(rows, seed, epoch) for epoch in range(begin // rows, math.ceil(end / rows))]
        )
        order = order[begin - begin // rows * rows :][: end - begin]
        order = np.append(order, np.full(-len(order) % micro_batch_size, EMPTY)).reshape(-1, micro_batch_size)
        sizes = np.where(order == EMPTY, 1, lengths[order])
        positions = sizes.max(axis=1) * micro_batch_size if padded else sizes.sum(axis=1)
        most = int(positions.argmax())
        if positions[most] > heaviest[0]:
            heaviest = int(positions[most]), order[most].tolist()
    return heaviest[1]
