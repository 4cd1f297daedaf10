"""Layers dealt to the stages of a pipeline: an exact partition, what each stage holds, and the time of a step.

Stages follow one another in the schedule "one forward, one backward" (Narayanan et al., arXiv:2104.04473): stage i of p
holds the activations of min(p - i, micro-batches) micro-batches. With v > 1 virtual stages each GPU has v separate
chunks of layers, which divides the bubble by v. The embedding is in the first chunk, head and loss in the last.
Limits: all layers are alike; every chunk has at least one layer (an embedding or a head has no stage of its own).

Example: 10 layers of 1 s on 4 stages, with a head of 2 s and 8 micro-batches. ``partition`` gives 3, 3, 3 and 1 layers,
3 s each; the stages hold 4, 3, 2 and 1 micro-batches. A step takes 8 x 3 s and 3 x 3 s to fill and drain: 33 s, of
which each GPU waits 3/11.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from finetune.errors import InputError

Balance = Literal["time", "parameters", "memory"]


@dataclass(frozen=True)
class Part:
    """What a layer, the embedding, or the head with the loss adds to the stage that has it."""

    parameters: int
    """Of the model, before tensor or expert parallelism."""
    state_bytes: float
    """Weights, gradients and optimizer state on one GPU."""
    held_bytes: float
    """Kept for backward by each micro-batch that is under way."""
    once_bytes: float
    """Kept once, however many micro-batches are under way and however many layers the stage has."""
    seconds: float
    """Forward and backward of one micro-batch; FLOPs do as well, where only the balance is asked."""


@dataclass(frozen=True)
class Stage:
    """The share of one GPU of the pipeline."""

    index: int
    layers: int
    parameters: int
    micro_batches_held: float
    """Micro-batches whose activations are held at the peak; a fraction with virtual stages."""
    state_bytes: float
    held_bytes: float
    """Of all micro-batches held."""
    once_bytes: float
    seconds: float
    """Forward and backward of one micro-batch."""

    @property
    def total_bytes(self) -> float:
        """Peak of the stage."""
        return self.state_bytes + self.held_bytes + self.once_bytes


def partition(layers: int, costs: Sequence[Sequence[float]]) -> list[int]:
    """Layers of each chunk, so that the most expensive chunk costs least: exact, by dynamic programming.

    Args:
        layers: of all chunks together.
        costs: of each chunk with 1 layer, with 2, and so on; infinite for a number that it may not have.

    Returns:
        At least one layer a chunk, or an empty list where there is no partition of finite cost.
    """
    best: list[dict[int, tuple[float, int]]] = [{0: (float("-inf"), 0)}]
    for chunk, of_chunk in enumerate(costs):
        row: dict[int, tuple[float, int]] = {}
        for done, (worst, _) in best[-1].items():
            most = layers - done - (len(costs) - chunk - 1)
            for count, cost in enumerate(of_chunk[: max(most, 0)], start=1):
                candidate = max(worst, cost)
                if candidate < row.get(done + count, (float("inf"), 0))[0]:
                    row[done + count] = (candidate, count)
        best.append(row)
    if layers not in best[-1]:
        return []
    counts = []
    left = layers
    for row in reversed(best[1:]):
        counts.append(row[left][1])
        left -= counts[-1]
    return counts[::-1]


def micro_batches_held(stage: int, *, pipeline: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Micro-batches whose activations a stage (from 0) holds at its peak.

    min(p - i, m), and with virtual stages the chunks of the interleaved warm-up over v, for the first stage
    1 + (p - 1) / (p v) times as much as without them (Korthikanti et al., arXiv:2205.05198, section 4.2.3).
    """
    if virtual_stages == 1:
        return float(min(pipeline - stage, micro_batches))
    chunks = 2 * (pipeline - stage - 1) + (virtual_stages - 1) * pipeline + 1
    return min(chunks, micro_batches * virtual_stages) / virtual_stages


