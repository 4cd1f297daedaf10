"""Memory of each GPU of a layout: what every layer, the embedding and the head add to the stage that has them.

Mixed precision as in Megatron-LM: for each parameter 2 bytes of weight, 4 of gradient (accumulated in fp32) and 12 of
optimizer state (fp32 weight and AdamW's two moments), 18 in all, or 6 + 12 / d with the optimizer sharded over d
replicas (Megatron Core's user guide, "Distributed Optimizer"). A tied head is a second copy where the last stage is
another than the first.
"""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from finetune.planner.paper.cluster import Assumptions
from finetune.planner.paper.layout import Job, Layout
from finetune.planner.paper.layout_layer import kept_bytes_per_token
from finetune.planner.pipeline_schedule import Stage

if TYPE_CHECKING:
    from finetune.planner.shape import ModelShape

WEIGHT_BYTES = 2
GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12


@dataclass(frozen=True)
class Count:
    """Parameters of a layer, of the embedding or of the head."""

    total: int
    dense_local: int
    """On one GPU, of those that every replica has."""
    expert_local: int
    """On one GPU, of the experts."""

    @property
    def local(self) -> int:
        return self.dense_local + self.expert_local


def layer_count(shape: "ModelShape", layout: Layout) -> Count:
    """Of one decoder layer; matrices are split, norms are not."""
    experts = sum(linear.parameters for linear in shape.linears if linear.copies > 1)
    dense = sum(linear.parameters for linear in shape.linears if linear.copies == 1)
    norms = shape.layer_parameters - experts - dense
    return Count(
        shape.layer_parameters,
        ceil(dense / layout.tensor) + norms,
        ceil(experts / (layout.tensor * layout.expert)),
    )


def embedding_count(shape: "ModelShape", layout: Layout) -> Count:
    """Of the input embedding, of which tensor parallel GPUs have a slice of the vocabulary each."""
    return Count(shape.embedding_parameters, ceil(shape.embedding_parameters / layout.tensor), 0)


def head_count(shape: "ModelShape", layout: Layout) -> Count:
    """Of the output head and the last norm."""
    copied = shape.embedding_parameters if shape.tied and layout.pipeline > 1 else 0
    local = ceil((shape.head_parameters + copied) / layout.tensor) + shape.final_norm
    return Count(shape.head_parameters + shape.final_norm, local, 0)


def optimizer_shards(layout: Layout) -> tuple[int, int]:
    """Replicas over which the optimizer state of dense parameters, and of experts, is split."""
    if not layout.shards_optimizer:
        return 1, 1
    replicas = layout.data * layout.context
    return replicas, replicas // layout.expert


def state_bytes(count: Count, layout: Layout) -> float:
    """Weights, gradients and optimizer state on one GPU."""
    dense, expert = optimizer_shards(layout)
    sharded = count.dense_local / dense + count.expert_local / expert
    return (WEIGHT_BYTES + GRADIENT_BYTES) * count.local + OPTIMIZER_BYTES * sharded


def held_bytes(shape: "ModelShape", layout: Layout, job: Job) -> float:
    """Of one layer and one micro-batch that is under way."""
    if job.activation_checkpointing == "full":
        parts = layout.tensor if layout.sequence_parallel else 1
        return 2.0 * shape.hidden * job.tokens(layout) / parts
    return _kept(shape, layout) * job.tokens(layout)


def once_bytes(shape: "ModelShape", layout: Layout, job: Job, assumptions: Assumptions) -> float:
    """Of the layer that is at work: its backward pass, and what it computed again."""
    again = _kept(shape, layout) if job.activation_checkpointing == "full" else 0.0
    return job.tokens(layout) * (again + assumptions.backward_bytes * shape.hidden / layout.tensor)


def logit_bytes(shape: "ModelShape", layout: Layout, job: Job, assumptions: Assumptions) -> float:
    """Of the last stage, for the one micro-batch whose loss it computes."""
    return assumptions.logit_bytes * job.tokens(layout) * shape.vocabulary / layout.tensor


def _kept(shape: "ModelShape", layout: Layout) -> float:
    return kept_bytes_per_token(shape, tensor=layout.tensor, sequence_parallel=layout.sequence_parallel)


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on a GPU of one stage at its peak."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    """The layer that is at work."""
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.working + self.logits


def memory(shape: "ModelShape", layout: Layout, job: Job, stage: Stage, assumptions: Assumptions) -> GpuMemory:
    """Of one stage, split by what it is for. Its total is the stage's own."""
    ends = [embedding_count(shape, layout)] if stage.index == 0 else []
    ends += [head_count(shape, layout)] if stage.index == layout.pipeline - 1 else []
    local = stage.layers * layer_count(shape, layout).local + sum(end.local for end in ends)
    weights, gradients = float(WEIGHT_BYTES * local), float(GRADIENT_BYTES * local)
    last = stage.index == layout.pipeline - 1
    logits = logit_bytes(shape, layout, job, assumptions) if last else 0.0
    return GpuMemory(
        stage=stage.index,
        weights=weights,
        gradients=gradients,
        optimizer=stage.state_bytes - weights - gradients,
        activations=stage.held_bytes,
        working=stage.once_bytes - logits,
        logits=logits,
    )
