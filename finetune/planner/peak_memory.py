"""The peak of a GPU's memory in an optimizer step, and what it is made of.

A step is gone through on tensors without values (``planner.decoder``), in milliseconds and with the sizes of the whole
model: what is held between steps, a first and a last micro-batch forward and backward, the optimizer's step. What is
counted is what PyTorch's allocator counts as allocated (``torch.cuda.max_memory_allocated``); ``needed_bytes`` adds
what a GPU needs beside it.
"""

import math
from dataclasses import dataclass

from finetune.planner import inventory
from finetune.planner.build import build
from finetune.planner.operations import Numerics, Operations
from finetune.planner.optimizer_state import Trained, state_tensors, step_bytes
from finetune.planner.shape import ModelShape
from finetune.planner.tape import Memory, Storage
from finetune.planner.zero_step import ZeroStep
from finetune.trace.placement import placement_of
from finetune.trace.setting import Setting
from finetune.units import MIB

CUBLAS_BYTES = 2 * 32 * MIB
"""Workspace of matrix products on Hopper and later, for the threads of forward and backward (PyTorch's
``getChosenWorkspaceSize``); 8 MiB each before."""
CONTEXT_BYTES = 600 * MIB
"""CUDA's context and loaded kernels: assumed, they lie outside of PyTorch's allocator."""
COMMUNICATION_BYTES = 1024 * MIB
"""NCCL's buffers, where there are several GPUs: assumed."""
FRAGMENTATION = 0.03
"""Share of the peak that the allocator reserves beyond it: assumed, and less with expandable segments."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one GPU when most are held."""

    parts: dict[str, int]
    """By ``tape.KINDS``."""
    phases: dict[str, int]
    """Peak of forward, loss, backward and step."""
    course: tuple[tuple[str, int], ...]
    """Phase and bytes over the step, for a picture."""

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def numerics_of(setting: Setting, *, on_gpu: bool = True) -> Numerics:
    """In which widths a setting computes."""
    compute = 4 if setting.precision == "no" else 2
    if setting.weights == "bf16":
        return Numerics(2, 2, 2, autocast=False, on_gpu=on_gpu)
    autocast = compute == 2 and placement_of(setting.strategy, setting.world_size).computes_under_autocast
    return Numerics(compute, 4 if autocast else compute, compute, autocast, on_gpu)


def step_memory(shape: ModelShape, setting: Setting, *, on_gpu: bool = True) -> StepMemory:
    """The second optimizer step of a run on the first of its processes.

    Args:
        on_gpu: CUDA's kernels and their workspace; else what a CPU's kernels allocate in their place, as in a rehearsal
            or a dry run.
    """
    memory = Memory(adds_in_place=on_gpu)
    placement, numerics = placement_of(setting.strategy, setting.world_size), numerics_of(setting, on_gpu=on_gpu)
    zero: list[ZeroStep] = []
    built = build(
        memory, shape, setting, placement, numerics, enter=lambda phase: zero[0].enter(phase) if zero else None
    )
    if placement.framework == "zero":
        zero.append(ZeroStep(memory, shape, setting, placement, state_bytes=_state_bytes_per_element(setting)))
        for parameter in built.parameters:
            parameter.on_gradient = zero[0].fill_bucket
    stepped = built.trained
    if zero:  # on flat tensors
        stepped = [Trained(zero[0].bytes.largest_flat, 2, 2 if setting.weights == "bf16" else 4)]
    held = [Storage(memory, 2 * shape.head_dim, "weights")] * 2  # frequencies of the positions
    if on_gpu:
        held.append(Storage(memory, CUBLAS_BYTES, "workspace"))
    if placement.framework == "replicated":
        held.append(Storage(memory, built.gradient_bytes, "gradients"))  # buckets, of which they are views
    on_host = placement.optimizer_on != "gpu"
    if not on_host:  # made in the first step
        held += _state(memory, setting, built.trained, zero)
    memory.restart()
    for last in [False, True][-min(setting.accumulation, 2) :]:
        if placement.framework == "replicated":
            built.keep_gradients(not last)
        ops = Operations(
            memory, numerics, rows=setting.micro_batch_size, row_tokens=setting.row_tokens, packed=setting.packing
        )
        built.decoder.micro_batch(ops, casts_logits=numerics.autocast)
    memory.phase = "step"
    if zero:
        zero[0].step()
    if not on_host:
        Storage(memory, step_bytes(setting.optimizer, setting.weights, setting.precision, stepped), "workspace")
    return StepMemory(memory.at_peak, memory.phases, tuple(memory.course))


