"""A step traced with all layers and the micro-batch that is asked about, for what shallow traces are held against."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finetune.models.loading import config_from
from finetune.trace.accounts import Account, Lives
from finetune.trace.dry_run import ON_HOST, stepped
from finetune.trace.ledger import Ledger
from finetune.trace.setting import Setting


@dataclass(frozen=True)
class Moment:
    """Bytes in use, by what they are for."""

    categories: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.categories.values())


@dataclass(frozen=True)
class FullTrace:
    """The last optimizer step of one process."""

    peak: Moment
    phases: dict[str, Moment]
    """The peak of each phase, over the micro-batches of the step."""
    saved: Moment
    """Alive where the first backward pass of the step begins."""
    held: Moment
    """Alive between steps: weights, optimizer state, buckets."""
    host_bytes: int
    """Of weights, gradients and optimizer state that the strategy keeps in host memory; they are in no moment."""
    alive: Counter[tuple[str, str, tuple[int, ...], str]]
    """Bytes at the peak by category, operation, shape and dtype."""


def full_trace(
    model: dict[str, Any], setting: Setting, *, rank: int = 0, real: bool = False, as_on_gpu: bool = True
) -> FullTrace:
    """Trace a model by its ``config.json``; the other arguments are those of ``dry_run.stepped``."""
    config = config_from(model)
    ledger = stepped(config, setting, rank=rank, real=real, as_on_gpu=as_on_gpu)
    place = setting.placement
    vocabulary = config.get_text_config().vocab_size
    return told(ledger, {setting.tokens}, vocabulary, ON_HOST if place.weights_on != "gpu" else frozenset())


def told(ledger: Ledger, scored: set[int], vocabulary: int, on_host: frozenset[str] = frozenset()) -> FullTrace:
    """What a ledger tells of its last step."""
    account = Account(ledger, scored, vocabulary)
    lives, host = account.lives(on_host)
    first, update = account.start_of_last_step(), account.last_start_of("step")
    phases: dict[str, tuple[int, Moment]] = {}
    for event, moment in _moments(lives, first):
        phase = [segment.phase for segment in ledger.segments if segment.start <= event][-1]
        if phase not in phases or moment.bytes > phases[phase][1].bytes:
            phases[phase] = (event, moment)
    highest, peak = max(phases.values(), key=lambda found: found[1].bytes)
    alive: Counter[tuple[str, str, tuple[int, ...], str]] = Counter()
    for block, category in lives:
        if block.lives_at(highest):
            alive[category, block.operation, block.shape, str(block.dtype)] += block.bytes
    return FullTrace(
        peak=peak,
        phases={phase: moment for phase, (_, moment) in phases.items()},
        saved=_moment(lives, account.start_of("backward", first) - 1),
        held=_moment(lives, first - 1),
        host_bytes=sum(block.bytes for block, _ in host if block.lives_at(update - 1) or block.lives_at(ledger.events)),
        alive=alive,
    )


def _moment(lives: Lives, event: int) -> Moment:
    held = Counter[str]()
    for block, category in lives:
        held[category] += block.bytes if block.lives_at(event) else 0
    return Moment({category: size for category, size in held.items() if size})


def _moments(lives: Lives, first: int) -> Iterator[tuple[int, Moment]]:
    """After each birth from an event on."""
    held = Counter(_moment(lives, first - 1).categories)
    changes = {block.born: (category, block.bytes) for block, category in lives}
    changes |= {block.died: (category, -block.bytes) for block, category in lives if block.died is not None}
    for event in sorted(event for event in changes if event >= first):
        category, change = changes[event]
        held[category] += change
        if change > 0:
            yield event, Moment({category: size for category, size in held.items() if size})
