"""A ledger's blocks by what they are for.

It is judged at the end, when a block's whole life is known: a block that is made in the forward pass and outlives it
was kept for the backward pass, one that outlives the optimizer's step is its state.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

from finetune.trace.ledger import Block, Ledger
from finetune.trace.shallow import MORE_PARTS, OFFLOADED

CATEGORIES = (
    "weights",
    "weight_copies",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "temporaries",
    "kernels",
)
"""``weights``: with buffers and quantisation constants. ``weight_copies``: in 16 bits, to compute with.
``activations``: made in the forward pass and kept for the backward pass, with the inputs. ``logits``: everything of
the size of the logits, in forward, loss and backward. ``gathered``: what collectives read and write, and gathered
layers. ``temporaries``: what lives within a forward, backward or optimizer pass, recomputed activations too.
``kernels``: what CUDA's kernels take for themselves while they run."""
Lives = list[tuple[Block, str]]
"""Blocks, and what they are for."""


@dataclass(frozen=True)
class Account:
    """A ledger, judged from its end."""

    ledger: Ledger
    """Of at least one optimizer step, whose phases it was told."""
    scored: set[int]
    """Positions of a micro-batch, and those whose scores exist at a time: logits have as many rows."""
    vocabulary: int
    """Entries, by which logits are known too."""

    def lives(self, on_host: frozenset[str]) -> tuple[Lives, Lives]:
        """All blocks in the memory of the GPU, and those in the memory of its host.

        Args:
            on_host: categories that lie in host memory, but for what is no parameter and no buffer, as a quantised
                weight's scales.
        """
        every = [(block, self.category(block)) for block in self.ledger.blocks if block.bytes]
        every = [(block, category) for block, category in every if category != OFFLOADED]
        host = [(block, category) for block, category in every if category in on_host and not self.is_constant(block)]
        gpu = [(block, category) for block, category in every if category not in on_host or self.is_constant(block)]
        return gpu, host

    def start_of(self, phase: str, event: int) -> int:
        """The first event of the next segment of a phase, from an event on."""
        starts = (s.start for s in self.ledger.segments if s.phase == phase and s.start >= event)
        return next(starts, self.ledger.events)

    def last_start_of(self, phase: str) -> int:
        return [s.start for s in self.ledger.segments if s.phase == phase][-1]

    def start_of_last_step(self) -> int:
        """Where the first forward pass begins after the last but one step of the optimizer, or at all."""
        updates = [0, *(s.start for s in self.ledger.segments if s.phase == "step")]
        return self.start_of("forward", updates[-2])

    def category(self, block: Block) -> str:
        """What a block is for."""
        positions = max(self.scored)
        if block.category:
            return block.category
        if block.travels:
            return "gathered"
        if block.is_weight_copy:
            return "weight_copies"
        if block.shape[-1:] == (self.vocabulary,) and math.prod(block.shape[:-1]) in self.scored:
            return "logits"
        place = self._segment_at(block.born)
        if place < 0:
            return "weights" if block.born <= self.ledger.built else "gathered"
        phase = self.ledger.segments[place].phase
        if phase in ("forward", "loss", MORE_PARTS):
            return "activations" if self._outlives(block, self.start_of("backward", block.born)) else "temporaries"
        # an engine steps within the last backward pass
        if self._outlives(block, self.start_of("forward", self.start_of("step", self.ledger.segments[place].start))):
            return "optimizer"
        is_of_weight = phase == "backward" and math.prod(block.shape) % positions > 0  # not of hidden states
        return "gradients" if is_of_weight and self._outlives(block, self._end(place)) else "temporaries"

    def is_constant(self, block: Block) -> bool:
        """Made with the model, and no parameter or buffer of it."""
        return not block.category and self._segment_at(block.born) < 0

    def _end(self, place: int) -> int:
        """Of a phase in which a segment lies."""
        segments = self.ledger.segments
        phase = segments[place].phase
        return next((each.start for each in segments[place + 1 :] if each.phase != phase), self.ledger.events)

    def _outlives(self, block: Block, event: int) -> bool:
        return block.died is None or block.died > event

    def _segment_at(self, event: int) -> int:
        return bisect_right(self.ledger.segments, event, key=lambda segment: segment.start) - 1
