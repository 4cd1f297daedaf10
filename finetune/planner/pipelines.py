"""What a pipeline's stages take, from the trace of the whole model on one GPU.

A step is known as a function of the number of layers, so that of a stage is known too: with its layers, without the
loss where it is not the last, and without embedding and head where it has none. Beside it lie the activations of the
micro-batches that are on their way: in the order 1F1B the first of S stages computes S ahead, the last one
(arXiv:1806.03377). A step of M micro-batches takes as long as all stages take for one of them, and the slowest for the
M - 1 others (arXiv:2104.04473, section 2.2.1, for stages that need not be equal). Where stages have several parts, more
are on their way (``models.pipeline_order``), and each waits for the others for as much less as there are parts. Where
gradients of weights are deferred, it waits without the time T_W of these, in which it computes its own: (S - 1) (T_F +
T_B - T_W) of equal stages (arXiv:2401.10241, section 2.3); what they are made of is kept beside the activations.

Where the layers of stages are split, all this is of the trace of the part of each layer that one GPU has. Where stages
are sharded, all of these layers are traced as if they were one stage, which is gathered layer by layer; of what is
gathered beside them, embedding and head, a stage has its own.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from finetune.models import pipeline_order
from finetune.models.pipeline_order import Order
from finetune.models.stage_cuts import cuts
from finetune.trace.layers import Anatomy
from finetune.trace.partly import PartlyRecomputed
from finetune.trace.powers import CONSTANT, MicroBatch
from finetune.trace.setting import Setting
from finetune.trace.shallow import MORE_PARTS, Kernel, Moment, Sent, Step

OF_WEIGHTS = ("weights", "weight_copies", "gradients", "optimizer")
OF_LOSS = ("loss", MORE_PARTS)
COPY_BYTES = 2
"""Of a trained weight in 16 bits, which a stage keeps for all micro-batches of a step."""


@dataclass(frozen=True)
class Stage:
    """One of a pipeline's."""

    number: int
    of: int
    spans: tuple[tuple[int, int], ...]
    """Of its layers, by their numbers in the model: of each part the first, and the one after its last."""
    share_of_ends: float
    """Of the weights of embedding and head together, those that it has."""

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.of - 1

    @property
    def layers(self) -> int:
        return sum(end - first for first, end in self.spans)

    def of_first(self, layers: int) -> int:
        """Of so many first layers of the model, how many it has."""
        return sum(min(max(0, layers - first), end - first) for first, end in self.spans)

    def ahead(self, order: Order, micro_batches: int) -> float:
        """Micro-batches whose activations it keeps at a time, parts of them added up as if they were equal."""
        return order.ahead(self.number, micro_batches) / order.parts


def stages_of(setting: Setting, anatomy: Anatomy) -> list[Stage]:
    """The stages that a run cuts the model into (``models.pipeline_stages``); one of all layers where it does not."""
    if setting.stages == 1:
        return [Stage(0, 1, ((0, anatomy.layers),), 1.0)]
    found, spans = [], _cuts(anatomy.costs, setting.stages * setting.parts)
    for number in range(setting.stages):
        ends = (number == 0) + (number == setting.stages - 1)
        own = tuple(spans[number :: setting.stages])
        found.append(Stage(number, setting.stages, own, ends * (1.0 if anatomy.ties else 0.5)))
    return found


_cuts = cache(cuts)


def _recomputed(step: Step, stage: Stage) -> list[tuple[Step, int]]:
    """The step of a model in which no layer is recomputed, and the one in which all are, each with how many of a
    stage's layers are as there. Where all layers are alike, that step alone."""
    if not isinstance(step, PartlyRecomputed):
        return [(step, stage.layers)]
    again = stage.of_first(step.recomputed_layers)
    return [(step.kept, stage.layers - again), (step.all_recomputed, again)]


def _without_layers(step: Step) -> Step:
    return (step.kept if isinstance(step, PartlyRecomputed) else step).with_layers(0)


