"""The averages of the trained weights (``optim.averaging``) in the place of the weights, to compute with for a while.

Each process exchanges the values of its shards: masters, where there are any, from which the weights that are computed
with are then made anew. Weights in fp32 and their averages trade places without a second copy; of weights in 16 bits,
to which averages are rounded, a copy is kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from finetune.distributed.sharded_state import WEIGHTS, inner_optimizer, own_values, sync_compute_weights
from finetune.distributed.strategy import Strategy
from finetune.optim.averaging import AVERAGE, averages

AVERAGES = f"optimizer/{AVERAGE}/"
"""Prefix of the names of their pieces."""


@contextmanager
def averaged_weights(strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it the model has the averages; then its weights again, to the bit. Collective.

    Does nothing to a run that keeps no averages, or has made no step. After an error nothing is put back, which would
    wait for other processes: the run ends.

    Args:
        model, optimizer: as ``prepare`` returned them.
    """
    if not averages(inner_optimizer(model, optimizer)):
        yield
        return
    pairs = _pairs(strategy, model, optimizer)
    kept = [_exchange(*pair) for pair in pairs]
    sync_compute_weights(model)
    yield
    pairs = _pairs(strategy, model, optimizer)  # again: it has FSDP2 free what was gathered of the averages
    for (weights, average), before in zip(pairs, kept, strict=True):
        _exchange(weights, average) if before is None else weights.copy_(before)
    sync_compute_weights(model)


def _pairs(
    strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of each shard's weights and of its averages. None lies on disk: ``config.compatibility`` refuses that."""
    found = dict(own_values(strategy, model, optimizer))
    averaged = [name for name in found if name.startswith(AVERAGES)]
    return [(found[WEIGHTS + name.removeprefix(AVERAGES)], found[name]) for name in averaged]


def _exchange(weights: torch.Tensor, average: torch.Tensor) -> torch.Tensor | None:
    """Give weights the values of their average; returns what they were, if the average has not taken it."""
    before = weights.clone()
    weights.copy_(average)
    if weights.dtype != average.dtype:
        return before
    average.copy_(before)
    return None
