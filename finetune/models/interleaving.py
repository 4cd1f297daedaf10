"""Interleaved 1F1B: the order in which micro-batches pass several parts of the layers on each process. Without PyTorch.

Of the P * V parts of a model, process r of P has the numbers r, r + P, r + 2P, ... (arXiv:2104.04473, section 2.2). It
takes a round of micro-batches through its first part, then the same through its second, and so on. PyTorch makes as
many rounds as P fits into the micro-batches, all of one size (``ScheduleInterleaved1F1B``); to come to such a number, a
step is filled up with micro-batches that train nothing.

Example: for 2 processes, 4 micro-batches are 2 rounds of 2, 3 are one round, and 5 are filled up to 6. With 2 parts
each, the first process has computed 2 + 2 + 1 parts forward before it computes one backward.
"""

import itertools


def filled(micro_batches: int, stages: int) -> int:
    """How many micro-batches a step has with those that train nothing: the fewest that can be rounds of one size."""
    return next(each for each in itertools.count(micro_batches) if each % _rounds(each, stages) == 0)


def ahead(stage: int, stages: int, parts: int, micro_batches: int) -> int:
    """How many passes through one part a process keeps at a time, with their activations.

    Args:
        stage: of the process.
        parts: of each process; 1 is plain 1F1B.
    """
    if parts == 1:
        return min(stages - stage, micro_batches)
    most = filled(micro_batches, stages)
    return min(parts * most, (parts - 1) * _of_round(most, stages) + 2 * (stages - 1 - stage) + 1)


def shortest_alike(stages: int, parts: int, micro_batches: int) -> int:
    """The micro-batches of the shortest step in which each process keeps as many as in one of so many."""
    if parts == 1:
        return min(stages, micro_batches)
    most = filled(micro_batches, stages)
    return min(most, 2 * _of_round(most, stages))


def idle_share(stages: int, parts: int, micro_batches: int) -> float:
    """Of a step, the time in which a process waits or computes what trains nothing, where all parts take as long: until
    the first micro-batch has come to the last process, and after the last has left it (arXiv:2104.04473)."""
    computed = micro_batches if parts == 1 else filled(micro_batches, stages)
    return 1 - micro_batches / (computed + (stages - 1) / parts)


def _rounds(micro_batches: int, stages: int) -> int:
    return max(1, micro_batches // stages)


def _of_round(filled_up: int, stages: int) -> int:
    return filled_up // _rounds(filled_up, stages)
