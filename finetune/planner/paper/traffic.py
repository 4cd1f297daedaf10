"""What travels between the GPUs of a layout in one optimizer step: which collective, how often, how much, how long.

Rings: an all-reduce of n bytes over g GPUs sends 2 (g - 1) / g n from each, an all-gather or a reduce-scatter half of
it; seconds are bytes over bandwidth, and a latency for each of the ring's g - 1 steps. A ring whose members stand k to
a machine crosses machines through k network cards at once; what one GPU sends to one other has the card of its own.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetune.planner.paper.cluster import Assumptions, Cluster
from finetune.planner.paper.layout import Job, Layout
from finetune.planner.paper.layout_memory import GRADIENT_BYTES, WEIGHT_BYTES, Count

if TYPE_CHECKING:
    from finetune.planner.shape import ModelShape

ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Link:
    """The slowest way inside a group of GPUs."""

    name: str
    """node or network."""
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Collective:
    """One kind of communication, summed over what a GPU does of it."""

    name: str
    what: str
    """all-reduce, all-gather and reduce-scatter, send and receive, ring, or all-to-all."""
    group: int
    link: str
    count: float
    bytes_per_gpu: float
    """Sent by one GPU."""
    seconds: float
    """If nothing ran beside it."""
    exposed_seconds: float
    """That computation waits."""

    def times(self, factor: float) -> "Collective":
        """So many of it, one after the other."""
        return replace(
            self,
            count=self.count * factor,
            bytes_per_gpu=self.bytes_per_gpu * factor,
            seconds=self.seconds * factor,
            exposed_seconds=self.exposed_seconds * factor,
        )


def link(stride: int, size: int, cluster: Cluster, *, ring: bool) -> Link:
    """Between ``size`` GPUs whose ranks are ``stride`` apart; ``ring``: through several cards of a machine at once."""
    if cluster.nodes == 1 or cluster.gpus_per_node % (stride * size) == 0:
        return Link("node", cluster.node_gb_per_second * 1e9, cluster.node_latency_seconds)
    together = max(1, min(size, cluster.gpus_per_node // stride)) if ring else 1
    gb_per_second = min(cluster.node_gb_per_second, together * cluster.network_gb_per_second)
    return Link("network", gb_per_second * 1e9, cluster.network_latency_seconds)


def layer_collectives(
    shape: "ModelShape",
    layout: Layout,
    job: Job,
    cluster: Cluster,
    *,
    attention_seconds: float,
) -> list[Collective]:
    """Of one layer and one micro-batch.

    Tensor: two all-reduces forward and two backward, or as many pairs of all-gather and reduce-scatter, the same bytes
    (arXiv:2205.05198, section 4.2.2), and the forward ones again where activations are recomputed. Context: keys and
    values go round forward, they and their gradients backward, beside attention. Expert: tokens are dealt out and
    collected, forward and backward.

    Args:
        attention_seconds: of the layer, beside which the ring of context parallelism runs.
    """
    found = []
    t, c, e = layout.tensor, layout.context, layout.expert
    activations = ACTIVATION_BYTES * shape.hidden * job.tokens(layout)
    if t > 1:
        passes = 3 if job.activation_checkpointing == "full" else 2
        way = link(1, t, cluster, ring=True)
        sent = 2 * passes * 2 * (t - 1) / t * activations
        seconds = sent / way.bytes_per_second + 2 * passes * 2 * (t - 1) * way.latency_seconds
        what = "all-gather and reduce-scatter" if layout.sequence_parallel else "all-reduce"
        found.append(Collective("tensor", what, t, way.name, 2 * passes, sent, seconds, seconds))
    if c > 1:
        way = link(t, c, cluster, ring=False)
        block = 2 * ACTIVATION_BYTES * shape.kv / t * job.tokens(layout)
        sent = 3 * (c - 1) * block
        seconds = sent / way.bytes_per_second + 3 * (c - 1) * way.latency_seconds
        exposed = max(0.0, seconds - attention_seconds)
        found.append(Collective("context", "ring", c, way.name, 3 * (c - 1), sent, seconds, exposed))
    if e > 1:
        way = link(t, e, cluster, ring=False)
        passes = 6 if job.activation_checkpointing == "full" else 4
        dealt = activations * shape.experts_per_token / (t if layout.sequence_parallel else 1)
        sent = passes * (e - 1) / e * dealt
        seconds = sent / way.bytes_per_second + passes * (e - 1) * way.latency_seconds
        found.append(Collective("expert", "all-to-all", e, way.name, passes, sent, seconds, seconds))
    return found


def pipeline_sends(shape: "ModelShape", layout: Layout, job: Job, cluster: Cluster) -> list[Collective]:
    """Of a step: activations to the next stage and their gradients back, for each micro-batch and chunk.

    Exposed throughout without virtual stages; with them Megatron-LM sends beside computation, but while the pipeline
    fills and drains.
    """
    p = layout.pipeline
    if p == 1:
        return []
    way = link(layout.tensor * layout.context * layout.data, p, cluster, ring=False)
    parts = layout.tensor if layout.sequence_parallel else 1
    bytes_once = ACTIVATION_BYTES * shape.hidden * job.tokens(layout) / parts
    seconds_once = bytes_once / way.bytes_per_second + way.latency_seconds
    micro_batches = job.micro_batches(layout)
    count = 2 * micro_batches * layout.virtual_stages
    ramp = 2 * (p - 1)
    exposed = (2 * micro_batches + ramp if layout.virtual_stages == 1 else ramp) * seconds_once
    name = "send and receive"
    return [Collective("pipeline", name, p, way.name, count, count * bytes_once, count * seconds_once, exposed)]


def gradient_collectives(
    layout: Layout,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    count: Count,
    tied_parameters: int,
    backward_seconds: float,
) -> list[Collective]:
    """Of a step: gradients in fp32 over the replicas, with a sharded optimizer 16-bit weights back.

    Args:
        count: parameters of the stage.
        tied_parameters: of a table that the first and the last stage both have, on one GPU.
        backward_seconds: of one micro-batch in the stage, beside which gradients may travel.
    """
    found = []
    t, e = layout.tensor, layout.expert
    replicas = layout.data * layout.context
    groups = (("data", t, replicas, count.dense_local), ("data, experts", t * e, replicas // e, count.expert_local))
    for name, stride, size, parameters in groups:
        if size > 1 and parameters:
            way = link(stride, size, cluster, ring=True)
            for_each = GRADIENT_BYTES + (WEIGHT_BYTES if layout.shards_optimizer else GRADIENT_BYTES)
            sent = (size - 1) / size * for_each * parameters
            seconds = sent / way.bytes_per_second + 2 * (size - 1) * way.latency_seconds
            exposed = max(0.0, seconds - backward_seconds) if assumptions.overlaps_gradients else seconds
            what = "reduce-scatter and all-gather" if layout.shards_optimizer else "all-reduce"
            found.append(Collective(name, what, size, way.name, 1, sent, seconds, exposed))
    if tied_parameters and layout.pipeline > 1:
        way = link(layout.tensor * replicas, layout.pipeline, cluster, ring=False)
        sent = float(GRADIENT_BYTES * tied_parameters)
        seconds = sent / way.bytes_per_second + way.latency_seconds
        found.append(Collective("tied embedding", "all-reduce", 2, way.name, 1, sent, seconds, seconds))
    return found
