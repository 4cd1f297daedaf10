"""Predicted time of an optimizer step, from what is computed, moved and sent.

``T = accumulation * (forward + backward) + exposed transfers + optimizer``: matrix products and attention at a share
of the card's FLOP/s, everything else at its memory bandwidth, and what is sent hides behind what is computed but for
the first gather and the last reduction of each micro-batch. Limits: reading data, evaluation and checkpoints are left
out; kernels of one pass do not overlap; no constant was fitted: a probe replaces ``RATES``.
"""

from dataclasses import asdict, astuple, dataclass

from finetune.errors import refuse_if_any
from finetune.hardware.cards import Gpu, Machines, precision_problem, stand_in
from finetune.planner.communication import Transfer, transfers
from finetune.planner.matrices import in_16_bits
from finetune.planner.rates import RATES, Rates
from finetune.planner.shape import ModelShape
from finetune.planner.work import Pass, work_of
from finetune.trace.placement import Placement, placement_of
from finetune.trace.setting import Setting


@dataclass(frozen=True)
class Parts:
    """Seconds of an optimizer step on each GPU, by what they are spent on."""

    matrix_products: float
    """Recomputed ones included."""
    attention: float
    elementwise: float
    """Norms, rotary embeddings, activation functions, sums, and what an adapter adds."""
    weights: float
    """Casts, dequantisation and copies of weights and gradients."""
    loss: float
    launches: float
    """For which the GPU waits until the host has launched the next kernel."""
    communication: float
    """Not hidden behind computation."""
    offload: float
    """Not hidden transfers between GPU, host and disk."""
    optimizer: float

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
        """Of so many positions, an epoch's say."""
        return tokens / self.tokens_per_second


def step_time(
    shape: ModelShape,
    setting: Setting,
    machines: Machines,
    *,
    mean_document_tokens: float,
    rates: Rates = RATES,
) -> StepTime:
    """Predict an optimizer step of ``setting.accumulation`` micro-batches on every GPU.

    Args:
        machines: the GPUs, as many as the setting has processes.
        mean_document_tokens: that a token's document has on average: of a row where rows are not packed.

    Raises:
        InputError: if setting, machines and documents contradict one another.
    """
    refuse_if_any(_problems(setting, machines, mean_document_tokens))
    gpu = stand_in(machines.gpu)
    rated = Machines(gpu, machines.gpus_per_node, machines.nodes)
    placement = placement_of(setting.strategy, setting.world_size)
    work = work_of(shape, setting, placement, mean_document_tokens=mean_document_tokens)
    pace = _Pace.of(gpu, setting, rates)
    forward, backward = pace.passes(work.forward), pace.passes(work.backward)
    sent = transfers(shape.layers, setting, placement, rated, work, rates)
    communication, offload = _exposed(sent, forward.seconds, backward.seconds, setting, placement)
    micro = setting.accumulation
    both = asdict(backward)
    passes = {name: micro * (seconds + both[name]) for name, seconds in asdict(forward).items()}
    if placement.optimizer_on == "gpu":
        optimizer = work.optimizer_bytes / pace.bytes_per_second
    else:
        optimizer = work.optimizer_bytes * machines.gpus_per_node / (rates.host_gb_per_second * 1e9)
    return StepTime(
        parts=Parts(**passes, communication=communication, offload=offload, optimizer=optimizer),
        tokens=setting.tokens * micro * setting.world_size,
        model_flops=work.model_flops * micro,
        peak_flops=pace.peak_flops,
        transfers=sent,
        stand_in=None if gpu is machines.gpu else gpu.name,
    )


def _problems(setting: Setting, machines: Machines, mean_document_tokens: float) -> list[str]:
    found = []
    if setting.world_size != machines.world_size:
        found.append(
            f"The setting has {setting.world_size} processes and {machines.text} has {machines.world_size} GPUs; give "
            "one process to each."
        )
    if not 0 < mean_document_tokens <= setting.row_tokens:
        found.append(
            f"Documents of {mean_document_tokens:g} tokens do not fit into rows of {setting.row_tokens}; give a mean "
            f"between 1 and {setting.row_tokens}."
        )
    problem = precision_problem(machines.gpu, "bf16" if setting.weights == "bf16" else setting.precision)
    return found + ([problem] if problem else [])


@dataclass(frozen=True)
class _Passes:
    """Seconds of a pass."""

    matrix_products: float
    attention: float
    elementwise: float
    weights: float
    loss: float
    launches: float

    @property
    def seconds(self) -> float:
        return float(sum(astuple(self)))


@dataclass(frozen=True)
class _Pace:
    """What a card reaches."""

    peak_flops: float
    matrix_flops_per_second: float
    attention_flops_per_second: float
    bytes_per_second: float
    kernel_seconds: float

    @classmethod
    def of(cls, gpu: Gpu, setting: Setting, rates: Rates) -> "_Pace":
        assert gpu.tflops is not None  # of a card that is known
        assert gpu.fp32_tflops is not None
        assert gpu.memory_gb_per_second is not None
        tflops = gpu.tflops if in_16_bits(setting) else gpu.fp32_tflops
        return cls(
            peak_flops=gpu.tflops * 1e12,
            matrix_flops_per_second=rates.matrix_efficiency * tflops * 1e12,
            attention_flops_per_second=min(rates.attention_efficiency * tflops, rates.attention_most_tflops) * 1e12,
            bytes_per_second=rates.memory_efficiency * gpu.memory_gb_per_second * 1e9,
            kernel_seconds=rates.kernel_seconds,
        )

    def passes(self, work: Pass) -> _Passes:
        matrix_products = work.matrix_flops / self.matrix_flops_per_second
        attention = work.attention_flops / self.attention_flops_per_second
        elementwise, weights, loss = (
            each / self.bytes_per_second for each in (work.elementwise_bytes, work.weight_bytes, work.loss_bytes)
        )
        computing = matrix_products + attention + elementwise + weights + loss
        launches = max(0.0, work.kernels * self.kernel_seconds - computing)
        return _Passes(matrix_products, attention, elementwise, weights, loss, launches)


def _exposed(
    sent: tuple[Transfer, ...], forward: float, backward: float, setting: Setting, placement: Placement
) -> tuple[float, float]:
    """Seconds of a step in which a GPU waits for other GPUs, and for host or disk.

    Beside each forward and backward pass run its transfers, one after the other; what is reduced once a step runs
    beside the backward pass of the last micro-batch.

    Args:
        forward: seconds of one forward pass; ``backward`` likewise.
    """
    reduces_once = placement.weight_shards == 1 and not placement.averages_each_micro_batch
    waits = {True: 0.0, False: 0.0}  # for other GPUs; for host or disk
    for when, beside in (("forward", forward), ("backward", backward), ("step", 0.0)):
        group = [each for each in sent if each.when == when]
        hidden = [each for each in group if each.overlaps]
        for each in group:
            waits[each.is_collective] += 0.0 if each.overlaps else each.seconds
        if hidden:
            total, ends = sum(each.seconds for each in hidden), max(each.seconds_of_one for each in hidden)
            times = 1 if reduces_once else setting.accumulation
            exposed = times * (ends + max(0.0, total / times - ends - beside))
            for each in hidden:
                waits[each.is_collective] += exposed * each.seconds / total
    return waits[True], waits[False]