def moments_of(
    step: Step, setting: Setting, stage: Stage, micro_batch: MicroBatch, anatomy: Anatomy, *, on_course: bool = False
) -> Iterator[Moment]:
    """Moments of a stage's step. One some of whose layers are recomputed is taken to recompute none of those at hand.

    Args:
        step: of all layers, or of one GPU's part of each, on one GPU, or on those that hold shards of a stage.
        anatomy: of the whole model.
        on_course: those of the lower depth in their order, for a picture; else the highest of each span.
    """
    recomputed, without = _recomputed(step, stage), _without_layers(step)
    own = next(like for like, layers in recomputed if layers).with_layers(stage.layers)
    ends = {place: whole for place, (_, whole) in without.highest(micro_batch).items()}
    most_of_ends = {name: max(each.get(name, 0.0) for each in ends.values()) for name in OF_WEIGHTS}
    kept = sum(layers * kept_by_layer(like, micro_batch) for like, layers in recomputed if layers)
    waiting = (stage.ahead(setting.order, setting.accumulation) - 1) * kept
    waiting += _buffers(setting, stage, micro_batch, anatomy.width)
    of_pass = _deferred_by_layer(setting, anatomy) * stage.layers / setting.parts
    waiting += max(0, setting.order.deferred(stage.number, setting.accumulation) - 1) * of_pass
    copies = _copies(step, setting, stage)
    elsewhere = _GatheredElsewhere.of(step, setting, stage, anatomy)
    found = own.course(micro_batch) if on_course else own.moments(micro_batch, accumulation=setting.accumulation)
    for moment in found:
        if (moment.phase in OF_LOSS and not stage.is_last) or elsewhere.has(moment):
            continue
        held = dict(moment.categories)
        for name in OF_WEIGHTS:
            held[name] = max(0.0, held.get(name, 0.0) - (1 - stage.share_of_ends) * most_of_ends[name])
        if not stage.is_last:
            held["logits"] = 0.0
        held["gathered"] = max(0.0, held.get("gathered", 0.0) - elsewhere.at(moment))
        if moment.phase != "step":
            own_deferred = of_pass * _layers_passed(moment, stage.layers) / stage.layers
            held["activations"] = held.get("activations", 0.0) + waiting + own_deferred
            held["weight_copies"] = copies
        yield Moment(moment.phase, held, moment.place)


@dataclass(frozen=True)
class _GatheredElsewhere:
    """What is gathered of embedding and head in the traced process, and not in a stage.

    Each is gathered by itself (``distributed.part_shards``), before and after the layers. One weight that is both stays
    gathered from the forward to the backward pass.
    """

    of_embedding: bool
    """Whether the gathering of the embedding is one of what is elsewhere."""
    of_scores: bool
    """Whether that of the head is."""
    weights: float
    """Bytes of one that is both."""
    of_head: float
    """Of its gradient by the head, which waits from the beginning of the backward pass for that by the embedding."""

    @classmethod
    def of(cls, step: Step, setting: Setting, stage: Stage, anatomy: Anatomy) -> "_GatheredElsewhere":
        if not setting.shards_parts:
            return cls(False, False, 0.0, 0.0)
        if not anatomy.ties:
            return cls(not stage.is_first, not stage.is_last, 0.0, 0.0)
        ends = _without_layers(step)
        gathers = [each for each in ends.sent if is_gather(each) and each.phase == "forward"]
        # layers are left out, but for what is lost in rounding
        gathered = sum(round(each.calls / ends.micro_batches) * each.bytes.get(CONSTANT, 0.0) for each in gathers)
        width = 4 if setting.precision == "no" else COPY_BYTES
        of_head = 0.0 if stage.is_last else width * _elements(ends.trained())
        has_none = not stage.share_of_ends
        return cls(has_none, has_none, (1 - stage.share_of_ends) * gathered, of_head)

    def has(self, moment: Moment) -> bool:
        """Whether it is one of gathering, or adding up, what is not in the stage."""
        _, _, where, number = moment.place or ("", 0, "", 0)
        if where != "apart" or moment.phase not in ("forward", "backward"):
            return False
        return self.of_embedding if number == (moment.phase == "backward") else self.of_scores

    def at(self, moment: Moment) -> float:
        """Bytes of the moments of a stage."""
        if moment.phase == "step":
            return 0.0
        return self.weights + (self.of_head if moment.phase == "backward" else 0.0)


def is_gather(sent: Sent) -> bool:
    """Whether it gathers weights."""
    return "allgather" in sent.name


def is_of_weights(sent: Sent) -> bool:
    """Whether it gathers weights or adds up their gradients."""
    return is_gather(sent) or "reduce_scatter" in sent.name


def sent_of(step: Step, setting: Setting, stage: Stage) -> list[Sent]:
    """What a stage sends to those that hold shards of it, in as many micro-batches as were traced. Where it has several
    parts, each pass of one gathers all of them. What is left out has a negative number of calls."""
    found = [
        replace(each, calls=each.calls * layers / stage.layers)
        for like, layers in _recomputed(step, stage)
        for each in like.with_layers(stage.layers).sent
        if layers
    ]
    for each in filter(is_of_weights, _without_layers(step).sent):
        # once more for the backward pass of an embedding that is not the head too
        elsewhere = 1 - (stage.is_first if is_gather(each) and each.phase == "backward" else stage.share_of_ends)
        found.append(replace(each, calls=-elsewhere * each.calls))
    times, least = setting.parts, 1e-6  # less is lost in rounding
    return [
        replace(each, calls=each.calls * (times if is_gather(each) else 1)) for each in found if abs(each.calls) > least
    ]


