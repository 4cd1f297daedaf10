"""What the processes of a strategy send one another, and what travels between a GPU, its host and a disk.

Bytes are those that one GPU sends in an optimizer step, by ring: an all-reduce of B bytes over n processes is
``2 (n - 1) / n B``, an all-gather or a reduce-scatter half of it (Rajbhandari et al., arXiv:1910.02054, section 7).
Seconds are ``bytes / bandwidth + hops * latency``; across machines the ring is as fast as the slower of the link
inside and all adapters of a machine together.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from finetune.hardware.cards import Machines
from finetune.planner.matrices import in_16_bits
from finetune.planner.rates import Rates
from finetune.planner.work import Work
from finetune.trace.placement import Placement
from finetune.trace.setting import Setting
from finetune.units import MIB

BUCKET_BYTES = 25 * MIB
"""PyTorch reduces the gradients of replicated weights in portions of this size."""

When = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Transfer:
    """One kind of traffic, summed over an optimizer step."""

    what: str
    when: When
    """Beside which computation; a step's stands alone."""
    bytes: float
    """That one GPU sends, or exchanges with its host or disk."""
    calls: int
    seconds: float
    """All of them, one after the other."""
    overlaps: bool
    """Runs beside the computation, but for its first or last call."""
    is_collective: bool = True

    @property
    def seconds_of_one(self) -> float:
        return self.seconds / self.calls


def transfers(
    layers: int, setting: Setting, placement: Placement, machines: Machines, work: Work, rates: Rates
) -> tuple[Transfer, ...]:
    """All traffic of an optimizer step.

    Args:
        layers: decoder layers; embedding, head and final norm are gathered as one more.
    """
    found = _collectives(layers, setting, placement, machines, work)
    return tuple(each for each in found + _offload(layers, setting, placement, machines, work, rates) if each.bytes)


def _collectives(layers: int, setting: Setting, placement: Placement, machines: Machines, work: Work) -> list[Transfer]:
    gradients = placement.gradient_bytes * work.trained
    shards, replicas, units = placement.weight_shards, placement.replicas, layers + 1
    micro = setting.accumulation

    def collective(
        what: str, when: When, size: float, members: int, *, times: int, calls: int, overlaps: bool, stride: int = 1
    ) -> Transfer:
        both_ways = 2 if what.startswith("all-reduce") else 1
        sent = both_ways * (members - 1) / members * size * times
        gb_per_second, latency = _route(machines, members, stride)
        seconds = sent / (gb_per_second * 1e9) + both_ways * latency * calls * times
        return Transfer(what, when, sent, calls * times, seconds, overlaps)

    if shards > 1:
        by_unit = partial(collective, times=micro, calls=units, overlaps=True)
        weights = work.gathered_bytes
        return [
            by_unit("all-gather of weights for the forward pass", "forward", weights, shards),
            by_unit("all-gather of weights for the backward pass", "backward", weights, shards),
            by_unit("reduce-scatter of gradients", "backward", gradients, shards),
            by_unit(
                "all-reduce of gradients between replicas", "backward", gradients / shards, replicas, stride=shards
            ),
        ]
    if placement.optimizer_shards > 1:
        processes, updated = placement.optimizer_shards, (2 if in_16_bits(setting) else 4) * work.trained
        times = micro if placement.averages_each_micro_batch else 1
        # DeepSpeed 0.19 reduces beside the computation in stage 3 alone (runtime/zero/config.py, overlap_comm_valid)
        return [
            collective(
                "reduce-scatter of gradients",
                "backward",
                gradients,
                processes,
                times=times,
                calls=units,
                overlaps=False,
            ),
            collective("all-gather of updated weights", "step", updated, processes, times=1, calls=1, overlaps=False),
        ]
    buckets = math.ceil(gradients / BUCKET_BYTES)
    return [
        collective(
            "all-reduce of gradients", "backward", gradients, replicas, times=1, calls=max(1, buckets), overlaps=True
        )
    ]


def _route(machines: Machines, members: int, stride: int) -> tuple[float, float]:
    """GB/s of one GPU in a ring, and seconds of its hops.

    Args:
        stride: distance of the members' ranks; beyond 1, as many rings run beside one another.
    """
    gpus, inside, network = machines.gpus_per_node, machines.gpu.node_link, machines.gpu.network
    if members * stride <= gpus:
        return inside.gb_per_second, (members - 1) * inside.microseconds * 1e-6
    out = network.of_machine(gpus)
    if stride > 1:
        return min(inside.gb_per_second, out / min(stride, gpus)), (members - 1) * network.microseconds * 1e-6
    across = math.ceil(members / gpus)
    hops = (members - across) * inside.microseconds + (across - 1) * network.microseconds
    return min(inside.gb_per_second, out) if gpus > 1 else out, hops * 1e-6


def _offload(
    layers: int, setting: Setting, placement: Placement, machines: Machines, work: Work, rates: Rates
) -> list[Transfer]:
    """Weights come twice in a micro-batch, gradients go once; an optimizer on disk comes and goes once a step."""
    shards, micro, units = placement.weight_shards, setting.accumulation, layers + 1
    host = machines.gpu.host_link.gb_per_second * 1e9
    disk = min(host, rates.disk_gb_per_second * 1e9 / machines.gpus_per_node)
    found = []

    def travels(what: str, when: When, size: float, *, times: int, through: float, overlaps: bool = True) -> None:
        sent = size * times
        found.append(Transfer(what, when, sent, units * times, sent / through, overlaps, is_collective=False))

    if placement.weights_on != "gpu":
        # FSDP2 brings fp32 shards to the GPU and casts them there
        masters = placement.framework == "fully_shard" and setting.weights == "fp32_master" and in_16_bits(setting)
        weights = (work.gathered_bytes + (2 * work.trained if masters else 0)) / shards
        through = disk if placement.weights_on == "disk" else host
        travels("weights to the GPU for the forward pass", "forward", weights, times=micro, through=through)
        travels("weights to the GPU for the backward pass", "backward", weights, times=micro, through=through)
    if placement.optimizer_on != "gpu":
        gradients = placement.gradient_bytes * work.trained / placement.optimizer_shards
        travels("gradients to the host", "backward", gradients, times=micro, through=host)
    if placement.optimizer_on == "disk":
        state = 2 * 12 * work.trained / placement.optimizer_shards  # master and both moments of AdamW, read and written
        travels("optimizer state from and to disk", "step", state, times=1, through=disk, overlaps=False)
    return found
