"""The memory that a setting needs: of a GPU at the peak of its step, of the host, and of one checkpoint.

The step is traced (``trace.tracer``); here its spans become one peak. Host memory and checkpoints are arithmetic on
the model's sizes. What PyTorch's allocator counts as allocated (``torch.cuda.max_memory_allocated``) is the peak;
``needed_bytes`` adds what a GPU needs beside it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from finetune.config.strategy_names import SWAPPED_TOGETHER
from finetune.optim.optimizer_state import Trained, state_tensors
from finetune.planner import pipelines
from finetune.trace.layers import Anatomy
from finetune.trace.placement import Placement
from finetune.trace.setting import Setting
from finetune.trace.shallow import HOST_COPY, Moment, Step
from finetune.units import MIB

PARTS = ("weights", "gradients", "optimizer", "activations", "loss", "gathered", "workspace")
PART_OF = {
    "weights": "weights",
    "weight_copies": "activations",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "temporaries": "activations",
    "logits": "loss",
    "gathered": "gathered",
    "kernels": "workspace",
}
"""Parts by the categories of a trace."""
CUBLAS_BYTES = {True: 2 * 32 * MIB, False: 2 * 8 * MIB}
"""Workspaces of matrix products on Hopper and later, and before, for the threads of forward and backward (PyTorch's
``getChosenWorkspaceSize``)."""
CONTEXT_BYTES = 600 * MIB
"""CUDA's context and loaded kernels: assumed, they lie outside of PyTorch's allocator."""
COMMUNICATION_BYTES = 1024 * MIB
"""NCCL's buffers, where there are several GPUs: assumed."""
FRAGMENTATION = 0.03
"""Share of the peak that the allocator reserves beyond it: assumed, and less with expandable segments."""
STORED_AS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Dtypes of the precisions of computation, as config.json names them."""
SWAP_BUFFERS = {"weights": 5, "optimizer": 4}
"""Pinned buffers of ZeRO's swap to disk (offload_config.py of the engine)."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one GPU when most are held."""

    parts: dict[str, int]
    """By ``PARTS``."""
    phases: dict[str, int]
    """Peak of forward, loss, backward and step."""
    moments: Callable[[], Iterable[tuple[str, dict[str, float]]]] = field(default=tuple, compare=False, repr=False)
    """Over the step, in their order."""

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    @cached_property
    def course(self) -> tuple[tuple[str, dict[str, int]], ...]:
        """Phase and bytes by ``PARTS`` over the step, for a picture."""
        return tuple((phase, {name: round(size) for name, size in parts.items()}) for phase, parts in self.moments())


def step_memory(step: Step, setting: Setting, anatomy: Anatomy, *, large_workspaces: bool = True) -> StepMemory:
    """The second optimizer step of a run on the first of its processes; of a pipeline on the stage that needs most.

    Under tensor parallelism it is traced of the part of the model that each process has.

    Args:
        step: of ``Model.step``.
        large_workspaces: of matrix products, as on Hopper and later.
    """
    if setting.stages > 1:
        micro_batch = step.micro_batch(setting.micro_batch_size, setting.own_row_tokens)
        found = []
        for stage in pipelines.stages_of(setting, anatomy):
            of_stage = partial(pipelines.moments_of, step, setting, stage, micro_batch, anatomy)
            found.append(_memory(of_stage(), partial(of_stage, on_course=True), step, setting, large_workspaces))
        return max(found, key=lambda each: each.peak)
    micro_batch = step.micro_batch(setting.micro_batch_size, setting.own_row_tokens)
    every = step.moments(micro_batch, accumulation=setting.accumulation)
    return _memory(every, lambda: step.course(micro_batch), step, setting, large_workspaces)


def _memory(
    every: Iterable[Moment],
    course: Callable[[], Iterable[Moment]],
    step: Step,
    setting: Setting,
    large_workspaces: bool,
) -> StepMemory:
    place = setting.placement
    beside = {"workspace": float(CUBLAS_BYTES[large_workspaces])}
    if place.weights_on == "gpu":
        beside["weights"] = float(reference_bytes(step, setting))
    moments = [(each.phase, _parts(each, place, beside)) for each in every]
    phases: dict[str, float] = {}
    for phase, parts in moments:
        phases[phase] = max(phases.get(phase, 0.0), sum(parts.values()))
    highest = max((parts for _, parts in moments), key=lambda parts: sum(parts.values()))
    return StepMemory(
        parts={name: round(highest.get(name, 0.0)) for name in PARTS},
        phases={phase: round(size) for phase, size in phases.items()},
        moments=lambda: ((each.phase, _parts(each, place, beside)) for each in course()),
    )


