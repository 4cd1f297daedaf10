"""Predicted time of an optimizer step, from the operations of its trace.

Each operation takes as long as its FLOPs at the card's speed or its bytes at the card's bandwidth, whichever is longer
(a roofline, doi:10.1145/1498765.1498785), beside the time in which a kernel starts and ends; a pass takes as long as
its operations, or as the host needs to launch them. What is sent hides behind what is computed but for the first gather
and the last reduction of each micro-batch. Limits: reading data, evaluation and checkpoints are left out; kernels of
one pass do not overlap; no constant was fitted to our own steps.
"""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace

from finetune.hardware.cards import Gpu, Machines, stand_in
from finetune.hardware.rates import Rates, rates_of
from finetune.planner import pipelines
from finetune.planner.communication import Transfer, transfers
from finetune.planner.part_traffic import part_transfers
from finetune.trace.layers import Anatomy
from finetune.trace.powers import MicroBatch
from finetune.trace.setting import Setting
from finetune.trace.shallow import FP8_PRODUCT, MORE_PARTS, Kernel, Step

MEASURED = "measured"
"""Name of a link that ``finetune links`` measured, and no data sheet names."""
PHASES = {"forward": ("forward", "loss", MORE_PARTS), "backward": ("backward",), "step": ("step",)}


@dataclass(frozen=True)
class Parts:
    """Seconds of an optimizer step on each GPU, by what they are spent on."""

    matrix_products: float
    """Recomputed ones included."""
    attention: float
    moved: float
    """Everything that is read and written: norms, activation functions, casts, dequantisation, copies, the loss."""
    launches: float
    """For which the GPU waits until the host has launched the next kernel."""
    communication: float
    """Not hidden behind computation."""
    offload: float
    """Not hidden transfers between GPU, host and disk."""
    optimizer: float
    idle: float = 0.0
    """In which a stage of a pipeline waits for the others."""

    @property
    def seconds(self) -> float:
        return float(sum(astuple(self)))


@dataclass(frozen=True)
class StepTime:
    """What an optimizer step takes."""

    parts: Parts
    tokens: int
    """Positions of a step, all GPUs."""
    model_flops: float
    """Of a step on one GPU; what is recomputed is not counted."""
    peak_flops: float
    """Of one GPU, by its data sheet."""
    transfers: tuple[Transfer, ...]
    """All that is sent, hidden or not."""
    stand_in: str | None
    """The card whose speed was assumed, because that of the GPU is not known: then only the ratio of two predictions
    means something."""

    @property
    def step_seconds(self) -> float:
        return self.parts.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOP/s as a share of the data sheet's."""
        return self.model_flops / self.step_seconds / self.peak_flops

    def seconds_for(self, tokens: float) -> float:
        """Of so many positions, for example an epoch's."""
        return tokens / self.tokens_per_second


@dataclass(frozen=True)
class Pass:
    """Seconds of a forward or backward pass, or of the optimizer."""

    matrix_products: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    launches: float = 0.0

    @property
    def seconds(self) -> float:
        return float(sum(astuple(self)))


def pass_of(kernels: Iterable[Kernel], micro_batch: MicroBatch, gpu: Gpu, rates: Rates, attended: float) -> Pass:
    """The time of operations, one after the other.

    Args:
        attended: mean tokens that a token's document has, as a share of a row's positions: that of attention's FLOPs.
    """
    assert gpu.tflops is not None  # of a card that is known
    assert gpu.fp32_tflops is not None
    assert gpu.memory_gb_per_second is not None
    bandwidth = rates.memory_efficiency * gpu.memory_gb_per_second * 1e9
    seconds = {"product": 0.0, "attention": 0.0, "moved": 0.0}
    calls = 0.0
    for each in kernels:
        sheet = gpu.tflops if each.width < 4 else gpu.fp32_tflops
        sheet *= rates.fp8_speed if each.name == FP8_PRODUCT else 1
        speed = rates.matrix_efficiency * sheet
        flops = micro_batch.value(each.flops)
        if each.kind == "attention":
            speed, flops = min(rates.attention_efficiency * sheet, rates.attention_most_tflops), flops * attended
        one = rates.kernel_seconds + max(flops / (speed * 1e12), micro_batch.value(each.bytes) / bandwidth)
        seconds[each.kind] += each.calls * one
        calls += each.calls
    waits = max(0.0, calls * rates.launch_seconds - sum(seconds.values()))
    return Pass(seconds["product"], seconds["attention"], seconds["moved"], waits)


