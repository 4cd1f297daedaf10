"""The memory of a step, span by span, as a function of the micro-batch: what a trace of few layers tells of many.

A span is a part of the step within which at most one decoder layer is computed: a layer's forward pass, the loss, a
layer's backward pass, the optimizer. In each, only the moments matter at which more is held than at all others for
some micro-batch; of 3,000 allocations in a step of three layers, some 200 are left.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from finetune.trace.accounts import Account, Lives
from finetune.trace.ledger import Block, Ledger
from finetune.trace.powers import CONSTANT, MicroBatch, Power
from finetune.trace.shallow import Held, Span

SHOWN = 8
"""Moments of a span that are kept for the picture, whether they matter or not."""
OF_WEIGHTS = {"weights", "weight_copies", "gradients", "optimizer", "gathered"}
"""Categories that hardly grow with the micro-batch. A weight's share may happen to be a multiple of a prime: of
4096 x 14336 4-bit weights, each of 18 processes holds 1,631,119 bytes, which 7 divides."""


def spans_of(ledger: Ledger, account: Account, lives: Lives, traced: MicroBatch) -> tuple[Span, ...]:
    """The spans of a ledger's last optimizer step."""
    first = account.start_of_last_step()
    segments = [segment for segment in ledger.segments if segment.start >= first]
    found, moments = [], list(_moments(lives, first, traced))
    begins = [bisect_left(moments, segment.start, key=lambda moment: moment[0]) for segment in segments]
    for segment, (begin, end) in zip(segments, pairwise([*begins, len(moments)]), strict=True):
        if begin < end:
            kept = _that_matter([held for _, held in moments[begin:end]], traced)
            found.append(Span(segment.phase, segment.micro_batch, segment.layer, tuple(kept)))
    return tuple(found)


def held_at(lives: Lives, event: int, traced: MicroBatch) -> Held:
    """What is alive after an event."""
    held: Held = {}
    for block, category in lives:
        if block.lives_at(event):
            _add(held, block, category, 1, traced)
    return held


def _moments(lives: Lives, first: int, traced: MicroBatch) -> Iterator[tuple[int, Held]]:
    """What is held after each birth from an event on."""
    held = held_at(lives, first - 1, traced)
    changes = {block.born: (block, category, 1) for block, category in lives}
    changes |= {block.died: (block, category, -1) for block, category in lives if block.died is not None}
    for event in sorted(event for event in changes if event >= first):
        block, category, sign = changes[event]
        _add(held, block, category, sign, traced)
        if sign > 0:
            yield event, dict(held)


def _add(held: Held, block: Block, category: str, sign: int, traced: MicroBatch) -> None:
    power, coefficient = traced.growth(block.shape, block.exact, is_of_weights=category in OF_WEIGHTS)
    if power == CONSTANT:
        coefficient = block.bytes
    if now := held.pop((category, power), 0) + sign * coefficient:
        held[category, power] = now


def totals(held: Held) -> dict[Power, float]:
    """All that is held, whatever for."""
    found: dict[Power, float] = {}
    for (_, power), size in held.items():
        found[power] = found.get(power, 0) + size
    return found


def _that_matter(moments: list[Held], traced: MicroBatch) -> list[Held]:
    """Moments that no other exceeds for every micro-batch, and the highest of each so many neighbours."""
    sums = [totals(held) for held in moments]
    front: list[int] = []
    for place, mine in enumerate(sums):
        if not any(_exceeds(sums[other], mine) for other in front):
            front = [other for other in front if not _exceeds(mine, sums[other])] + [place]
    stride = -(-len(moments) // SHOWN)
    highest = (
        max(range(start, min(start + stride, len(moments))), key=lambda place: traced.value(sums[place]))
        for start in range(0, len(moments), stride)
    )
    return [moments[place] for place in sorted({*front, *highest})]


def _exceeds(more: dict[Power, float], less: dict[Power, float]) -> bool:
    """Whether one is at least the other for every micro-batch."""
    return all(more.get(power, 0) >= size for power, size in less.items())
