"""Llama-like models whose steps are written down, not traced: they stand in for ``trace.tracer.Tracer`` in tests.

``arithmetic("llama-3.1-8b")`` is the planner's own ``Model``. Only its tracer is another: it gives the step of any
setting in a millisecond, in closed form. Its sizes are roughly those of a real step and are nowhere held against one:
they are for tests of what the planner makes of a step (what fits, what is chosen, what is said), which hold whatever
the sizes are. They grow with tokens, shrink with sharding and with fewer bits, and activations that are recomputed take
less memory and more time (``test_plan_choose`` holds them to that). Left out: which layers an adapter has, packing.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from finetune.optim.optimizer_state import Trained, state_tensors
from finetune.planner.model import Model
from finetune.trace.layers import Anatomy
from finetune.trace.partly import partly_recomputed
from finetune.trace.placement import Placement
from finetune.trace.powers import CONSTANT, Power
from finetune.trace.setting import Setting
from finetune.trace.shallow import HOST_COPY, Depth, Held, Kernel, Sent, Span, Step
from finetune.trace.tensor_parts import part_config
from finetune.trace.tracer import key_settings, with_part_alone, with_whole_layers

CONFIGS: dict[str, Any] = json.loads((Path(__file__).parent / "model_configs.json").read_text())
TOKEN: Power = (1, 1, 0)
SQUARE: Power = (1, 2, 0)


def config_named(name: str) -> dict[str, Any]:
    """Contents of the config.json of a published model: smollm2-135m, llama-3.1-8b, llama-3.1-70b, ..."""
    return dict(CONFIGS[name]["config"])


def arithmetic(name: str, **changed: Any) -> Model:
    """A published model, with fields of its config.json changed."""
    config = config_named(name) | changed
    return Model(config, ArithmeticTracer(config, row_tokens=2048))  # type: ignore[arg-type]


class ArithmeticTracer:
    """Takes the place of a ``Tracer``, and remembers what it was asked to trace together."""

    def __init__(
        self,
        model_config: Mapping[str, Any],
        *,
        row_tokens: int,
        on_progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self.llama, self.model_config = Llama.of(model_config), model_config
        self.rounds: list[list[Setting]] = []
        self._steps: dict[Setting, Step] = {}
        self._parts: dict[int, ArithmeticTracer] = {}

    def __enter__(self) -> "ArithmeticTracer":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @property
    def anatomy(self) -> Anatomy:
        return self.llama.anatomy

    def anatomy_of(self, setting: Setting) -> Anatomy:
        part = self._of_part(setting).anatomy
        return replace(self.anatomy, deferrable_width=part.deferrable_width)

    def prepare(self, settings: Sequence[Setting]) -> None:
        keys = (key for each in map(with_whole_layers, settings) for key in key_settings(each, self.llama.layers))
        new = [key for key in dict.fromkeys(keys) if key not in self._steps]
        self._steps |= {key: step_of(self.llama, key) for key in new}
        self.rounds += [new] if new else []

    def step(self, setting: Setting) -> Step:
        if setting.tensor > 1:
            return self._of_part(setting).step(with_part_alone(setting))
        self.prepare([setting])
        steps = [self._steps[key] for key in key_settings(setting, self.llama.layers)]
        return steps[0] if len(steps) == 1 else partly_recomputed(*steps, layers=setting.recomputed_layers or 0)

    def _of_part(self, setting: Setting) -> "ArithmeticTracer":
        if setting.tensor == 1:
            return self
        if setting.tensor not in self._parts:
            config = part_config(self.model_config, dict(self.anatomy.sizes), setting.tensor)
            self._parts[setting.tensor] = ArithmeticTracer(config, row_tokens=2048)
        return self._parts[setting.tensor]


@dataclass(frozen=True)
class Llama:
    """Sizes of a model with gated MLPs and grouped heads, without biases."""

    hidden: int
    intermediate: int
    queries: int
    """Heads times their size; likewise keys."""
    keys: int
    layers: int
    vocabulary: int
    tied: bool
    positions: int | None
    heads: tuple[int, int]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Llama":
        """That of a config.json."""
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            queries=heads * head_dim,
            keys=config.get("num_key_value_heads", heads) * head_dim,
            layers=config["num_hidden_layers"],
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            positions=config.get("max_position_embeddings"),
            heads=(heads, config.get("num_key_value_heads", heads)),
        )

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Outputs and inputs of the linear layers of one layer."""
        h, i, q, k = self.hidden, self.intermediate, self.queries, self.keys
        return [(q, h), (k, h), (k, h), (h, q), (i, h), (i, h), (h, i)]

    @cached_property
    def layer_linear(self) -> int:
        """Elements of these."""
        return sum(map(math.prod, self.linears))

    @cached_property
    def shapes(self) -> dict[tuple[int, ...], int]:
        """Of all weights, and how many there are of each."""
        found = {(self.vocabulary, self.hidden): 1 if self.tied else 2, (self.hidden,): 2 * self.layers + 1}
        for shape in self.linears:
            found[shape] = found.get(shape, 0) + self.layers
        return found

    @cached_property
    def anatomy(self) -> Anatomy:
        total = _elements(self.shapes)
        return Anatomy(
            parameters=total,
            active_parameters=total,
            linear_parameters=self.layers * self.layer_linear,
            largest_parameter=max(map(math.prod, self.shapes)),
            deferrable_share=1.0,
            deferrable_width=sum(map(sum, self.linears)),
            dimensions=tuple(sorted({size for shape in self.shapes for size in shape})),
            sizes=(
                ("num_attention_heads", self.heads[0]),
                ("num_key_value_heads", self.heads[1]),
                ("vocab_size", self.vocabulary),
                ("intermediate_size", self.intermediate),
                ("head_dim", self.queries // self.heads[0]),
            ),
            layers=self.layers,
            lead=0,
            period=1,
            positions=self.positions,
            keeps_apart=True,
            heads=self.heads,
            width=self.hidden,
            costs=(
                *[float(self.layer_linear)] * (self.layers - 1),
                float(self.layer_linear + self.vocabulary * self.hidden),
            ),
            ties=self.tied,
        )

    def trained(self, setting: Setting) -> dict[tuple[int, ...], int]:
        """Of the weights that a setting trains: an adapter is beside every linear layer."""
        if setting.adapter == "none":
            return self.shapes
        found: dict[tuple[int, ...], int] = {}
        for outputs, inputs in self.linears:
            own = [(setting.rank, inputs), (outputs, setting.rank)]
            for shape in own + ([(outputs,)] if setting.adapter == "dora" else []):
                found[shape] = found.get(shape, 0) + self.layers
        return found


@dataclass(frozen=True, kw_only=True)
class WholeStep(Step):
    """Of all layers, with nothing to extrapolate."""

    llama: Llama
    setting: Setting

    def with_layers(self, layers: int) -> Step:
        return Step(layers, *(step_of(replace(self.llama, layers=depth), self.setting).low for depth in (1, 2)))

    @cached_property
    def kernels(self) -> list[Kernel]:
        return list(self.low.kernels)

    @cached_property
    def sent(self) -> list[Sent]:
        return list(self.low.sent)


def step_of(llama: Llama, setting: Setting) -> Step:
    """The step of a setting, as a ``Tracer`` keys it."""
    place = setting.placement
    state = _State(llama, setting, place)
    depth = Depth(
        layers=llama.layers,
        trained=llama.trained(setting),
        spans=tuple(_spans(llama, setting, place, state)),
        on_host={("weights", CONSTANT): state.weights + state.gradients + state.optimizer},
        kernels=tuple(_kernels(llama, setting, place, state)),
        sent=tuple(_sent(llama, setting, place, state)),
        most_scored=2**40,
    )
    return WholeStep(llama.layers, depth, depth, llama=llama, setting=setting)


class _State:
    """Bytes of one process that do not depend on tokens."""

    def __init__(self, llama: Llama, setting: Setting, place: Placement) -> None:
        every, linear = llama.anatomy.parameters, llama.anatomy.linear_parameters
        self.trained = _elements(llama.trained(setting))
        width = 2 if setting.weights == "bf16" else 4
        own = 2 if place.framework == "zero" else width
        frozen = 0.0 if setting.adapter == "none" else 2 * (every - linear) + linear * (setting.bits or 16) / 8
        self.weights = (frozen + own * self.trained) / place.weight_shards
        self.gradients = width * self.trained / place.gradient_shards
        kinds = [
            (Trained(math.prod(s), s[0] if len(s) > 1 else 1, width), n) for s, n in llama.trained(setting).items()
        ]
        state = sum(
            n * sum(state_tensors(setting.optimizer, setting.weights, one, averages=setting.averages))
            for one, n in kinds
        )
        masters = width * self.trained if own < width else 0
        self.optimizer = (state + masters) / place.optimizer_shards
        is_cast = place.framework in ("plain", "in_parts", "replicated") and width == 4
        self.copies = 2 * self.trained if is_cast else 0
        """To compute with."""
        self.layer = (frozen + 2 * self.trained) / llama.layers
        """Of a layer, as it is gathered."""


def _spans(llama: Llama, setting: Setting, place: Placement, state: _State) -> Iterator[Span]:
    """Forward, loss, backward of each micro-batch, and step."""
    h, i, q, k = llama.hidden, llama.intermediate, llama.queries, llama.keys
    layer = 2 * (6 * h + 2 * q + 2 * k + 4 * i)
    inputs = 2 if setting.offloads_activations else llama.layers  # that of a layer, and the next one's
    kept = inputs * 2 * h + layer if setting.activation_checkpointing else llama.layers * layer
    activations = {("activations", TOKEN): float(kept)}
    gathered = _gathered(llama, setting, place, state)
    always: Held = {("weights", CONSTANT): state.weights, ("optimizer", CONSTANT): state.optimizer}
    gradients: Held = {("gradients", CONSTANT): state.gradients}
    if place.weights_on != "gpu" and place.framework == "fully_shard":
        always = gradients = {}
    computing = added_held(always, activations, gathered, {("weight_copies", CONSTANT): float(state.copies)})
    for number in range(setting.accumulation):
        before = gradients if number or place.zero_stage == 3 else {}
        logits: Held = {("logits", TOKEN): 2.0 * llama.vocabulary}
        more: Held = {("logits", TOKEN): 10.0 * llama.vocabulary}
        yield Span("forward", number, None, (added_held(computing, before, logits),))
        yield Span("loss", number, None, (added_held(computing, before, more),))
        kernels: Held = {("kernels", TOKEN): 4.0 * q}
        last: Held = {("activations", TOKEN): float(layer)}
        end = added_held(always, gathered, gradients, last, kernels)
        yield Span("backward", number, None, (added_held(computing, before, kernels), end))
    yield Span("step", setting.accumulation - 1, None, (added_held(always, gradients),))


def _gathered(llama: Llama, setting: Setting, place: Placement, state: _State) -> Held:
    """What is gathered of others, and buckets."""
    if place.framework == "fully_shard" or place.zero_stage == 3:
        gradients = 4 * state.trained / llama.layers
        size = 2 * state.layer + 2 * llama.hidden * llama.vocabulary + gradients
    else:
        size = 2 * min(state.trained, 5e8) if place.framework == "zero" else 0.0
    return {("gathered", CONSTANT): float(size)}


def _kernels(llama: Llama, setting: Setting, place: Placement, state: _State) -> Iterator[Kernel]:
    micro, layers = setting.accumulation, llama.layers * setting.accumulation
    linear, count = llama.layer_linear, len(llama.linears)
    again = int(setting.activation_checkpointing)
    trains_all = setting.adapter == "none"
    one = {TOKEN: 2 * linear / count}, {TOKEN: 4.0 * llama.hidden, CONSTANT: 2 * linear / count}
    head = {TOKEN: 2.0 * llama.hidden * llama.vocabulary}, {TOKEN: 2.0 * llama.vocabulary}
    scores = {SQUARE: 2.0 * llama.queries}, {TOKEN: 8.0 * llama.queries}
    twice = {SQUARE: 4.0 * llama.queries}, {TOKEN: 16.0 * llama.queries}
    element = dict[Power, float](), {TOKEN: 6.0 * llama.hidden}
    small = dict[Power, float](), {TOKEN: 2.0 * llama.hidden}
    yield from (
        Kernel("forward", "product", "mm", 2, *one, calls=count * layers),
        Kernel("backward", "product", "mm", 2, *one, calls=count * layers * (1 + trains_all + again)),
        Kernel("forward", "product", "head", 2, *head, calls=micro),
        Kernel("backward", "product", "head", 2, *head, calls=micro * (1 + trains_all)),
        Kernel("forward", "attention", "attend", 2, *scores, calls=layers),
        Kernel("backward", "attention", "attend", 2, *twice, calls=layers),
        Kernel("forward", "moved", "elementwise", 2, *element, calls=12 * layers),
        Kernel("backward", "moved", "elementwise", 2, *element, calls=(18 + 12 * again) * layers),
        Kernel("loss", "moved", "softmax", 4, {}, {TOKEN: 12.0 * llama.vocabulary}, calls=micro),
        Kernel("backward", "moved", "softmax", 4, {}, {TOKEN: 12.0 * llama.vocabulary}, calls=micro),
    )
    if again and not setting.offloads_activations:
        yield Kernel("backward", "attention", "attend again", 2, *scores, calls=layers)
    if not trains_all:
        yield Kernel("forward", "moved", "adapter", 2, *small, calls=2 * count * layers)
        yield Kernel("backward", "moved", "adapter", 2, *small, calls=2 * count * layers * (1 + again))
    if setting.bits:
        whole = dict[Power, float](), {CONSTANT: linear * (2 + setting.bits / 8) / count}
        yield Kernel("forward", "moved", "dequantise", 1, *whole, calls=count * layers)
        yield Kernel("backward", "moved", "dequantise", 1, *whole, calls=count * layers * (1 + again))
    if state.copies:
        cast = dict[Power, float](), {CONSTANT: 6.0 * state.copies / 2 / llama.layers}
        yield Kernel("forward", "moved", "cast", 4, *cast, calls=layers)
    passed = 2 * (state.weights / place.optimizer_shards + state.optimizer) + state.gradients
    yield Kernel("step", "moved", "optimizer", 4, {}, {CONSTANT: passed / llama.layers}, calls=llama.layers)


def _sent(llama: Llama, setting: Setting, place: Placement, state: _State) -> Iterator[Sent]:
    """Layer by layer, of all micro-batches that are traced."""
    world, layers, often = setting.world_size, llama.layers, setting.accumulation * llama.layers
    gradients = {CONSTANT: 4 * state.trained / layers}
    gathers = {CONSTANT: state.layer}
    if setting.offloads_activations:
        for phase, width in product(("forward", "backward"), (llama.hidden, llama.queries)):
            yield Sent(phase, HOST_COPY, 1, {TOKEN: 2.0 * width}, often)
    if place.weight_shards > 1:
        shards = place.weight_shards
        yield Sent("forward", "_allgather_base_", shards, gathers, often)
        yield Sent("backward", "_allgather_base_", shards, gathers, often)
        yield Sent("backward", "_reduce_scatter_base_", shards, gradients, often)
        if place.replicas > 1:
            yield Sent("backward", "allreduce_", place.replicas, {CONSTANT: gradients[CONSTANT] / shards}, often)
    elif place.framework == "replicated":
        yield Sent("backward", "allreduce_", world, gradients, layers)
    elif place.framework == "zero":
        reduced = {CONSTANT: 2 * state.trained / layers}
        yield Sent("backward", "_reduce_scatter_base_", world, reduced, often if place.zero_stage == 2 else layers)
        yield Sent("step", "_allgather_base_", world, reduced, layers)


def added_held(*several: Held) -> Held:
    """All of them at one moment."""
    found: Held = {}
    for held in several:
        for place, size in held.items():
            found[place] = found.get(place, 0.0) + size
    return found


def _elements(shapes: Mapping[tuple[int, ...], int]) -> int:
    return sum(count * math.prod(shape) for shape, count in shapes.items())
