"""One micro-batch through a Llama-style decoder, forward and backward, on tensors without values.

The program of transformers' modules, written once more for sizes alone. Layers beyond ``LAYERS_IN_FULL`` differ from
their neighbours in nothing, so those in the middle pass as one lump: what each of them keeps and what gradients it
leaves are read off the layer before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from finetune.planner.attending import needs_mask
from finetune.planner.decoder_layer import Layer, run_layer, run_norm
from finetune.planner.dialects import Dialect, dialect_of
from finetune.planner.linear import Matrix, linear
from finetune.planner.operations import Operations
from finetune.planner.shape import ModelShape
from finetune.planner.sharded_units import Exchange
from finetune.planner.tape import Memory, Parameter, Storage, Tensor, leaf, run_backward

LAYERS_IN_FULL = 6


class Unit(Protocol):
    """What a strategy does around the modules that it treats as one: gather their weights, reduce their gradients."""

    casts_inputs: bool
    """Brings what a layer is given to the dtype of computation."""

    def before_forward(self) -> None: ...
    def after_forward(self) -> None: ...
    def before_backward(self) -> None: ...
    def after_backward(self) -> None: ...


class Plain:
    """The unit of a strategy that does nothing."""

    casts_inputs = False

    def before_forward(self) -> None: ...
    def after_forward(self) -> None: ...
    def before_backward(self) -> None: ...
    def after_backward(self) -> None: ...


class Lump:
    """The layers in the middle, as one: what is held of them, and the gradients that they leave."""

    def __init__(
        self, layers: int, held: Sequence[Storage], gradient_bytes: float, exchange: Exchange, reduced_bytes: int = 0
    ) -> None:
        """
        Args:
            gradient_bytes: that each of the layers leaves.
            exchange: keeps what was reduced over replicas.
            reduced_bytes: of each layer, where there are replicas.
        """
        self.layers, self.held, self.gradient_bytes = layers, list(held), gradient_bytes
        self.exchange, self.reduced_bytes = exchange, reduced_bytes
        self.keeps_gradients = True
        """Else they are passed on, with those of earlier micro-batches."""
        self.gradients: list[Storage] = []

    def accumulate(self, memory: Memory) -> None:
        """The gradients of one layer, unless all have theirs."""
        is_first = len(self.gradients) < self.layers
        if not self.keeps_gradients:
            del self.gradients[-1:]
        elif is_first and self.gradient_bytes:
            self.gradients.append(Storage(memory, self.gradient_bytes, "gradients"))
        if self.reduced_bytes and not (is_first and self.gradient_bytes == self.reduced_bytes):
            self.exchange.replicated.append(Storage(memory, self.reduced_bytes, "gathered"))


@dataclass(frozen=True)
class Decoder:
    """A model's parameters and the order of their use."""

    shape: ModelShape
    embedding: Parameter
    layers: list[Layer]
    """The first ones and the last ones, where there are more than ``LAYERS_IN_FULL``."""
    units: list[Unit]
    """One for each of them."""
    lump: Lump | None
    final_norm: Parameter
    head: Matrix
    """Of which the weight may be the embedding."""
    embedding_unit: Unit
    tail_unit: Unit
    """Of the last norm and the head; with the embedding, if that is the head."""
    dropout: float
    """Of the adapters' input."""
    checkpoints: bool
    """The input of each layer alone is kept."""
    enter: Callable[[str], None]
    """Told each phase as it begins."""

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.shape.model_type)

    def micro_batch(self, ops: Operations, *, casts_logits: bool) -> Tensor:
        """Forward, loss and backward; returns the loss, with which what is left of the graph goes.

        Args:
            casts_logits: Accelerate brings the logits to fp32 before it hands them over, as it does under autocast.
        """
        held = [ops.new(ops.tokens, 8), ops.new(ops.tokens, 8)]  # what goes in, and what shall come out
        loss = self.forward(ops, casts_logits=casts_logits)
        self._phase(ops.memory, "backward")
        assert loss.node is not None
        run_backward(loss.node, [ops.new(1, 4)])
        for unit in (*self.units, self.tail_unit, self.embedding_unit):
            unit.after_backward()
        held.clear()
        self._phase(ops.memory, "reduced")
        return loss

    def forward(self, ops: Operations, *, casts_logits: bool) -> Tensor:
        """The loss, and the graph behind it."""
        memory = ops.memory
        self._phase(memory, "forward")
        x = self._embed(ops)
        size = ops.tokens if ops.packed else ops.row_tokens
        width = 4 if self.dialect.rotates_in_fp32 else x.width
        angles = [ops.new(size * self.shape.head_dim, width) for _ in range(2 * self.dialect.rotations)]
        masks = self._masks(ops)
        kept, cast, pinned = {True: 0, False: 0}, 0, 0
        windowed = windowed_places(self.shape, len(self.layers))
        for place, (layer, unit) in enumerate(zip(self.layers, self.units, strict=True)):
            if place == len(self.layers) // 2 and self.lump is not None:
                narrow = self.shape.windowed_layers - sum(windowed)
                sizes = [kept[number < narrow] for number in range(self.lump.layers)]
                x = self._pass_lump(ops, self.lump, x, sizes, pinned, cast)
            before, before_casts, before_pinned = memory.live["activations"], _bytes(ops), sum(ops.pinned.values())
            is_windowed = windowed[place]
            x = self._run_layer(ops, layer, unit, x, angles[:2] if is_windowed else angles[-2:], is_windowed)
            cast, pinned = _bytes(ops) - before_casts, sum(ops.pinned.values()) - before_pinned
            kept[is_windowed] = memory.live["activations"] - before - (cast if self.checkpoints else 0)
        del angles, masks
        unit = self.tail_unit
        x = self._around(ops, unit, x, lambda given: run_norm(ops, self.dialect, given, self.final_norm), ends=False)
        with memory.making("loss"):
            logits = linear(ops, x, self.head)
            del x
            if self.dialect.scales_logits:
                logits = ops.scale(logits)
            if self.shape.logits_softcap:
                logits = ops.squash(logits)
            ops.casts.clear()  # autocast has ended
            if casts_logits:
                logits = ops.cast(logits, 4)
            logits = ops.made(_same(logits), [logits], _then(unit.before_backward))
            self._phase(memory, "loss")
            handed = [logits]
            del logits
            return self._lose(ops, handed)

    def _phase(self, memory: Memory, name: str) -> None:
        memory.phase = "backward" if name == "reduced" else name
        self.enter(name)

    def _embed(self, ops: Operations) -> Tensor:
        embedding, dialect = self.embedding, self.dialect
        whole = ops.like(embedding)
        self.embedding_unit.before_forward()
        output = ops.new(ops.tokens * self.shape.hidden, embedding.width)
        x = ops.made(output, [embedding], lambda arrived: [whole()])
        del output
        if dialect.scales_embedding:
            back = ops.like(x)
            factor = [ops.new(1, x.width)] if x.width != ops.numerics.compute else []  # brought to another dtype
            x = ops.made(back(), [x], lambda arrived: [back()], saved=factor)
        if self.checkpoints and x.node is None:  # transformers makes it want a gradient, which stays with it
            x = leaf(x)
        if self.embedding_unit is not self.tail_unit:
            self.embedding_unit.after_forward()
            x = ops.made(_same(x), [x], _then(self.embedding_unit.before_backward))
        return ops.scale(x) if dialect.scales_branches else x

    def _masks(self, ops: Operations) -> list[Tensor]:
        """What is added to written-out scores: of all positions before, and of those within a window; of a window
        alone for attention in one kernel, which needs none for all positions."""
        if self.dialect.attends_eagerly:
            count, width = 2 if self.shape.windowed_layers else 1, ops.numerics.compute
        else:
            count, width = int(needs_mask(ops, self.shape)), 1
        return [ops.new(ops.rows * ops.row_tokens**2, width) for _ in range(count)]

    def _lose(self, ops: Operations, handed: list[Tensor]) -> Tensor:
        """Sum of the cross-entropy in fp32; the caller's logits live until it returns."""
        x = ops.cast(handed[0], 4)
        back = ops.like(x)
        normal = ops.new(x.elements, 4)
        normal = ops.made(normal, [x], lambda arrived: [back()], saved=[normal])
        handed.clear()
        weight = ops.new(1, 4)
        return ops.made(ops.new(1, 4), [normal], lambda arrived: [back()], saved=[normal, weight])

    def _around(
        self, ops: Operations, unit: Unit, x: Tensor, function: Callable[[Tensor], Tensor], *, ends: bool = True
    ) -> Tensor:
        """A unit's forward pass between what a strategy does before and after it, and likewise backward."""
        if unit is not self.embedding_unit:  # of which the input wants no gradient
            x = ops.made(_same(x), [x], _then(unit.after_backward))
        unit.before_forward()
        output = function(x)
        if not ends:
            return output
        unit.after_forward()
        return ops.made(_same(output), [output], _then(unit.before_backward))

    def _run_layer(
        self, ops: Operations, layer: Layer, unit: Unit, x: Tensor, angles: Sequence[Tensor], is_windowed: bool
    ) -> Tensor:
        if unit.casts_inputs:
            compute = ops.numerics.compute
            angles = [each if each.width == compute else ops.new(each.elements, compute) for each in angles]

        def function(given: Tensor) -> Tensor:
            unit.before_forward()  # again, when a checkpointed layer runs again
            return run_layer(ops, self.shape, layer, given, (angles[0], angles[1]), self.dropout, is_windowed)

        run = partial(ops.checkpoint, function) if self.checkpoints else function
        return self._around(ops, unit, x, run)

    def _pass_lump(self, ops: Operations, lump: Lump, x: Tensor, kept: Sequence[int], pinned: int, cast: int) -> Tensor:
        """Layers that keep so many bytes, of which each pins as many, and leave as many in autocast's memory."""
        memory, back = ops.memory, ops.like(x)
        if cast and self.checkpoints:
            ops.casts[lump] = Tensor(Storage(memory, lump.layers * cast), 0, 0)
        inside = [Storage(memory, size - pinned) for size in kept]
        stays = Tensor(Storage(memory, pinned * lump.layers), 0, 0)
        output = ops.new(x.elements, x.width)

        def backward(arrived: list[Tensor]) -> list[Tensor | None]:
            while inside:
                inside.pop()
                lump.accumulate(memory)
            return [back()]

        return ops.made(output, [x], backward, pinned=[stays])


def windowed_places(shape: ModelShape, count: int) -> list[bool]:
    """Which of the layers in full attend within a window: where not all do, the first and the last do not."""
    wide = shape.layers - shape.windowed_layers
    if count < shape.layers:
        wide = min(count, max(min(wide, 2), count - shape.windowed_layers))
    chosen = {count - 1, *range(wide - 1)} if wide else set()
    return [place not in chosen for place in range(count)]


def _same(x: Tensor) -> Tensor:
    return Tensor(x.storage, x.elements, x.width)


def _then(act: Callable[[], None]) -> Callable[[list[Tensor]], list[Tensor | None]]:
    def backward(arrived: list[Tensor]) -> list[Tensor | None]:
        act()
        return [arrived[0]]

    return backward


def _bytes(ops: Operations) -> int:
    return sum(tensor.storage.size for tensor in ops.casts.values())