def _parts(moment: Moment, place: Placement, beside: Mapping[str, float]) -> dict[str, float]:
    is_offloaded = place.framework == "zero" and place.optimizer_on != "gpu"
    found = dict(beside)
    for category, size in moment.categories.items():
        if not (is_offloaded and category in ("weights", "gradients", "optimizer")):
            part = PART_OF[category]
            found[part] = found.get(part, 0.0) + size
    return found


def needed_bytes(memory: StepMemory, setting: Setting) -> int:
    """What a GPU must have for a peak: with fragmentation, CUDA's context, and the buffers of collectives."""
    communication = COMMUNICATION_BYTES if setting.world_size > 1 else 0
    return round(memory.peak * (1 + FRAGMENTATION)) + CONTEXT_BYTES + communication


def trained_weights(step: Step, setting: Setting) -> list[tuple[Trained, int]]:
    """Each kind of trained weight, whole, and how many there are of it."""
    width = 2 if setting.weights == "bf16" else 4
    return [
        (Trained(math.prod(shape), shape[0] if len(shape) > 1 else 1, width), count)
        for shape, count in step.trained().items()
    ]


def reference_bytes(step: Step, setting: Setting) -> int:
    """Of the copy that each process keeps of its part of the trained weights (``distributed.remembered_weights``): of
    whole ones, or of shards, of which the first is as large as any."""
    if setting.reference != "model":
        return 0
    place, shards = setting.placement, setting.placement.weight_shards
    in_16_bits = setting.weights == "bf16" or (place.framework == "zero" and setting.precision != "no")
    elements = 0
    for shape, count in step.trained().items():
        shape = own_shape(shape, setting)
        rows = shape[0] if place.framework == "fully_shard" else math.prod(shape)  # ZeRO-3 cuts between any elements
        elements += count * math.ceil(rows / shards) * (math.prod(shape) // max(1, rows))
    return (2 if in_16_bits else 4) * elements


def own_shape(shape: tuple[int, ...], setting: Setting) -> tuple[int, ...]:
    """What a process has of a trained weight, before it is sharded: of experts, which lie one after another in the
    first of three dimensions, its share."""
    return (shape[0] // setting.experts, *shape[1:]) if len(shape) == 3 else shape


def checkpoint_bytes(step: Step, setting: Setting) -> int:
    """Of one checkpoint on disk, of all processes: each trained weight and the optimizer's state for it."""
    optimizer = setting.optimizer.removeprefix("paged_")
    kinds = trained_weights(step, setting)
    return math.ceil(
        sum(count * (one.width * one.elements + _state_bytes(optimizer, setting, one)) for one, count in kinds)
    )


def swapped_bytes(step: Step, anatomy: Anatomy, setting: Setting) -> int:
    """What ZeRO-3 keeps on disk during training under zero3_nvme, of all processes; 0 under other strategies.

    The weights that are computed with, and of trained ones the masters, AdamW's two averages, and gradients (as large
    as masters each). Measured: a run of 32.5 million weights, full in bf16, had 18.0 bytes of each there.
    """
    if setting.placement.optimizer_on != "disk":
        return 0
    width = 4 if setting.precision == "no" else 2
    kept = 2 if setting.weights == "bf16" else 4
    trained = sum(count * one.elements for one, count in trained_weights(step, setting))
    computed: float = width * (anatomy.parameters + (0 if setting.adapter == "none" else trained))
    if setting.bits is not None:
        computed -= (width - setting.bits / 8) * anatomy.linear_parameters
    return math.ceil(computed + 4 * kept * trained)


def _state_bytes(optimizer: str, setting: Setting, one: Trained) -> float:
    return sum(state_tensors(optimizer, setting.weights, one, averages=setting.averages))


def offloaded_bytes(step: Step, anatomy: Anatomy, setting: Setting) -> float:
    """Of what recomputed layers keep in host memory, of one process: of a micro-batch; in a pipeline, of those that are
    on their way through a stage, on average. PyTorch rounds pinned memory up to powers of two
    (ATen/core/CachingHostAllocator.h)."""
    micro_batch = step.micro_batch(setting.micro_batch_size, setting.own_row_tokens)
    leaving = [each for each in step.sent if each.name == HOST_COPY and each.phase == "forward"]
    of_model = sum(each.calls * _pinned(micro_batch.value(each.bytes)) for each in leaving) / step.micro_batches
    if setting.stages == 1:
        return of_model
    stages = pipelines.stages_of(setting, anatomy)
    of_layer = of_model / anatomy.layers / len(stages)
    return of_layer * sum(each.ahead(setting.order, setting.accumulation) * each.layers for each in stages)


def _pinned(size: float) -> int:
    return 1 << (math.ceil(size) - 1).bit_length()


def host_bytes(
    step: Step, anatomy: Anatomy, setting: Setting, *, processes_of_machine: int, stored: str | None = None
) -> int:
    """Host memory of one machine: what is offloaded to it, and the weights while they are loaded.

    Every process reads the whole model in the precision of computation, under a strategy that gathers no layers or
    shards parts, and leaves the other parts once it has; where the whole model is sharded one process reads and the
    others receive (FSDP2), or each keeps its partitions (ZeRO-3). Weights that are stored in this precision are mapped,
    of a pipeline those of its own layers, and the processes of a machine share them, but for those of experts, which
    transformers puts together as it reads.
    Quantised weights go to the GPU one by one; under FSDP2 and in a pipeline each process may quantise all of them into
    host memory first (``distributed.weight_loading``). Offloaded shards come to lie beside the weights that were read,
    which Accelerate 1.15 keeps until the last is made (``original_sd`` of ``fsdp2_prepare_model``).

    Args:
        stored: the dtype in which the model's weights are stored, as PyTorch names it; None where it is not known, or
            where random ones are drawn.
    """
    place = setting.placement
    precision = "bf16" if setting.weights == "bf16" else setting.precision
    compute = 4 if precision == "no" else 2
    model = compute * anatomy.parameters
    is_read_once = (place.framework == "fully_shard" and not setting.shards_parts) or place.zero_stage == 3
    is_mapped = anatomy.active_parameters == anatomy.parameters and stored == STORED_AS[precision]
    loading: float = model if is_read_once else model * processes_of_machine
    if is_mapped:  # of each stage once, of which processes that follow one another have the same
        stages_here = math.ceil(processes_of_machine * setting.stages / setting.world_size)
        loading = min(loading, model * stages_here / setting.stages)
    if setting.bits is not None:
        quantised = model - (compute - setting.bits / 8) * anatomy.linear_parameters
        largest = compute * anatomy.largest_parameter
        from_host = place.framework == "fully_shard" or setting.stages > 1 or setting.tensor > 1
        loading = (quantised if from_host else largest) * processes_of_machine
    inputs = offloaded_bytes(step, anatomy, setting)
    if place.optimizer_on == "gpu":
        return math.ceil(max(loading, inputs * processes_of_machine))
    copied = reference_bytes(step, setting) + inputs
    if place.framework == "zero":
        held = _held_by_zero(step, anatomy, setting, place) + copied
        return math.ceil(max(loading, held * processes_of_machine))
    shards = step.on_host("weights") * processes_of_machine
    return math.ceil(max(loading + shards, (step.on_host() + copied) * processes_of_machine))


def _held_by_zero(step: Step, anatomy: Anatomy, setting: Setting, place: Placement) -> float:
    """Of one process under ZeRO-3's offload (DeepSpeed 0.19.8, runtime/zero/stage3.py).

    In host memory: its share of weights, masters, optimizer state, and of the gradients, which lie there twice:
    accumulated (line 791), and as those of the masters (1337). On disk all but the accumulated gradients, and buffers
    as large as the largest that passes through them (swap_tensor/optimizer_utils.py): a weight, or a group of weights
    that step together, which ends with the weight that makes it full; one more for its weights in 16 bits (line 1018).
    """
    width = 4 if setting.precision == "no" else 2
    kept = 2 if setting.weights == "bf16" else 4
    kinds = trained_weights(step, setting)
    trained = sum(count * one.elements for one, count in kinds) / place.optimizer_shards
    if place.optimizer_on == "disk":
        swapped = width * SWAP_BUFFERS["weights"] * anatomy.largest_parameter
        group = min(trained, SWAPPED_TOGETHER + anatomy.largest_parameter / place.optimizer_shards)
        return kept * trained + swapped + (kept * SWAP_BUFFERS["optimizer"] + width) * group
    state = sum(count * _state_bytes(setting.optimizer, setting, one) for one, count in kinds)
    frozen = anatomy.parameters - (trained * place.optimizer_shards if setting.adapter == "none" else 0)
    weights = trained + frozen / place.weight_shards
    return width * weights + 3 * kept * trained + state / place.optimizer_shards
