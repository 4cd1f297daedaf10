"""What DeepSpeed holds through the phases of a step, beside the activations (``zero``, ``zero_gather``)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from finetune.planner import inventory
from finetune.planner.inventory import Weight
from finetune.planner.shape import ModelShape
from finetune.planner.tape import Memory, Storage
from finetune.planner.zero import BUCKET_ELEMENTS, PERSISTENT_ELEMENTS, ZeroBytes, zero_bytes
from finetune.planner.zero_gather import Gathered, gathered
from finetune.trace.placement import Placement
from finetune.trace.setting import Setting


def kept_gradient_width(setting: Setting, placement: Placement) -> int:
    """Bytes of an element of the gradients that stay beside the weights until the step; 0 if they move to a bucket."""
    if placement.zero_stage > 1:
        return 0
    if setting.precision == "no":
        return 4
    return 4 if setting.precision == "fp16" and setting.weights != "bf16" else 2


def groups_of(shape: ModelShape, setting: Setting) -> tuple[list[list[int]], list[int]]:
    """Elements of trained weights by the optimizer's groups (matrices; norms and biases), and of frozen ones."""
    weights = inventory.of_model(shape, setting)
    decayed = [w.elements for w in weights if w.trained and w.is_matrix]
    others = [w.elements for w in weights if w.trained and not w.is_matrix]
    frozen = [w.kept_elements for w in weights if not w.trained]
    return [decayed, others], frozen


class ZeroStep:
    """Storages that come and go with the phases of a micro-batch."""

    def __init__(
        self, memory: Memory, shape: ModelShape, setting: Setting, placement: Placement, *, state_bytes: float
    ) -> None:
        trained, frozen = groups_of(shape, setting)
        self.memory, self.stage = memory, placement.zero_stage
        places = {"gpu": "none", "host": "host", "disk": "disk"}
        self.bytes: ZeroBytes = zero_bytes(
            stage=placement.zero_stage,
            processes=placement.optimizer_shards,
            trained=trained,
            frozen=frozen,
            precision=setting.precision,
            weights=setting.weights,
            state_bytes=state_bytes,
            offload=places[placement.optimizer_on],  # type: ignore[arg-type]
        )
        self.gathers: Gathered | None = None
        if self.stage == 3:
            width = 4 if setting.precision == "no" else 2
            alike = replace(setting, micro_batch_size=1, row_tokens=1, accumulation=1)  # of which it does not depend
            self.gathers = _gathers(shape, alike, placement.weight_shards, width)
        size = self.bytes
        self.held = [
            Storage(memory, size.weights, "weights"),
            Storage(memory, size.persistent, "gathered"),
            Storage(memory, size.masters, "optimizer"),
            Storage(memory, size.gradients, "gradients"),
            Storage(memory, size.bucket, "gathered"),
        ]
        self.accumulated: Storage | None = None
        self.moving: list[Storage] = []
        self.bucket: list[Storage] = []
        self.bucket_bytes = size.backward_bucket
        if self.stage == 1 and not size.gradients:  # which stays until the step
            self.bucket_bytes = size.accumulated * BUCKET_ELEMENTS // (sum(map(sum, trained)) + BUCKET_ELEMENTS)

    def enter(self, phase: str) -> None:
        """Take what a phase holds, in place of what the one before held."""
        size, travels = self.bytes, self.gathers
        self.moving.clear()
        if self.stage != 1:
            self.bucket.clear()
        amounts = {"forward": 0, "loss": 0, "backward": 0, "reduced": 0}
        if travels is not None:
            amounts["forward"] = travels.forward_peak
            amounts["loss"] = travels.forward_end
            amounts["backward"] = travels.backward_peak
        self.moving.append(Storage(self.memory, amounts[phase], "gathered"))
        if phase == "reduced":
            if self.accumulated is None and self.stage == 2:
                self.accumulated = Storage(self.memory, size.accumulated, "gradients")
            self.memory.phase = "backward"
            Storage(self.memory, size.backward_bucket + size.reduction, "gathered")
            self.moving.clear()

    def fill_bucket(self) -> None:
        """A gradient is there: the first makes the bucket."""
        if not self.bucket:
            self.bucket.append(Storage(self.memory, self.bucket_bytes, "gathered"))

    def step(self) -> None:
        """The optimizer's step, without its own workspace; gradients go with it."""
        Storage(self.memory, self.bytes.step, "workspace")
        self.accumulated = None
        self.bucket.clear()


@lru_cache(maxsize=256)
def _gathers(shape: ModelShape, setting: Setting, processes: int, width: int) -> Gathered:
    """The replay of the coordinator, over modules in the order of the forward pass."""
    modules: list[list[int]] = []
    sizes: list[int] = []
    recomputed = []

    def visit(part: Sequence[Weight]) -> None:
        numbers: dict[tuple[str, str], list[int]] = {}
        for weight in part:
            key = (weight.owner, weight.part if weight.part in ("down", "up") else "")
            numbers.setdefault(key, []).append(len(sizes))
            sizes.append(0 if weight.kept_elements <= PERSISTENT_ELEMENTS else weight.kept_elements)
        modules.extend(numbers.values())

    visit(inventory.of_embedding(shape, setting))
    for _ in range(shape.layers):
        first = len(modules)
        visit(inventory.of_layer(shape, setting))
        if setting.activation_checkpointing:
            recomputed.append(range(first, len(modules)))
    visit(inventory.of_tail(shape, setting))
    if shape.tied:
        modules.append([0])
    return gathered(sizes, modules, processes=processes, element_bytes=width, recomputed=recomputed)
