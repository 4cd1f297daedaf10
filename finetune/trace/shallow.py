"""What traces of few layers tell of a whole model: its step as a function of the micro-batch. Pure arithmetic.

Of a model whose layers are alike, each span of the step (the forward pass of the first layer, say, or the backward
pass of the last but one) holds so many bytes more with every further layer. Two traces, of 3 and 4 layers, give both
the number and the increase. Of 32 layers, the spans of those in the middle lie on a straight line between spans that
are known, so that none of them holds more than both its ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter

from finetune.errors import InputError
from finetune.trace.powers import MicroBatch, Power
from finetune.units import largest_part

FP8_PRODUCT = "aten::_scaled_mm"
"""The name of a matrix product in fp8."""
HOST_COPY = "host::copy"
"""The name of what travels between a GPU and its host, among what is sent."""
OFFLOADED = "offloaded"
"""What blocks in host memory are for, of which the copies that go there tell all."""
MORE_PARTS = "more parts"
"""The phase in which scores are made of the second part of the positions and of those after it."""


def _hashable(key: Any) -> Any:
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


# JSON has no keys but strings: there, a dictionary is its pairs
_OF_PAIRS = BeforeValidator(lambda pairs: {_hashable(key): value for key, value in pairs})
_AS_PAIRS = PlainSerializer(lambda sizes: list(sizes.items()))
Coefficients = Annotated[dict[Power, float], _OF_PAIRS, _AS_PAIRS]
Shapes = Annotated[dict[tuple[int, ...], int], _OF_PAIRS, _AS_PAIRS]
Held = Annotated[dict[tuple[str, Power], float], _OF_PAIRS, _AS_PAIRS]
"""Bytes by what they are for (``accounts.CATEGORIES``), and how they grow."""


@dataclass(frozen=True)
class Span:
    """A part of the step."""

    phase: str
    micro_batch: int
    layer: int | None
    """The decoder layer that is computed in it; None before and after them."""
    moments: tuple[Held, ...]
    """Those that matter, in the order in which they came."""


@dataclass(frozen=True)
class Kernel:
    """Operations of a kind."""

    phase: str
    kind: str
    """product (a matrix product), attention, or moved (everything else)."""
    name: str
    width: int
    """Bytes of an element of the first operand."""
    flops: Coefficients
    bytes: Coefficients
    """Read and written."""
    calls: float


@dataclass(frozen=True)
class Sent:
    """Collectives of a kind."""

    phase: str
    name: str
    members: int
    """Processes of the group."""
    bytes: Coefficients
    """Of each: of the larger of what goes in and what comes out."""
    calls: float


@dataclass(frozen=True)
class Depth:
    """A step of a model with so many layers, as a function of the micro-batch."""

    layers: int
    trained: Shapes
    """Shapes of the trained weights, whole, and how many there are of each."""
    spans: tuple[Span, ...]
    on_host: Held
    """Weights, gradients and optimizer state that the strategy keeps in host memory."""
    kernels: tuple[Kernel, ...]
    sent: tuple[Sent, ...]
    most_scored: int
    """Positions whose scores exist at a time, at most; 0 where the loss does not take them in parts."""


Counted = TypeVar("Counted", Kernel, Sent)
Key = TypeVar("Key")
Place = tuple[str, int, str, int]
"""Of a span: phase, micro-batch, and its layer counted from the start or from the end, or which one it is of the spans
without a layer."""
Highest = dict[Place, tuple[dict[str, float], dict[str, float]]]
"""The highest moment of each span, in the lower depth and in the whole model, by category."""


@dataclass(frozen=True)
class Moment:
    """Bytes at one moment, by what they are for."""

    phase: str
    categories: dict[str, float]
    place: Place | None = None
    """Of its span, where it is the highest of one."""

    @property
    def bytes(self) -> float:
        return sum(self.categories.values())


@dataclass(frozen=True)
class Step:
    """A step of a whole model."""

    layers: int
    low: Depth
    high: Depth
    """The same as ``low`` where all layers were traced."""
    reach: int = 1
    """Layers from an end within which a span is unlike those in the middle: ZeRO-3 keeps several layers gathered."""

    @property
    def ratio(self) -> float:
        """How many times the increase from one depth to the other lies between the lower one and the model."""
        more = self.high.layers - self.low.layers
        return (self.layers - self.low.layers) / more if more else 0.0

    @property
    def _shared(self) -> int:
        """Layers from either end that mean the same in both depths: what lies within reach of the other end as well
        does not."""
        return self.low.layers - (self.reach if self.high is not self.low else 0)

    def with_layers(self, layers: int) -> "Step":
        """Of a model with so many of these layers.

        Raises:
            InputError: if all layers were traced at once, which tells nothing of fewer.
        """
        if layers == self.layers:
            return self
        if self.high is self.low:
            raise InputError(f"The model has too few layers ({self.layers}) to plan stages or sharded parts of it.")
        return replace(self, layers=layers)

    def micro_batch(self, rows: int, row_tokens: int) -> MicroBatch:
        """To be asked about."""
        positions = rows * row_tokens
        scored = largest_part(positions, self.low.most_scored or positions)
        return MicroBatch(rows, row_tokens, scored)

    @property
    def micro_batches(self) -> int:
        """That were traced."""
        return 1 + max(span.micro_batch for span in self.low.spans)

    def moments(self, micro_batch: MicroBatch, *, accumulation: int = 2) -> Iterator[Moment]:
        """The highest moment of each span.

        Args:
            accumulation: micro-batches of the step; of more than were traced, some are alike.
        """
        for place, (_, whole) in self.highest(micro_batch).items():
            is_there = place[1] < accumulation or place[0] == "step"  # of no later micro-batch
            if is_there and (phase := _phase(place[0], micro_batch)):
                yield Moment(phase, whole, place)

    @cached_property
    def _known(self) -> dict[MicroBatch, Highest]:
        return {}

    def highest(self, micro_batch: MicroBatch) -> Highest:
        """The highest moment of each span that both depths have, in the lower one and in the whole model."""
        if micro_batch not in self._known:
            low, high = (_highest(depth, self._shared, micro_batch) for depth in (self.low, self.high))
            both = low.keys() & high.keys()
            self._known[micro_batch] = {
                place: (low[place], between(low[place], high[place], self.ratio)) for place in both
            }
        return self._known[micro_batch]

    def course(self, micro_batch: MicroBatch) -> Iterator[Moment]:
        """Moments of the lower depth's step in their order, as they are in the whole model: for a picture.

        Each is lifted by what the highest one of its span holds more in the whole model, of each category.
        """
        highest = self.highest(micro_batch)
        for span, places in _placed(self.low, self._shared):
            if not (phase := _phase(span.phase, micro_batch)):
                continue
            low, whole = next((highest[place] for place in places if place in highest), ({}, {}))
            lifts = {name: size - low.get(name, 0.0) for name, size in whole.items()}
            for held in span.moments:
                found = by_category(held, micro_batch)
                yield Moment(phase, {name: found.get(name, 0.0) + lifts.get(name, 0.0) for name in found | lifts})

    def trained(self) -> dict[tuple[int, ...], int]:
        """Shapes of the trained weights, whole, and how many there are of each."""
        found = between(self.low.trained, self.high.trained, self.ratio)
        return {shape: round(count) for shape, count in found.items()}

    def on_host(self, *categories: str) -> float:
        """Bytes of weights, gradients and optimizer state in host memory, or of some of them alone."""
        held = between(self.low.on_host, self.high.on_host, self.ratio)
        return sum(size for (category, _), size in held.items() if not categories or category in categories)

    @cached_property
    def kernels(self) -> list[Kernel]:
        """All operations."""
        return self._counted(self.low.kernels, self.high.kernels)

    @cached_property
    def sent(self) -> list[Sent]:
        """All collectives."""
        return self._counted(self.low.sent, self.high.sent)

    def _counted(self, low: Sequence[Counted], high: Sequence[Counted]) -> list[Counted]:
        """Operations on other shapes may be of the same kind, and are one then."""
        found: dict[str, Counted] = {}
        for sign, depth in ((1 - self.ratio, low), (self.ratio, high)):
            for each in depth:
                kind = str(replace(each, calls=0.0))
                calls = found[kind].calls if kind in found else 0.0
                found[kind] = replace(each, calls=calls + sign * each.calls)
        return list(found.values())


def _phase(traced: str, micro_batch: MicroBatch) -> str | None:
    """The phase that was traced as such, None if there is none: scores may all be made at once."""
    if traced == MORE_PARTS:
        return "loss" if micro_batch.scored < micro_batch.rows * micro_batch.row_tokens else None
    return traced


def _highest(depth: Depth, shared: int, micro_batch: MicroBatch) -> dict[Place, dict[str, float]]:
    """The highest moment of each span that two depths have in common, by category.

    Args:
        shared: layers from either end that mean the same in both.
    """
    products: dict[Power, float] = {}
    found: dict[Place, tuple[float, Held]] = {}
    for span, places in _placed(depth, shared):
        for held in span.moments:
            total = 0.0
            for (_, power), size in held.items():
                if power not in products:
                    products[power] = micro_batch.product(power)
                total += size * products[power]
            for place in places:
                if place not in found or total > found[place][0]:
                    found[place] = (total, held)
    return {place: by_category(held, micro_batch) for place, (_, held) in found.items()}


def _placed(depth: Depth, shared: int) -> Iterator[tuple[Span, list[Place]]]:
    """Each span, and its places."""
    ordinals: dict[tuple[str, int], int] = {}
    for span in depth.spans:
        phase = span.phase, span.micro_batch
        if span.layer is None:
            ordinals[phase] = ordinals.get(phase, -1) + 1
            yield span, [(*phase, "apart", ordinals[phase])]
        else:
            ends = (("start", span.layer), ("end", depth.layers - 1 - span.layer))
            yield span, [(*phase, *end) for end in ends if end[1] < shared]


def by_category(held: Held, micro_batch: MicroBatch) -> dict[str, float]:
    """Bytes by what they are for."""
    found: dict[str, float] = {}
    for (category, power), size in held.items():
        found[category] = found.get(category, 0.0) + size * micro_batch.product(power)
    return found


def between(low: Mapping[Key, float], high: Mapping[Key, float], ratio: float) -> dict[Key, float]:
    """Sizes on the straight line from one to another, or beyond: at 0 those of ``low``, at 1 those of ``high``."""
    return {key: low.get(key, 0) + (high.get(key, 0) - low.get(key, 0)) * ratio for key in low.keys() | high.keys()}


def with_scores_put_together(depth: Depth, parts: int) -> Depth:
    """Of one of so many parts of a model, whose scores are put together with the others': of all tokens, and so of as
    many times fewer positions at a time."""

    def whole(held: Held) -> Held:
        return {
            (category, power): size * (parts if category == "logits" and power[2] else 1)
            for (category, power), size in held.items()
        }

    spans = (replace(span, moments=tuple(map(whole, span.moments))) for span in depth.spans)
    at_once = max(1, depth.most_scored // parts) if depth.most_scored else 0
    return replace(depth, spans=tuple(spans), most_scored=at_once)


def record_of(depth: Depth) -> dict[str, Any]:
    """As JSON holds it."""
    record: dict[str, Any] = _DEPTHS.dump_python(depth)
    return record


def depth_of(record: Mapping[str, Any]) -> Depth:
    """The depth of a record that was JSON."""
    return _DEPTHS.validate_python(record)


_DEPTHS = TypeAdapter(Depth)