def stages(
    layers: int,
    pipeline: int,
    *,
    layer: Part,
    embedding: Part,
    head: Part,
    micro_batches: int,
    virtual_stages: int = 1,
    balance: Balance = "time",
    memory_limit_bytes: float = float("inf"),
) -> tuple[Stage, ...]:
    """The best split of a model's layers: the smallest maximum of what is balanced, then of the memory.

    Args:
        layers: of the model.
        pipeline: GPUs in a row, one a stage.
        micro_batches: of one replica in an optimizer step.
        memory_limit_bytes: no stage may take more at its peak.

    Returns:
        One stage a GPU; empty where no split keeps to the memory limit (with virtual stages: where the best does not).

    Raises:
        InputError: if there are fewer layers than chunks.
    """
    chunks = pipeline * virtual_stages
    if layers < chunks:
        raise InputError(
            f"A pipeline of {pipeline} with {virtual_stages} chunks of layers on each GPU needs {chunks} layers, and "
            f"there are {layers}; take fewer stages."
        )

    def of(chunk: int, count: int) -> Stage:
        ends = [part for part, at in ((embedding, 0), (head, chunks - 1)) if chunk == at]
        index = chunk % pipeline
        held = micro_batches_held(index, pipeline=pipeline, micro_batches=micro_batches, virtual_stages=virtual_stages)
        return Stage(
            index=index,
            layers=count,
            parameters=count * layer.parameters + sum(part.parameters for part in ends),
            micro_batches_held=held,
            state_bytes=count * layer.state_bytes + sum(part.state_bytes for part in ends),
            held_bytes=held * (count * layer.held_bytes + sum(part.held_bytes for part in ends)),
            once_bytes=layer.once_bytes + sum(part.once_bytes for part in ends),
            seconds=count * layer.seconds + sum(part.seconds for part in ends),
        )

    possible = [[of(chunk, count) for count in range(1, layers - chunks + 2)] for chunk in range(chunks)]
    limit = memory_limit_bytes if virtual_stages == 1 else float("inf")
    balanced = [[_measure(s, balance) if s.total_bytes <= limit else float("inf") for s in row] for row in possible]
    counts = partition(layers, balanced)
    if not counts:
        return ()
    worst = max(row[count - 1] for row, count in zip(balanced, counts))
    then: Balance = "time" if balance == "memory" else "memory"
    rest = [
        [_measure(stage, then) if cost <= worst else float("inf") for stage, cost in zip(row, costs)]
        for row, costs in zip(possible, balanced)
    ]
    counts = partition(layers, rest)
    split = tuple(_joined([possible[c][counts[c] - 1] for c in range(i, chunks, pipeline)]) for i in range(pipeline))
    return split if max(stage.total_bytes for stage in split) <= memory_limit_bytes else ()


def _measure(stage: Stage, balance: Balance) -> float:
    """What is balanced."""
    if balance == "time":
        return stage.seconds
    return stage.parameters if balance == "parameters" else stage.total_bytes


def _joined(chunks: list[Stage]) -> Stage:
    """The chunks of one GPU as one stage."""
    return Stage(
        index=chunks[0].index,
        layers=sum(chunk.layers for chunk in chunks),
        parameters=sum(chunk.parameters for chunk in chunks),
        micro_batches_held=chunks[0].micro_batches_held,
        state_bytes=sum(chunk.state_bytes for chunk in chunks),
        held_bytes=sum(chunk.held_bytes for chunk in chunks),
        once_bytes=max(chunk.once_bytes for chunk in chunks),
        seconds=sum(chunk.seconds for chunk in chunks),
    )


def imbalance(parts: tuple[Stage, ...]) -> float:
    """Seconds of the slowest stage over the mean: 1 is perfect."""
    return max(stage.seconds for stage in parts) * len(parts) / sum(stage.seconds for stage in parts)


def bubble_share(*, pipeline: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """Share of a step that a GPU of a balanced pipeline waits: (p - 1) / (v m + p - 1) (arXiv:2104.04473, 2.2)."""
    return (pipeline - 1) / (virtual_stages * micro_batches + pipeline - 1)


def pipeline_seconds(parts: tuple[Stage, ...], *, micro_batches: int, virtual_stages: int = 1) -> float:
    """Forward and backward of all micro-batches of a step.

    The slowest stage computes them all, the other stages once each while the pipeline fills and drains; v virtual
    stages divide the latter. Balanced, that is (m + (p - 1) / v) times a stage, exactly; unequal stages take up to a
    third of the slowest less for each other stage, as part of the filling and draining runs beside the slowest.
    """
    slowest = max(stage.seconds for stage in parts)
    return micro_batches * slowest + (sum(stage.seconds for stage in parts) - slowest) / virtual_stages