def step_time(
    step: Step, setting: Setting, machines: Machines, anatomy: Anatomy, *, mean_document_tokens: float
) -> StepTime:
    """Predict an optimizer step of ``setting.accumulation`` micro-batches on every GPU.

    Args:
        machines: the GPUs, as many as the setting has processes.
        mean_document_tokens: length of the document of a token, on average over the tokens (E[l^2] / E[l]): of a row
            where rows are not packed.
    """
    known = at_known_speed(machines)
    name = None if known is machines else known.gpu.name
    rates = rates_of(known.gpu)
    micro_batch = step.micro_batch(setting.micro_batch_size, setting.own_row_tokens)
    attended = mean_document_tokens / setting.row_tokens
    if setting.stages > 1:
        return replace(_pipeline_time(step, setting, known, anatomy, micro_batch, attended), stand_in=name)
    passes = {
        which: pass_of((each for each in step.kernels if each.phase in phases), micro_batch, known.gpu, rates, attended)
        for which, phases in PHASES.items()
    }
    traced = step.micro_batches
    forward, backward = passes["forward"].seconds / traced, passes["backward"].seconds / traced
    splits = setting.tensor > 1
    sent = part_transfers(step, setting, known, anatomy) if splits else transfers(step, setting, known, rates)
    communication, offload = _exposed(sent, forward, backward, setting)
    micro = setting.accumulation / traced
    every = [passes["forward"]] * setting.forward_passes + [passes["backward"]]
    optimizer = passes["step"].seconds
    if setting.placement.optimizer_on != "gpu":
        moved = sum(each.calls * micro_batch.value(each.bytes) for each in step.kernels if each.phase == "step")
        optimizer = moved / (rates.host_gb_per_second * 1e9)
    return StepTime(
        parts=Parts(
            **{field.name: micro * sum(getattr(each, field.name) for each in every) for field in fields(Pass)},
            communication=communication,
            offload=offload,
            optimizer=optimizer,
        ),
        tokens=setting.tokens * setting.accumulation * setting.world_size // setting.tensor,
        model_flops=micro * useful_flops(step, micro_batch, attended),
        peak_flops=(known.gpu.tflops or 0.0) * 1e12,
        transfers=sent,
        stand_in=name,
    )


def at_known_speed(machines: Machines) -> Machines:
    """The same machines with a card of known speed: of a card that is not known, its stand-in.

    With the stand-in's links, but for those that were measured.
    """
    gpu = machines.gpu
    known = stand_in(gpu)
    if known is gpu:
        return machines
    inside, network = (link if link.name == MEASURED else None for link in (gpu.node_link, gpu.network))
    return replace(
        machines,
        gpu=replace(known, node_link=inside or known.node_link, network=network or known.network),
    )


