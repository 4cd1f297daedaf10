"""What the processes of a strategy send one another, and what travels between a GPU, its host and a disk.

The collectives are those of the traced step; ``part_traffic`` adds those of GPUs that have parts of the model. Bytes
are those that one GPU sends in an optimizer step, by ring: an all-reduce of B bytes over n processes is ``2 (n - 1) / n
B``, an all-gather or a reduce-scatter half of it (Rajbhandari et al., arXiv:1910.02054, section 7). Seconds are ``bytes
/ bandwidth + hops * latency``; across machines the ring is as fast as the slower of the link inside and all adapters of
a machine together.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from finetune.hardware.cards import Machines
from finetune.hardware.rates import Rates
from finetune.planner.pipelines import is_gather
from finetune.trace.powers import CONSTANT
from finetune.trace.setting import Setting
from finetune.trace.shallow import HOST_COPY, Sent, Step
from finetune.units import MIB

When = Literal["forward", "backward", "step"]
NAMES = {
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
}
"""Of collectives, by what PyTorch's names of them contain."""

BUCKET_BYTES = 25 * MIB
"""Gradients that replicas reduce at a time from the second step on (PyTorch's ``bucket_cap_mb``); a trace sees the
first."""


@dataclass(frozen=True)
class Transfer:
    """One kind of traffic, summed over an optimizer step."""

    what: str
    when: When
    """Beside which computation; a step's stands alone."""
    bytes: float
    """That one GPU sends, or exchanges with its host or disk."""
    calls: float
    seconds: float
    """All of them, one after the other."""
    overlaps: bool
    """Runs beside the computation, but for its first or last call."""
    is_collective: bool = True

    @property
    def seconds_of_one(self) -> float:
        return self.seconds / self.calls


def transfers(step: Step, setting: Setting, machines: Machines, rates: Rates) -> tuple[Transfer, ...]:
    """All traffic of an optimizer step."""
    every = (
        *collectives(step.sent if setting.world_size > 1 else (), step, setting, machines),
        *_offload(step, setting, machines, rates),
        *offloaded_activations(step, setting, machines),
    )
    return tuple(each for each in every if each.bytes)


def collectives(every: Iterable[Sent], step: Step, setting: Setting, machines: Machines) -> list[Transfer]:
    """Traced ones, those of a kind together."""
    found: dict[str, Transfer] = {}
    for each in every:
        if each.name == HOST_COPY:
            continue
        one = _collective(each, step, setting, machines)
        if known := found.get(one.what):
            calls, seconds = known.calls + one.calls, known.seconds + one.seconds
            one = replace(one, bytes=known.bytes + one.bytes, calls=calls, seconds=seconds)
        found[one.what] = one
    return list(found.values())


def _collective(sent: Sent, step: Step, setting: Setting, machines: Machines) -> Transfer:
    placement, traced = setting.placement, step.micro_batches
    what = next((name for part, name in NAMES.items() if part in sent.name), sent.name)
    members, both_ways = max(1, sent.members), 2 if what == "all-reduce" else 1
    when: When = "backward" if sent.phase == "backward" else "step" if sent.phase == "step" else "forward"
    is_of_rows, is_exchange = any(power != CONSTANT for power in sent.bytes), what == "all-to-all"
    repeats = when != "step" and (placement.communicates_each_micro_batch or is_of_rows or is_exchange)
    times = setting.accumulation / traced if repeats else 1.0
    times *= setting.forward_passes if when == "forward" else 1
    # Only the replicas of shards or experts reduce so; as many neighbours may gather weights, or, where these split
    # layers, those in the same place of each group
    replicas = placement.replicas // setting.experts
    is_of_replicas = what == "all-reduce" and members == replicas != setting.world_size
    stride = setting.world_size // replicas if is_of_replicas else setting.tensor
    gb_per_second, latency = route(machines, members, stride)
    calls = sent.calls * times
    size = step.micro_batch(setting.micro_batch_size, setting.own_row_tokens).value(sent.bytes)
    what += " of rows" if is_of_rows else " of counts" if is_exchange else ""
    moved = both_ways * (members - 1) / members * size * calls
    if placement.framework == "replicated":
        calls = max(calls, calls * size / BUCKET_BYTES)
    return Transfer(
        what=f"{what} in the {sent.phase} {'pass' if when != 'step' else ''}".rstrip(),
        when=when,
        bytes=moved,
        calls=calls,
        seconds=moved / (gb_per_second * 1e9) + both_ways * latency * calls,
        overlaps=placement.overlaps and not is_of_rows,
    )


def route(machines: Machines, members: int, stride: int) -> tuple[float, float]:
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


def _offload(step: Step, setting: Setting, machines: Machines, rates: Rates) -> list[Transfer]:
    """Weights come twice in a micro-batch, gradients go once; an optimizer on disk comes and goes once a step."""
    placement, micro, units = setting.placement, setting.accumulation, step.layers + 1
    host = machines.gpu.host_link.gb_per_second * 1e9
    disk = min(host, rates.disk_gb_per_second * 1e9 / machines.gpus_per_node)
    trained = sum(count * math.prod(shape) for shape, count in step.trained().items())
    gathers = [each for each in step.sent if is_gather(each) and each.phase == "forward"]
    gathered = sum(each.calls * each.bytes.get(CONSTANT, 0.0) for each in gathers) / step.micro_batches
    found = []

    def travels(what: str, when: When, size: float, *, times: int, through: float, overlaps: bool = True) -> None:
        sent = size * times
        found.append(Transfer(what, when, sent, units * times, sent / through, overlaps, is_collective=False))

    if placement.weights_on != "gpu":
        # FSDP2 brings fp32 shards to the GPU and casts them there
        masters = placement.framework == "fully_shard" and setting.weights == "fp32_master"
        weights = (gathered + (2 * trained if masters else 0)) / placement.weight_shards
        through = disk if placement.weights_on == "disk" else host
        passes = micro * setting.forward_passes
        travels("weights to the GPU for the forward pass", "forward", weights, times=passes, through=through)
        travels("weights to the GPU for the backward pass", "backward", weights, times=micro, through=through)
    if placement.optimizer_on != "gpu":
        gradients = 4 * trained / placement.optimizer_shards  # reduced in fp32 under every strategy
        travels("gradients to the host", "backward", gradients, times=micro, through=host)
    if placement.optimizer_on == "disk":
        state = 2 * 12 * trained / placement.optimizer_shards  # master and both moments of AdamW, read and written
        travels("optimizer state from and to disk", "step", state, times=1, through=disk, overlaps=False)
    return found


def offloaded_activations(step: Step, setting: Setting, machines: Machines, *, share: float = 1.0) -> list[Transfer]:
    """What recomputed layers keep, which leaves in the forward pass and comes back in the backward pass.

    Args:
        share: of the model's layers that one GPU has.
    """
    times = setting.accumulation / step.micro_batches * share
    micro_batch = step.micro_batch(setting.micro_batch_size, setting.own_row_tokens)
    through = machines.gpu.host_link.gb_per_second * 1e9
    found = []
    ways: dict[When, str] = {"forward": "to", "backward": "from"}
    for when, way in ways.items():
        copied = [each for each in step.sent if (each.name, each.phase) == (HOST_COPY, when)]
        size = times * sum(each.calls * micro_batch.value(each.bytes) for each in copied)
        layers = times * max((each.calls for each in copied), default=0.0)  # each of which copies several tensors
        what = f"activations {way} the host"
        found.append(Transfer(what, when, size, layers, size / through, overlaps=True, is_collective=False))
    return [each for each in found if each.bytes]
