"""Which rows are trained in which optimizer step: a pure function of (seed, epoch, step).

The order does not depend on the number of processes or on the strategy. A run is one stream of rows,
epoch after epoch, cut into global batches; every row is used exactly once per epoch, and only the last
step of the run may hold fewer rows than the others.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

EMPTY = -1
"""Index that stands for no row: it fills the places of a last step with fewer rows than a global batch."""


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


def batch_problems(global_batch_size: int, micro_batch_size: int, world_size: int) -> list[str]:
    """Why a global batch cannot be cut into micro-batches for every process, naming the nearest ones that can."""
    unit = micro_batch_size * world_size
    if global_batch_size % unit == 0:
        return []
    below, above = global_batch_size // unit * unit, (global_batch_size // unit + 1) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    return [
        f"train.global_batch_size {global_batch_size} does not divide into micro-batches of {micro_batch_size} rows on "
        f"{world_size} process{'es' if world_size > 1 else ''} ({unit} rows at a time); set it to {nearest}, or change "
        "train.micro_batch_size."
    ]


def positions_in(batch: Sequence[int], lengths: Sequence[int], micro_batch_size: int) -> int:
    """Positions that all processes compute for a global batch, each micro-batch padded to its longest row."""
    cut = [batch[i : i + micro_batch_size] for i in range(0, len(batch), micro_batch_size)]
    return sum(len(rows) * max(lengths[i] if i != EMPTY else 1 for i in rows) for rows in cut)
