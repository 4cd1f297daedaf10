"""A ledger's blocks by what they are for, and the peaks of a step: what a dry run tells.

What a block is for is judged at the end, when its whole life is known: a block that is made in the forward pass and
outlives it was kept for the backward pass, one that outlives the optimizer's step is its state.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from finetune.trace.findings import PHASES, Group, Moment, Point, Trace
from finetune.trace.ledger import Block, Ledger

POINTS = 400
"""Of the picture of memory over one step."""
LARGEST = 24
"""Groups of blocks that a trace names."""


def account(ledger: Ledger, *, logits: tuple[int, int], on_host: frozenset[str], seconds: float) -> Trace:
    """The trace of the last optimizer step.

    Args:
        ledger: of at least one step, whose phases it was told.
        logits: positions of a micro-batch and entries of the vocabulary, by whose product logits are known.
        on_host: categories that lie in host memory, but for what is no parameter and no buffer, as a quantised
            weight's scales.
        seconds: that the dry run took.
    """
    account_ = _Account(ledger, logits)
    first = account_.start_of_last_step()
    lives = [(block, account_.category(block)) for block in ledger.blocks if block.bytes]
    host = [block for block, category in lives if category in on_host and not account_.is_constant(block)]
    lives = [(block, category) for block, category in lives if category not in on_host or account_.is_constant(block)]
    places = list(_sweep(lives, first, ledger.events))
    peaks: dict[str, tuple[int, Moment]] = {}
    for event, moment in places:
        phase = account_.phase_at(event)
        if phase not in peaks or moment.bytes > peaks[phase][1].bytes:
            peaks[phase] = (event, moment)
    peak_phase = max(peaks, key=lambda phase: peaks[phase][1].bytes)
    peak_event, peak = peaks[peak_phase]
    update = account_.last_start_of("step")
    return Trace(
        peak=peak,
        peak_phase=peak_phase,
        phases={phase: peaks[phase][1] for phase in PHASES if phase in peaks},
        saved=_moment(lives, account_.start_of("backward", first) - 1),
        held=_moment(lives, first - 1),
        host_bytes=sum(block.bytes for block in host if block.lives_at(update - 1) or block.lives_at(ledger.events)),
        points=tuple(
            Point((event - first) / max(1, ledger.events - first), account_.phase_at(event), moment)
            for event, moment in _thinned(places)
        ),
        largest=_groups([(b, c) for b, c in lives if b.lives_at(peak_event)], account_),
        allocations=sum(block.born >= first for block, _ in lives),
        seconds=seconds,
    )


@dataclass(frozen=True)
class _Account:
    ledger: Ledger
    logits: tuple[int, int]

    def phase_at(self, event: int) -> str:
        place = self._segment_at(event)
        return self.ledger.segments[place].phase if place >= 0 else "before"

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
        positions, vocabulary = self.logits
        if block.category:
            return block.category
        if block.travels:
            return "gathered"
        if block.is_weight_copy:
            return "weight_copies"
        if block.shape[-1:] == (vocabulary,) and math.prod(block.shape) == positions * vocabulary:
            return "logits"
        place = self._segment_at(block.born)
        if place < 0:
            return "weights"
        phase = self.ledger.segments[place].phase
        if phase in ("forward", "loss"):
            return "activations" if self._outlives(block, self.start_of("backward", block.born)) else "temporaries"
        # an engine steps within the last backward pass
        if self._outlives(block, self.start_of("forward", self.start_of("step", self.ledger.segments[place].start))):
            return "optimizer"
        return "gradients" if phase == "backward" and self._outlives(block, self._end(place)) else "temporaries"

    def is_constant(self, block: Block) -> bool:
        """Made with the model, and no parameter or buffer of it."""
        return not block.category and self._segment_at(block.born) < 0

    def _end(self, place: int) -> int:
        following = self.ledger.segments[place + 1 : place + 2]
        return following[0].start if following else self.ledger.events

    def _outlives(self, block: Block, event: int) -> bool:
        return block.died is None or block.died > event

    def _segment_at(self, event: int) -> int:
        return bisect_right(self.ledger.segments, event, key=lambda segment: segment.start) - 1


def _sweep(lives: list[tuple[Block, str]], first: int, last: int) -> Iterator[tuple[int, Moment]]:
    """The memory after each birth from an event on."""
    held = Counter[str]()
    changes: dict[int, tuple[str, int]] = {}
    for block, category in lives:
        if block.born < first:
            held[category] += block.bytes if block.died is None or block.died >= first else 0
        else:
            changes[block.born] = (category, block.bytes)
        if block.died is not None and block.died >= first:
            changes[block.died] = (category, -block.bytes)
    total = sum(held.values())
    for event in sorted(changes):
        category, change = changes[event]
        held[category] += change
        total += change
        if change > 0:
            yield event, Moment(total, {name: size for name, size in held.items() if size})


def _moment(lives: list[tuple[Block, str]], event: int) -> Moment:
    held = Counter[str]()
    for block, category in lives:
        held[category] += block.bytes if block.lives_at(event) else 0
    return Moment(sum(held.values()), {name: size for name, size in held.items() if size})


def _thinned(places: list[tuple[int, Moment]]) -> list[tuple[int, Moment]]:
    """The highest of each so many neighbours."""
    stride = -(-len(places) // POINTS)
    parts = (places[start : start + stride] for start in range(0, len(places), stride))
    return [max(part, key=lambda place: place[1].bytes) for part in parts]


def _groups(alive: list[tuple[Block, str]], account_: _Account) -> tuple[Group, ...]:
    sizes, counts = Counter[tuple[str, str, str, tuple[int, ...], str]](), Counter[object]()
    for block, category in alive:
        kind = (category, account_.phase_at(block.born), block.operation, block.shape, str(block.dtype)[6:])
        sizes[kind] += block.bytes
        counts[kind] += 1
    return tuple(Group(*kind, blocks=counts[kind], bytes=size) for kind, size in sizes.most_common(LARGEST))