def _state(memory: Memory, setting: Setting, trained: list[Trained], zero: list[ZeroStep]) -> list[Storage]:
    if zero:
        return [Storage(memory, zero[0].bytes.optimizer_state, "optimizer")]
    sizes = [size for one in trained for size in state_tensors(setting.optimizer, setting.weights, one)]
    return [Storage(memory, sum(-(-size // 512) * 512 for size in sizes), "optimizer")]


def _state_bytes_per_element(setting: Setting) -> float:
    """Of the flat tensors that DeepSpeed's optimizers step on."""
    width = 2 if setting.weights == "bf16" else 4
    elements = 2**20
    return sum(state_tensors(setting.optimizer, setting.weights, Trained(elements, 2, width))) / elements


def needed_bytes(memory: StepMemory, setting: Setting) -> int:
    """What a GPU must have for a peak: with fragmentation, CUDA's context, and the buffers of collectives."""
    communication = COMMUNICATION_BYTES if setting.world_size > 1 else 0
    return round(memory.peak * (1 + FRAGMENTATION)) + CONTEXT_BYTES + communication


def checkpoint_bytes(shape: ModelShape, setting: Setting) -> int:
    """Of one checkpoint on disk, of all processes: each trained weight and the optimizer's state for it."""
    width = 2 if setting.weights == "bf16" else 4
    total = 0.0
    for weight in inventory.of_model(shape, setting):
        if weight.trained:
            one = Trained(weight.elements, weight.rows if weight.is_matrix else 1, width)
            optimizer = setting.optimizer.removeprefix("paged_")
            total += width * weight.elements + sum(state_tensors(optimizer, setting.weights, one))
    return math.ceil(total)


def host_bytes(shape: ModelShape, setting: Setting, *, processes_of_machine: int) -> int:
    """Host memory of one machine: what is offloaded to it, and the weights while they are loaded.

    Every process reads the whole model in the precision of computation, under a strategy that gathers no layers; where
    weights are sharded one process reads and the others receive (FSDP2), or each keeps its partitions (ZeRO-3).
    Quantised weights go to the GPU one by one; under FSDP2 each process may quantise into host memory first
    (``distributed.weight_loading``).
    """
    placement = placement_of(setting.strategy, setting.world_size)
    weights = inventory.of_model(shape, setting)
    compute = numerics_of(setting).compute
    model = sum(compute * one.elements for one in weights)
    shared = placement.framework == "fully_shard" or placement.zero_stage == 3
    loading: float = model if shared else model * processes_of_machine
    if setting.bits is not None:
        quantised = sum(2 * one.kept_elements for one in weights if not one.trained)
        largest = max(2 * one.elements for one in weights)
        loading = (quantised if placement.framework == "fully_shard" else largest) * processes_of_machine
    if placement.framework == "zero":
        memory = Memory()
        zero = ZeroStep(memory, shape, setting, placement, state_bytes=_state_bytes_per_element(setting))
        return math.ceil(max(loading, zero.bytes.host * processes_of_machine))
    if placement.weights_on == "gpu":
        return math.ceil(loading)
    width = 2 if setting.weights == "bf16" else 4
    held = sum(
        (2 * width if one.trained else 0) * one.elements
        + sum(state_tensors(setting.optimizer, setting.weights, Trained(one.elements, one.rows, width)) * one.trained)
        + (compute * one.kept_elements if not one.trained else 0)
        for one in weights
    )
    return math.ceil(max(loading, held * processes_of_machine / placement.weight_shards))
