"""One optimizer step of a layout, predicted: stages, memory, traffic, seconds by cause, and model TFLOP/s per GPU.

Model FLOPs are those of ``models.flops``: recomputation is not counted, and of causal attention the half that is
needed (Megatron-LM's own figure counts both halves, and is larger).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.models.flops import training_flops_per_token
from finetune.planner.paper.cluster import ASSUMED, Assumptions, Cluster
from finetune.planner.paper.layout import Job, Layout
from finetune.planner.paper.layout_layer import (
    LayerSeconds,
    attended_tokens,
    head_seconds,
    layer_seconds,
    met_matrix_elements,
)
from finetune.planner.paper.layout_memory import (
    Count,
    GpuMemory,
    embedding_count,
    head_count,
    held_bytes,
    layer_count,
    logit_bytes,
    memory,
    once_bytes,
    optimizer_shards,
    state_bytes,
)
from finetune.planner.paper.traffic import Collective, gradient_collectives, layer_collectives, pipeline_sends
from finetune.planner.pipeline_schedule import Balance, Part, Stage, bubble_share, imbalance, pipeline_seconds, stages

if TYPE_CHECKING:
    from finetune.planner.shape import ModelShape


@dataclass(frozen=True)
class Prediction:
    """What a layout needs and how fast it is."""

    layout: Layout
    job: Job
    stages: tuple[Stage, ...]
    memory: GpuMemory
    """Of the stage that needs most."""
    fits: str
    """fits, tight (may run out), or does not fit."""
    traffic: tuple[Collective, ...]
    """Of a step, on a GPU of the slowest stage."""
    seconds: dict[str, float]
    """Of a step by cause; they add up to it, so that the causes of two layouts can be compared one by one."""
    model_flops: float
    """Of a step, over all GPUs."""

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s of each GPU."""
        return self.model_flops / self.step_seconds / self.layout.gpus / 1e12

    @property
    def tokens_per_second(self) -> float:
        """Over all GPUs."""
        return self.job.tokens_per_step / self.step_seconds

    @property
    def bubble(self) -> float:
        """Share of a step that a balanced pipeline would wait."""
        return bubble_share(
            pipeline=self.layout.pipeline,
            micro_batches=self.job.micro_batches(self.layout),
            virtual_stages=self.layout.virtual_stages,
        )

    @property
    def imbalance(self) -> float:
        """Seconds of the slowest stage over the mean."""
        return imbalance(self.stages)


def model_flops_per_token(shape: "ModelShape", row_tokens: int) -> float:
    """Forward and backward with every parameter trained; of experts, those that a token meets."""
    matrices = shape.layers * met_matrix_elements(shape) + shape.vocabulary * shape.hidden
    return training_flops_per_token(
        matrix_parameters=matrices,
        trained_matrix_parameters=matrices,
        layers=shape.layers,
        heads=shape.heads,
        head_dim=shape.head_dim,
        mean_row_length=2 * attended_tokens(shape, row_tokens),
    )


def parts(
    shape: "ModelShape",
    layout: Layout,
    job: Job,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    seconds_of_a_layer: float,
) -> tuple[Part, Part, Part]:
    """A layer, the embedding, and the head with the loss, for ``finetune.planner.pipeline_schedule.stages``."""
    layer, embedding, head = layer_count(shape, layout), embedding_count(shape, layout), head_count(shape, layout)
    return (
        Part(
            layer.total,
            state_bytes(layer, layout),
            held_bytes(shape, layout, job),
            once_bytes(shape, layout, job, assumptions),
            seconds_of_a_layer,
        ),
        Part(embedding.total, state_bytes(embedding, layout), 0.0, 0.0, 0.0),
        Part(
            head.total,
            state_bytes(head, layout),
            0.0,
            logit_bytes(shape, layout, job, assumptions),
            head_seconds(shape, layout, job, cluster, assumptions),
        ),
    )


