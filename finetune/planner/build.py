"""A decoder's parameters as a strategy leaves them on one process, for a step on tensors without values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from finetune.planner import inventory
from finetune.planner.decoder import LAYERS_IN_FULL, Decoder, Lump, Plain, Unit
from finetune.planner.decoder_layer import Layer
from finetune.planner.inventory import Weight
from finetune.planner.linear import Adapter, Matrix
from finetune.planner.operations import Numerics
from finetune.planner.optimizer_state import Trained
from finetune.planner.shape import ModelShape
from finetune.planner.sharded_units import Exchange, ShardedUnit
from finetune.planner.shards import row_shard_storage
from finetune.planner.tape import Memory, Parameter, Storage
from finetune.planner.zero_step import kept_gradient_width
from finetune.trace.placement import Placement
from finetune.trace.setting import Setting

NF4_TABLES = (4 * 16, 4 * 256, 4)
"""Of a matrix, beside a byte for 64 weights and 4 for 256 such bytes (QLoRA, arXiv:2305.14314, section 3): what its 4
and its 8 bits stand for, and the scales' mean."""


@dataclass
class Built:
    """A decoder, and what one process holds for it between steps."""

    decoder: Decoder
    parameters: list[Parameter]
    """As the modules see them; those that are trained are given gradients."""
    units: list[ShardedUnit]
    held: list[Storage] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    """What the optimizer steps on."""

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients, whole."""
        return sum(one.elements * one.width for one in self.trained)

    def keep_gradients(self, kept: bool) -> None:
        """Whether gradients stay beside their weights: under data parallelism all but the last micro-batch's,
        which are reduced in buckets with what stands beside the weights by then."""
        for parameter in self.parameters:
            parameter.kept_width = parameter.width if kept else 0
        if self.decoder.lump is not None:
            self.decoder.lump.keeps_gradients = kept


class Builder:
    """Makes the parameters of one part of the model after the other."""

    def __init__(self, memory: Memory, setting: Setting, placement: Placement, numerics: Numerics) -> None:
        self.memory, self.setting, self.placement, self.numerics = memory, setting, placement, numerics
        self.is_sharded = placement.framework == "fully_shard"
        self.master = 2 if setting.weights == "bf16" else 4
        self.kept_width = numerics.trained
        """Bytes of an element of the gradients that stay beside their weights until they are reduced."""
        if placement.framework == "zero":
            self.kept_width = kept_gradient_width(setting, placement)
        self.parameters: list[Parameter] = []
        self.held: list[Storage] = []
        self.trained: list[Trained] = []
        self.exchange = Exchange(memory)

    def make(self, weights: Sequence[Weight], times: int = 1) -> dict[tuple[str, str], Parameter]:
        """Parameters by owner and part; ``times`` layers as one."""
        made = {}
        for weight in weights:
            made[weight.owner, weight.part] = parameter = self._parameter(weight, times)
            self.parameters.append(parameter)
        return made

    def _parameter(self, weight: Weight, times: int) -> Parameter:
        width = self.numerics.trained if weight.trained else self.numerics.frozen
        size = self._kept_bytes(weight)
        constants = sum(self.memory.rounded(constant) for constant in self._constants(weight))
        self.held.append(Storage(self.memory, constants * times, "weights"))
        elements = weight.elements * times
        if self.placement.framework in ("plain", "replicated"):
            if weight.trained:
                self.trained += [Trained(weight.elements, weight.rows, width)] * times
            storage = Storage(self.memory, self.memory.rounded(size) * times, "weights")
            return Parameter(storage, elements, width, trained=weight.trained)
        if self.is_sharded:
            self._keep(size, times)
            if weight.trained:
                rows = -(-weight.rows // self.placement.weight_shards)
                self.trained += [Trained(rows * weight.columns, rows, self.master)] * times
        return Parameter(Storage(self.memory, 0), elements, width, trained=weight.trained, kept_width=self.kept_width)

    def _keep(self, size: float, times: int) -> None:
        if size and self.placement.weights_on == "gpu":
            self.held.append(Storage(self.memory, self.memory.rounded(size) * times, "weights"))

    def _kept_bytes(self, weight: Weight) -> float:
        """Bytes of a weight between its uses: of the whole, or of the share of a process."""
        n = self.placement.weight_shards if self.is_sharded else 1
        width = _width(weight, self.numerics.frozen)
        if weight.trained:
            width = self.master if self.is_sharded else self.numerics.trained
        return width * row_shard_storage(_kept_shape(weight), n)

    def _constants(self, weight: Weight) -> list[float]:
        """Bytes of each tensor that a quantised weight is dequantised with, which every process holds whole."""
        if weight.bits == 8:
            return [4.0 * weight.rows]
        if weight.bits != 4:
            return []
        scales = -(-weight.elements // 64)
        return [scales, 4.0 * -(-scales // 256), *NF4_TABLES]

    def unit(self, weights: Sequence[Weight], made: Sequence[Parameter], *, stays: bool = False) -> Unit:
        """What is gathered together."""
        if not self.is_sharded:
            return Plain()
        n, compute = self.placement.weight_shards, self.numerics.compute
        gathered = sum(_width(one, compute) * n * row_shard_storage(_kept_shape(one), n) for one in weights)
        shares = [row_shard_storage([one.rows, one.columns], n) for one in weights if one.trained]
        return ShardedUnit(
            self.exchange,
            [parameter for parameter in made if parameter.node],
            gather_bytes=gathered,
            share_elements=sum(shares),
            shards=n,
            master=self.master,
            replicas=self.placement.replicas,
            stays_gathered=stays,
            keeps_gradients=self.placement.optimizer_on == "gpu",
        )

    def lump(self, weights: Sequence[Weight], layers: int) -> Lump:
        """So many layers as one."""
        before = len(self.parameters)
        made = list(self.make(weights, layers).values())
        del self.parameters[before:]
        gradients = sum(self.memory.rounded(one.elements * self.kept_width) for one in weights if one.trained)
        if self.is_sharded:
            on_gpu = self.placement.optimizer_on == "gpu"
            gradients = sum(
                self.master * row_shard_storage([one.rows, one.columns], self.placement.gradient_shards)
                for one in weights
                if one.trained and on_gpu
            )
        reduced = 0
        if self.is_sharded and self.placement.replicas > 1:
            reduced = 4 * sum(
                row_shard_storage([one.rows, one.columns], self.placement.weight_shards)
                for one in weights
                if one.trained
            )
        return Lump(layers, [parameter.storage for parameter in made], gradients, self.exchange, reduced)


def _kept_shape(weight: Weight) -> list[int]:
    """Of the tensor that is split by rows."""
    return [weight.kept_elements, 1] if weight.bits == 4 else [weight.rows, weight.columns]


def _width(weight: Weight, compute: int) -> int:
    """Bytes of an element of that tensor as it is gathered: NF4 is packed into elements of 16 bits."""
    return 1 if weight.bits == 8 else 2 if weight.bits == 4 else compute


def build(
    memory: Memory,
    shape: ModelShape,
    setting: Setting,
    placement: Placement,
    numerics: Numerics,
    enter: Callable[[str], None],
) -> Built:
    """All parameters of a model; of the layers in the middle, one that stands for them."""
    builder = Builder(memory, setting, placement, numerics)
    of_layer = inventory.of_layer(shape, setting)
    of_embedding, of_tail = inventory.of_embedding(shape, setting), inventory.of_tail(shape, setting)
    embedding = builder.make(of_embedding)
    count = min(shape.layers, LAYERS_IN_FULL)
    layers: list[Layer] = []
    units: list[Unit] = []
    lump = None
    for place in range(count):
        if place == count // 2 and shape.layers > count:
            lump = builder.lump(of_layer, shape.layers - count)
        made = builder.make(of_layer)
        layers.append(_layer(shape, setting, made))
        units.append(builder.unit(of_layer, list(made.values())))
    tail = builder.make(of_tail)
    head = embedding["embed_tokens", "weight"] if shape.tied else tail["lm_head", "weight"]
    together = [*tail.values(), *(embedding.values() if shape.tied else ())]
    tail_unit = builder.unit([*of_tail, *(of_embedding if shape.tied else ())], together, stays=True)
    embedding_unit = tail_unit if shape.tied else builder.unit(of_embedding, list(embedding.values()))

    def enter_phase(phase: str) -> None:
        enter(phase)
        if phase in ("loss", "reduced"):  # forward or backward has ended, and waited for its collectives
            builder.exchange.finish()

    decoder = Decoder(
        shape,
        embedding=embedding["embed_tokens", "weight"],
        layers=layers,
        units=units,
        lump=lump,
        final_norm=tail["norm", "weight"],
        head=Matrix(shape.hidden, shape.vocabulary, head),
        embedding_unit=embedding_unit,
        tail_unit=tail_unit,
        dropout=setting.dropout,
        checkpoints=setting.activation_checkpointing,
        enter=enter_phase,
    )
    sharded = [unit for unit in (embedding_unit, *units, tail_unit) if isinstance(unit, ShardedUnit)]
    for earlier, later in pairwise(sharded):
        if later is not earlier:
            later.before = earlier
    return Built(decoder, builder.parameters, sharded, builder.held, builder.trained)


def _layer(shape: ModelShape, setting: Setting, made: dict[tuple[str, str], Parameter]) -> Layer:
    matrices = {}
    for linear in shape.linears:
        name, bits, adapter = linear.name, setting.bits if linear.is_module else None, None
        if (name, "down") in made:
            adapter = Adapter(made[name, "down"], made[name, "up"], made.get((name, "magnitude")))
        matrices[name] = Matrix(
            linear.inputs, linear.outputs, made[name, "weight"], bits, made.get((name, "bias")), adapter
        )
    return Layer(matrices, {norm.name: made[norm.name, "weight"] for norm in shape.norms})
