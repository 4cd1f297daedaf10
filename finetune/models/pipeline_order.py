"""The order in which micro-batches pass the stages of a pipeline. Without PyTorch.

- 1F1B: as few micro-batches ahead as keep the next stages busy, then one forward and one backward pass in turn
  (arXiv:1806.03377).
- Interleaved, with several parts of the layers on each process: of the P * V parts of a model, process r of P has the
  numbers r, r + P, r + 2P, ... (arXiv:2104.04473, section 2.2). It takes a round of micro-batches through its first
  part, then the same through its second, and so on.
- Zero bubble: the gradients of weights are computed where a process would wait, process r of P leaving those of r
  passes for later (ZB-H1 of arXiv:2401.10241). A process waits for the others' forward and backward passes without
  them, and is busy with its own meanwhile.

PyTorch makes as many rounds as P fits into the micro-batches, all of one size (``ScheduleInterleaved1F1B``,
``ScheduleInterleavedZeroBubble``); to come to such a number, a step is filled up with micro-batches that train nothing.

Example: for 2 processes, 4 micro-batches are 2 rounds of 2, 3 are one round, and 5 are filled up to 6. With 2 parts
each, the first process has computed 2 + 2 + 1 parts forward before it computes one backward, and 2 + 1 + 1 with zero
bubble.
"""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """Of the passes of a step."""

    stages: int
    """Processes."""
    parts: int = 1
    """Of the layers, on each process."""
    schedule: str = "1f1b"
    """As ``train.pipeline_schedule``."""

    @property
    def zero_bubble(self) -> bool:
        """Whether the gradients of weights are deferred."""
        return self.schedule == "zero_bubble"

    @property
    def has_rounds(self) -> bool:
        """Whether micro-batches go in rounds of one size."""
        return self.parts > 1 or self.zero_bubble

    def computed(self, micro_batches: int) -> int:
        """How many micro-batches a step has with those that train nothing: the fewest that can be rounds."""
        if not self.has_rounds:
            return micro_batches
        return next(each for each in itertools.count(micro_batches) if each % self._rounds(each) == 0)

    def ahead(self, stage: int, micro_batches: int) -> int:
        """How many passes through one part a process keeps at a time, with their activations.

        Args:
            stage: of the process.
        """
        most = self.computed(micro_batches)
        of_each = 2 if self.parts > 1 and not self.zero_bubble else 1  # for each process that comes after
        return min(self.parts * most, (self.parts - 1) * self._of_round(most) + of_each * (self.stages - 1 - stage) + 1)

    def deferred(self, stage: int, micro_batches: int) -> int:
        """Of how many backward passes through one part a process has, at most, the gradients of weights to compute."""
        return min(self.parts * self.computed(micro_batches), stage + 1) if self.zero_bubble else 0

    def shortest_alike(self, micro_batches: int) -> int:
        """The micro-batches of the shortest step in which each process keeps as much as in one of so many."""
        most = self.computed(micro_batches)
        return min(most, self.stages if self.parts == 1 else 2 * self._of_round(most))

    def idle_share(self, micro_batches: int, waited_for: float = 1.0) -> float:
        """Of a step, the time in which a process waits or computes what trains nothing, where all parts take as long,
        and micro-batches are no fewer than processes.

        A process waits until the first micro-batch has come to the last one, and after the last has left it
        (arXiv:2104.04473, section 2.2).

        Args:
            waited_for: of the time for a micro-batch, the share in which the others wait; see ``waited_for``.
        """
        time = self.computed(micro_batches) + waited_for * (self.stages - 1) / self.parts
        return 1 - micro_batches / time

    def _rounds(self, micro_batches: int) -> int:
        return max(1, micro_batches // self.stages)

    def _of_round(self, micro_batches: int) -> int:
        return micro_batches // self._rounds(micro_batches)


def deferred_share(deferrable: float, *, adapter: str, fp8: bool) -> float:
    """Of the gradients of the layers' weights, those that zero bubble defers: none of adapters, or of products in fp8.

    Args:
        deferrable: those of linear layers.
        adapter: as ``adapter.type``.
    """
    return 0.0 if adapter != "none" or fp8 else deferrable


def waited_for(deferred: float, recomputed: float) -> float:
    """Of the time that a process takes for a micro-batch, the share in which the next one waits for it and does not
    compute what it has deferred: T_F + T_B - T_W of T_F + T_B + T_W (arXiv:2401.10241, section 2.3).

    A forward pass, the gradients of inputs, and those of weights are taken to be as long.

    Args:
        deferred: the share of the gradients of weights that is.
        recomputed: the share of the layers that is computed again in the backward pass.
    """
    return 1 - 2 * deferred / (3 + recomputed)