def predict(
    shape: "ModelShape",
    layout: Layout,
    job: Job,
    cluster: Cluster,
    assumptions: Assumptions = ASSUMED,
    *,
    balance: Balance = "time",
) -> Prediction:
    """A step of a possible layout (see ``layout.why_not``).

    Stages are balanced within the GPU's memory; where no split fits into it, by memory, to show how much is needed.
    """
    compute = layer_seconds(shape, layout, job, cluster, assumptions)
    in_layer = layer_collectives(shape, layout, job, cluster, attention_seconds=compute.attention)
    seconds_of_a_layer = compute.total + sum(one.exposed_seconds for one in in_layer)
    layer, embedding, head = parts(shape, layout, job, cluster, assumptions, seconds_of_a_layer=seconds_of_a_layer)
    micro_batches = job.micro_batches(layout)
    limit = assumptions.limit_bytes(cluster)
    split: tuple[Stage, ...] = ()
    for kind, bytes_at_most in ((balance, limit), ("memory", float("inf"))):
        split = split or stages(
            shape.layers,
            layout.pipeline,
            layer=layer,
            embedding=embedding,
            head=head,
            micro_batches=micro_batches,
            virtual_stages=layout.virtual_stages,
            balance=kind,
            memory_limit_bytes=bytes_at_most,
        )
    fullest = max(split, key=lambda stage: stage.total_bytes)
    slowest = max(split, key=lambda stage: stage.seconds)
    counts = [_local(shape, layout, stage) for stage in split]
    largest = max(counts, key=lambda count: count.local)
    exchanged = [
        *pipeline_sends(shape, layout, job, cluster),
        *gradient_collectives(
            layout,
            cluster,
            assumptions,
            count=largest,
            tied_parameters=embedding_count(shape, layout).local if shape.tied else 0,
            backward_seconds=slowest.seconds * 2 / 3,
        ),
    ]
    causes = _causes(split, layout, job, compute, in_layer, head.seconds, shape.layers)
    for one in exchanged:
        cause = "pipeline sends" if one.name == "pipeline" else "gradients"
        causes[cause] = causes.get(cause, 0.0) + one.exposed_seconds
    dense, expert = optimizer_shards(layout)
    touched = assumptions.optimizer_traffic_bytes * (largest.dense_local / dense + largest.expert_local / expert)
    causes["optimizer"] = touched / (cluster.memory_gb_per_second * 1e9 * assumptions.memory_share)
    return Prediction(
        layout=layout,
        job=job,
        stages=split,
        memory=memory(shape, layout, job, fullest, assumptions),
        fits=verdict(fullest.total_bytes, cluster, assumptions),
        traffic=(*(one.times(slowest.layers * micro_batches) for one in in_layer), *exchanged),
        seconds=causes,
        model_flops=model_flops_per_token(shape, job.row_tokens) * job.tokens_per_step,
    )


def verdict(total_bytes: float, cluster: Cluster, assumptions: Assumptions) -> str:
    """Whether a GPU with such a peak fits, is tight, or does not fit."""
    if total_bytes > assumptions.limit_bytes(cluster):
        return "does not fit"
    return "fits" if total_bytes <= assumptions.safe_share * cluster.memory_bytes else "tight"


def _local(shape: "ModelShape", layout: Layout, stage: Stage) -> Count:
    """Parameters of a stage."""
    layer = layer_count(shape, layout)
    dense, expert = stage.layers * layer.dense_local, stage.layers * layer.expert_local
    dense += embedding_count(shape, layout).local if stage.index == 0 else 0
    dense += head_count(shape, layout).local if stage.index == layout.pipeline - 1 else 0
    return Count(stage.parameters, dense, expert)


def _causes(
    split: tuple[Stage, ...],
    layout: Layout,
    job: Job,
    compute: LayerSeconds,
    in_layer: list[Collective],
    head: float,
    layers: int,
) -> dict[str, float]:
    """The pipeline's seconds in a step, by what a GPU does in them on average over the stages, and why it waits."""
    p, m = layout.pipeline, job.micro_batches(layout)
    share = m / p
    causes = {
        "matrix products": share * (layers * compute.matrices + head),
        "attention": share * layers * compute.attention,
        "elementwise": share * layers * compute.elementwise,
        "recomputation": share * layers * compute.recomputed,
    }
    for one in in_layer:
        causes[f"{one.name} collectives"] = share * layers * one.exposed_seconds
    mean = sum(stage.seconds for stage in split) / p
    total = pipeline_seconds(split, micro_batches=m, virtual_stages=layout.virtual_stages)
    causes["bubble"] = (p - 1) * mean / layout.virtual_stages
    causes["unequal stages"] = total - m * mean - causes["bubble"]
    return causes
