"""Which rows are trained in which optimizer step: a pure function of (seed, epoch, step).

The rows of a step do not depend on the number of processes or on the strategy. A run is one stream of rows,
epoch after epoch, cut into global batches. Every row is used exactly once per epoch, and only the last
step of the run may have fewer rows than the others. Within a step, ``dealt`` orders the rows so that no process waits
long for another.

Example, 5 rows, 2 epochs, global batches of 4, seed 0. The epochs visit 2 4 3 0 1 and 1 4 3 0 2, so the steps train
[2 4 3 0], [1 1 4 3] and [0 2 - -]. Two processes with micro-batches of one row take turns: in step 2, if row 0 is the
longest and each after it is shorter, process 0 computes [1] and [3], process 1 computes [1] and [4].
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


def dealt(sizes: np.ndarray, micro_batch_size: int, *, flat: bool) -> np.ndarray:
    """An order of each global batch's rows in which micro-batches that processes compute together have like sizes.

    Consecutive rows form a micro-batch, and the largest comes first. Where rows are padded, each stands beside rows of
    its own length. Where they are flat, micro-batches get about the same number of tokens: the longest rows go to one
    micro-batch each, then, of as many rows that come next, the shortest goes to the fullest.

    Example: rows of 9, 2, 7, 3, 5 and 2 tokens, two to a micro-batch. Padded, they are 9 7, 5 3, 2 2, with 18, 10 and 4
    positions. Flat, 9, 7 and 5 take 2, 2 and 3: they are 9 2, 7 2, 5 3, with 11, 9 and 8.

    Args:
        sizes: tokens of each row, of shape (global batches, rows).
        flat: rows lie end to end, without padding.

    Returns:
        Places within each global batch, of the shape of ``sizes``.
    """
    by_length = np.argsort(-sizes, axis=1, kind="stable")
    if not flat or micro_batch_size == 1:
        return by_length
    batches, rows = sizes.shape
    filled = np.empty((batches, rows // micro_batch_size, micro_batch_size), by_length.dtype)
    tokens = np.zeros(filled.shape[:2], np.int64)
    for number, shorter in enumerate(by_length.reshape(batches, micro_batch_size, -1).swapaxes(0, 1)):
        fullest = np.argsort(-tokens, axis=1, kind="stable")
        np.put_along_axis(filled[:, :, number], fullest, shorter[:, ::-1], axis=1)
        tokens += np.take_along_axis(sizes, filled[:, :, number], axis=1)
    fullest = np.argsort(-tokens, axis=1, kind="stable")
    return np.take_along_axis(filled, fullest[:, :, None], axis=1).reshape(sizes.shape)


def dealt_batch(places: Sequence[int], lengths: np.ndarray, micro_batch_size: int, *, flat: bool) -> list[int]:
    """The rows of one global batch as ``dealt`` orders them.

    Args:
        lengths: tokens of each row that there is; ``EMPTY`` ones have one.
    """
    batch = np.asarray(places)
    order = dealt(_sizes(batch, lengths)[None], micro_batch_size, flat=flat)[0]
    found: list[int] = batch[order].tolist()
    return found


def _sizes(places: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.where(places == EMPTY, 1, lengths[places])


def micro_batches(batch: Sequence[int], *, rank: int, world_size: int, micro_batch_size: int) -> list[list[int]]:
    """One process's share of a global batch, as its micro-batches in order of accumulation.

    The global batch is cut into consecutive micro-batches that are dealt to the processes in turn, so
    that ``len(batch)`` must be a multiple of ``world_size * micro_batch_size``.
    """
    cut = [list(batch[i : i + micro_batch_size]) for i in range(0, len(batch), micro_batch_size)]
    return cut[rank::world_size]


def positions_of(sizes: np.ndarray, micro_batch_size: int, *, flat: bool) -> np.ndarray:
    """Positions that each micro-batch computes: of its rows, or padded to the longest of them.

    Args:
        sizes: tokens of the rows, micro-batch after micro-batch; of any shape.

    Returns:
        Of shape (micro-batches,).
    """
    cut = sizes.reshape(-1, micro_batch_size)
    found: np.ndarray = cut.sum(axis=1) if flat else cut.max(axis=1) * micro_batch_size
    return found


def positions_in(batch: Sequence[int], lengths: np.ndarray, micro_batch_size: int, *, flat: bool) -> int:
    """Positions that all processes compute for a global batch, whose rows stand in the order of its micro-batches."""
    return int(positions_of(_sizes(np.asarray(batch), lengths), micro_batch_size, flat=flat).sum())


def heaviest_micro_batch(
    lengths: np.ndarray,
    *,
    rows_in_run: int,
    global_batch_size: int,
    micro_batch_size: int,
    seed: int,
    flat: bool,
    rows_at_once: int = 1_000_000,
) -> list[int]:
    """Rows of the micro-batch of the whole run that has the most positions, the first of equals.

    It searches every epoch, so that nothing heavier comes later; ``EMPTY`` where the micro-batch ends the run.

    Example: rows of 3, 9, 2, 7 and 5 tokens in the module's order, two rows to a micro-batch. Of the steps [2 4 3 0],
    [1 1 4 3] and [0 2 - -], the second has the longest row twice, where epoch 2 begins. Padded, it is [1 1] and [3 4],
    with 18 and 14 positions; the result is [1 1]. Flat, it is [1 3] and [1 4], with 16 and 14; the result is [1 3].

    Args:
        rows_at_once: rows to search at a time, to bound memory; at least an epoch and a global batch.
    """
    rows, size = len(lengths), global_batch_size
    heaviest: tuple[int, list[int]] = (0, [])
    epochs_at_once = max(math.ceil(size / rows), rows_at_once // rows)
    for first in range(0, math.ceil(rows_in_run / rows), epochs_at_once):
        begin = first * rows // size * size
        end = (first + epochs_at_once) * rows
        end = end // size * size if end < rows_in_run else rows_in_run
        order = np.concatenate(
            [epoch_order(rows, seed, epoch) for epoch in range(begin // rows, math.ceil(end / rows))]
        )
        order = order[begin - begin // rows * rows :][: end - begin]
        order = np.append(order, np.full(-len(order) % size, EMPTY)).reshape(-1, size)
        order = np.take_along_axis(order, dealt(_sizes(order, lengths), micro_batch_size, flat=flat), axis=1)
        positions = positions_of(_sizes(order, lengths), micro_batch_size, flat=flat)
        most = int(positions.argmax())
        if positions[most] > heaviest[0]:
            heaviest = int(positions[most]), order.reshape(-1, micro_batch_size)[most].tolist()
    return heaviest[1]