def _pipeline_time(
    step: Step,
    setting: Setting,
    machines: Machines,
    anatomy: Anatomy,
    micro_batch: MicroBatch,
    attended: float,
) -> StepTime:
    """Of a pipeline: its slowest stage, and what it waits for the others (see ``planner.pipelines``).

    Stages hand on hidden states and gradients beside no computation (PyTorch's 1F1B waits for both), and so are they
    added up within split layers.
    """
    rates, traced = rates_of(machines.gpu), step.micro_batches
    stages = pipelines.stages_of(setting, anatomy)
    of_stages = [pipelines.kernels_of(step, setting, stage) for stage in stages]
    passes = [pass_of(kernels, micro_batch, machines.gpu, rates, attended) for kernels in of_stages]
    sent = part_transfers(step, setting, machines, anatomy)
    micro_batches = pipelines.computed(setting)
    passes_through = micro_batches * setting.parts
    in_passes = [each for each in sent if each.when != "step" and each.is_collective]
    alone = sum(each.seconds for each in in_passes if not each.overlaps) / passes_through
    host_copies = sum(each.seconds for each in sent if not each.is_collective)
    slowest = max(passes, key=lambda each: each.seconds)
    of_others = sum(each.seconds for each in passes) - slowest.seconds
    # for the gradients of weights nobody waits, and while others compute theirs a stage computes its own
    forward = [[each for each in kernels if each.phase == "forward"] for kernels in of_stages]
    products = [pass_of(each, micro_batch, machines.gpu, rates, attended).matrix_products for each in forward]
    deferred = pipelines.deferred_share(setting, anatomy) * (sum(products) - products[passes.index(slowest)])
    steps = [each for each in step.kernels if each.phase == "step"]
    update = pass_of(steps, micro_batch, machines.gpu, rates, attended).seconds
    micro, in_turn = setting.accumulation / traced, passes_through + setting.stages - 1
    trains_nothing = (micro_batches - setting.accumulation) * slowest.seconds
    backward = [each for each in of_stages[passes.index(slowest)] if each.phase == "backward"]
    of_backward = pass_of(backward, micro_batch, machines.gpu, rates, attended).seconds
    # of shards; like what is computed, for all micro-batches of a stage, and once for each other one
    beside = ((slowest.seconds - of_backward) / traced, of_backward / traced)
    of_shards = tuple(each for each in in_passes if each.overlaps)
    gathers, _ = _exposed(of_shards, *beside, replace(setting, accumulation=micro_batches))
    gathers *= in_turn / passes_through
    return StepTime(
        parts=Parts(
            **{field.name: micro * getattr(slowest, field.name) for field in fields(Pass)},
            communication=in_turn * alone + gathers + sum(each.seconds for each in sent if each.when == "step"),
            offload=max(0.0, host_copies - micro * slowest.seconds),  # which run beside all passes
            optimizer=update * max(pipelines.trained_share(step, stage) for stage in stages),
            idle=((of_others - 2 * deferred) / setting.parts + trains_nothing) / traced,
        ),
        tokens=setting.tokens * setting.accumulation * setting.data_processes,
        model_flops=micro * useful_flops(step, micro_batch, attended) / setting.stages,
        peak_flops=(machines.gpu.tflops or 0.0) * 1e12,
        transfers=sent,
        stand_in=None,
    )


def useful_flops(step: Step, micro_batch: MicroBatch, attended: float) -> float:
    """Of the traced micro-batches, forward and backward, without what is recomputed (see ``models.flops``).

    Backward, each product is computed once more for the gradient of its input, and once for that of its weight where
    the weight is trained; attention takes twice what it takes forward.
    """
    flops = dict.fromkeys(("product", "attention", "moved"), 0.0)
    for each in (kernel for kernel in step.kernels if kernel.phase in PHASES["forward"]):
        one = each.calls * micro_batch.value(each.flops)
        of_scores = each.kind == "product" and any(tokens > 1 for _, tokens, *_ in each.flops)
        flops["attention" if of_scores else each.kind] += one / 2 if of_scores else one  # half of them are masked
    multiplied = flops["product"] / (2 * micro_batch.rows * micro_batch.row_tokens * step.micro_batches)
    trained = sum(count * math.prod(shape) for shape, count in step.trained().items() if len(shape) > 1)
    return flops["product"] * (2 + min(1.0, trained / multiplied)) + 3 * flops["attention"] * attended


def _exposed(sent: tuple[Transfer, ...], forward: float, backward: float, setting: Setting) -> tuple[float, float]:
    """Seconds of a step in which a GPU waits for other GPUs, and for host or disk.

    Beside each forward and backward pass run its transfers, one after the other; what is reduced once a step runs
    beside the backward pass of the last micro-batch.

    Args:
        forward: seconds of one forward pass; ``backward`` likewise.
    """
    reduces_once = not setting.placement.communicates_each_micro_batch
    waits = {True: 0.0, False: 0.0}  # for other GPUs; for host or disk
    of_pass = {"forward": (forward, setting.forward_passes), "backward": (backward, 1), "step": (0.0, 1)}
    for when, (beside, passes) in of_pass.items():
        group = [each for each in sent if each.when == when]
        hidden = [each for each in group if each.overlaps]
        for each in group:
            waits[each.is_collective] += 0.0 if each.overlaps else each.seconds
        if hidden:
            total, ends = sum(each.seconds for each in hidden), max(each.seconds_of_one for each in hidden)
            times = passes * (1 if reduces_once else setting.accumulation)
            exposed = times * (ends + max(0.0, total / times - ends - beside))
            for each in hidden:
                waits[each.is_collective] += exposed * each.seconds / total
    return waits[True], waits[False]
