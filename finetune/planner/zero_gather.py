"""Weights that ZeRO-3 holds gathered in a forward and backward pass, replayed from the rules of its coordinator.

The rules are those of DeepSpeed 0.19.8, ``runtime/zero/partitioned_param_coordinator.py`` (PPC): before a module
computes, its weights are gathered (``fetch_sub_module``, PPC:315), and then further ones in the order of the recorded
pass until they are 5e7 elements (``prefetch_bucket_size``); after it, they are released unless the next 1e9 elements of
that order need them again (``max_reuse_distance``, PPC:617). So a model of less than half a billion weights is whole
on every GPU at the end of its forward pass, and of a larger one its end is.

Weights gathered together arrive in one buffer, from which each is copied (``AllGatherCoalescedHandle``,
``partition_parameters.py``:735); the buffer lives until the last of them is used: while they travel, they count twice.

Not covered: quantised gathering, hierarchical partitions, modules that are fetched as a whole.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

PREFETCH_ELEMENTS = 50_000_000
REUSE_ELEMENTS = 1_000_000_000
LIVE_ELEMENTS = 1_000_000_000


@dataclass(frozen=True)
class Gathered:
    """Bytes of gathered weights beside those that always are (``ZeroBytes.persistent``)."""

    forward_peak: int
    forward_end: int
    """When the loss is computed: what the backward pass needs soon has stayed."""
    backward_peak: int


@dataclass
class _Travel:
    """A gather of several weights: one buffer, until the last of them is used."""

    buffer_elements: int
    unused: set[int]
    is_copied: bool = False


@dataclass
class _Coordinator:
    """State of the replay; steps are the visits of modules, weights are numbers."""

    sizes: Sequence[int]
    steps: Sequence[Sequence[int]]
    processes: int
    prefetch: int
    queue: deque[tuple[int, int]] = field(default_factory=deque)
    available: set[int] = field(default_factory=set)
    travels: list[_Travel] = field(default_factory=list)
    fetched_for: dict[int, int] = field(default_factory=dict)
    counted: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        self.queue = deque((weight, step) for step, weights in enumerate(self.steps) for weight in sorted(weights))
        self.before, self.uses = [0], [[] for _ in self.sizes]  # type: ignore[var-annotated]
        for step, weights in enumerate(self.steps):
            self.before.append(self.before[-1] + sum(self.sizes[weight] for weight in weights))
            for weight in weights:
                self.uses[weight].append(step)

    def live(self) -> int:
        """Elements in memory: weights that are there, and the buffers of those on their way."""
        return sum(self.sizes[weight] for weight in self.available) + sum(t.buffer_elements for t in self.travels)

    def visit(self, step: int) -> None:
        """Gather the weights of a module and prefetch; they are all there when it returns."""
        needed = self.steps[step]
        self._gather([weight for weight in needed if not self._is_held(weight)])
        for travel in self.travels:
            if not travel.is_copied and travel.unused & set(needed):
                self.available |= travel.unused  # the first of them that is used copies all
                travel.is_copied = True
        self.peak = max(self.peak, self.live())
        for travel in self.travels:
            travel.unused -= set(needed)
        self.travels = [travel for travel in self.travels if travel.unused]
        dropped: set[int] = set()
        fresh = {weight for weight in needed if self.fetched_for.get(weight, -1) < step}
        while self.queue and len(dropped) < len(fresh):
            weight, used_at = self.queue.popleft()
            self.fetched_for[weight] = used_at
            dropped.add(weight)
        self._prefetch()
        self.peak = max(self.peak, self.live())

    def _prefetch(self) -> None:
        room, chosen, elements = min(LIVE_ELEMENTS - self.counted, self.prefetch), [], 0
        while self.queue and elements < room:
            weight, used_at = self.queue.popleft()
            if not self._is_held(weight) and weight not in chosen:
                chosen.append(weight)
                elements += self.sizes[weight]
            self.fetched_for[weight] = max(self.fetched_for.get(weight, -1), used_at)
        self._gather(chosen)

    def _is_held(self, weight: int) -> bool:
        return weight in self.available or any(weight in t.unused and not t.is_copied for t in self.travels)

    def _gather(self, weights: Sequence[int]) -> None:
        self.counted += sum(self.sizes[weight] for weight in weights)
        if len(weights) == 1:
            self.available.add(weights[0])  # straight to its place
        elif weights:
            padded = sum(-(-self.sizes[weight] // self.processes) for weight in weights) * self.processes
            self.travels.append(_Travel(padded, set(weights)))

    def leave(self, step: int) -> None:
        """Release the weights of a module that are not needed again soon."""
        for weight in self.steps[step]:
            if self.fetched_for.get(weight, -1) > step + 1:
                continue
            later = [use for use in self.uses[weight] if use > step]
            if later and self.before[later[0]] - self.before[step + 1] < REUSE_ELEMENTS:
                continue
            if weight in self.available:
                self.available.discard(weight)
                self.counted -= self.sizes[weight]


def gathered(
    sizes: Sequence[int],
    modules: Sequence[Sequence[int]],
    *,
    processes: int,
    element_bytes: int,
    recomputed: Sequence[range] = (),
    prefetch: int = PREFETCH_ELEMENTS,
) -> Gathered:
    """What is gathered in one micro-batch, from the second of a run on (the first is not prefetched).

    Args:
        sizes: elements of each weight, without those that stay gathered (0 for them).
        modules: numbers of the weights of each module, in the order of the forward pass; a tied weight in two.
        element_bytes: of a weight in the precision of computation.
        recomputed: numbers of the modules of each layer whose activations are computed again.
        prefetch: elements that are gathered ahead of their use.
    """
    kept = [[weight for weight in module if sizes[weight]] for module in modules]
    first_of = {layer[-1]: layer for layer in recomputed}
    backward: list[Sequence[int]] = []
    for number in range(len(kept) - 1, -1, -1):
        backward += [kept[again] for again in first_of.get(number, ())]
        backward.append(kept[number])
    whole_model: list[int] = []  # is visited first, and prefetches
    kept.insert(0, whole_model)
    steps = [*kept, *backward]
    coordinator = _Coordinator(sizes, steps, processes, prefetch)
    peaks, forward_end = [], 0
    for first, last in ((0, len(kept)), (len(kept), len(steps))):
        coordinator.peak = 0
        for step in range(first, last):
            coordinator.visit(step)
            coordinator.leave(step)
        peaks.append(coordinator.peak)
        forward_end = forward_end if first else coordinator.live()
    return Gathered(peaks[0] * element_bytes, forward_end * element_bytes, peaks[1] * element_bytes)