def kept_by_layer(step: Step, micro_batch: MicroBatch) -> float:
    """Bytes that a layer keeps of a micro-batch between its forward and its backward pass, where all do alike."""
    none, one = (
        max(
            whole.get("activations", 0.0)
            for place, (_, whole) in step.with_layers(layers).highest(micro_batch).items()
            if place[0] == "loss" and place[1] == 0
        )
        for layers in (0, 1)
    )
    return one - none


def deferred_share(setting: Setting, anatomy: Anatomy) -> float:
    """Of the gradients of the layers' weights, those that a pipeline defers."""
    if not setting.order.zero_bubble:
        return 0.0
    return pipeline_order.deferred_share(anatomy.deferrable_share, adapter=setting.adapter, fp8=setting.fp8)


def _deferred_by_layer(setting: Setting, anatomy: Anatomy) -> float:
    """Bytes that a layer keeps of a micro-batch between its backward pass and the gradients of its weights, at most."""
    return float(sent_bytes(setting, anatomy.deferrable_width)) if deferred_share(setting, anatomy) else 0.0


def _layers_passed(moment: Moment, layers: int) -> int:
    """How many of so many layers the backward pass has come to, at most."""
    if moment.phase != "backward":
        return 0
    if moment.place is None:
        return layers
    *_, end, number = moment.place
    return {"start": layers - number, "end": number + 1, "apart": min(number, 1) * layers}.get(end, layers)


def trained_share(step: Step, stage: Stage) -> float:
    """Of all trained weights, those of a stage."""
    return trained_elements(step, stage) / max(1.0, _elements(step.trained()))


def kernels_of(step: Step, setting: Setting, stage: Stage) -> list[Kernel]:
    """Operations of a stage's passes, for as many micro-batches as were traced: of its layers, and in the last stage
    of what is beside the layers, nearly all of which is the head's. What is left out has a negative number of calls."""
    beside = [] if stage.is_last else _without_layers(step).kernels
    found = [
        replace(each, calls=each.calls * layers / stage.layers)
        for like, layers in _recomputed(step, stage)
        for each in like.with_layers(stage.layers).kernels
        if each.phase != "step" and layers
    ]
    found += [replace(each, calls=-each.calls) for each in beside if each.phase != "step"]
    if copies := _copies(step, setting, stage):  # from fp32; traced for each micro-batch, and made for all of a step
        others = step.micro_batches * (1 / setting.accumulation - 1)
        found.append(Kernel("forward", "moved", "copies", 4, {}, {CONSTANT: 3 * copies}, others))
    return found


def computed(setting: Setting) -> int:
    """Micro-batches of a step on each replica, with those that train nothing."""
    return setting.order.computed(setting.accumulation)


def sent_bytes(setting: Setting, width: int) -> int:
    """Of the hidden states of a micro-batch, and as much of their gradients: what a stage sends the next one."""
    return setting.tokens * width * (4 if setting.precision == "no" else 2)


def _buffers(setting: Setting, stage: Stage, micro_batch: MicroBatch, width: int) -> float:
    """For what a stage receives of its neighbours, of all micro-batches of a step (``distributed.pipeline_step``)."""
    neighbours = 2 * setting.parts - stage.is_first - stage.is_last
    return float(neighbours * computed(setting) * sent_bytes(setting, width))


def _copies(step: Step, setting: Setting, stage: Stage) -> float:
    has_masters = setting.weights == "fp32_master" and setting.precision != "no" and not setting.shards_parts
    return COPY_BYTES * trained_elements(step, stage) if has_masters else 0.0


def trained_elements(step: Step, stage: Stage) -> float:
    """Of the trained weights of a stage."""
    like = step.kept if isinstance(step, PartlyRecomputed) else step
    own, elsewhere = _elements(like.with_layers(stage.layers).trained()), 1 - stage.share_of_ends
    return own - elsewhere * _elements(_without_layers(step).trained()) if elsewhere else own


def _elements(shapes: Mapping[tuple[int, ...], int]) -> float:
    return float(sum(count * math.prod(shape) for shape, count in shapes.items()))
