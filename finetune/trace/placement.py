"""What each strategy splits over its processes, where it lies, and when it travels: the planner's table of strategies.

Read off ``accelerate_configs/*.yaml`` and ``distributed/``; ``tests/test_plan_sharded.py`` holds it against what
real processes hold.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from finetune.config.strategy_names import IN_PARTS, SHARDED_PARTS, STAGES, TENSOR, TOGETHER, Size

REPLICAS = 2
"""Copies of the sharded model under hsdp."""
SPLITS = (2, 4, 8)
"""Numbers of GPUs that may share each row, each layer or its experts, inside a machine."""
ONE_PART = "fsdp2_tp"
"""Strategy of the trace of one part of a model by itself, whatever it is a part of."""
LAUNCHES_ONE_PART = "ddp"
"""Strategy file by which the processes are launched that shard it: those of parts take at least two of them."""
DOES_TOGETHER = {
    "context": "has each row computed by {} GPUs",
    "stages": "has {} stages, each on GPUs of its own",
    "tensor": "splits each layer over {} GPUs",
    "experts": "has the experts of each layer shared by {} GPUs",
}
"""What so many GPUs do, by the field of a strategy's size."""
Place = Literal["gpu", "host", "disk"]


@dataclass(frozen=True)
class Placement:
    """Properties of a strategy on a number of processes."""

    weight_shards: int
    """Processes over which the weights are split; 1: whole on every GPU."""
    gradient_shards: int
    optimizer_shards: int
    """Over which optimizer state and master weights are split."""
    replicas: int
    """Copies of what is split."""
    framework: Literal["plain", "in_parts", "replicated", "fully_shard", "zero"]
    """Whose buffers are allocated: none, none where each process has a part of the model's own parameters,
    DistributedDataParallel, FSDP2, DeepSpeed."""
    zero_stage: int = 0
    weights_on: Place = "gpu"
    """Of the sharded weights between the layers' uses."""
    optimizer_on: Place = "gpu"

    @property
    def communicates_each_micro_batch(self) -> bool:
        """Weights are gathered and gradients reduced with every micro-batch; else gradients once a step."""
        return self.framework == "fully_shard" or self.zero_stage >= 2

    @property
    def overlaps(self) -> bool:
        """Weights and gradients travel beside the computation. DeepSpeed 0.19 reduces so in stage 3 alone
        (runtime/zero/config.py, overlap_comm_valid); where the model is in parts, gradients wait for the last of
        them."""
        return self.framework in ("replicated", "fully_shard") or self.zero_stage == 3

    @property
    def reach(self) -> int:
        """Layers from an end within which spans of the step differ from those in the middle: ZeRO-3 holds two layers
        gathered (``distributed.setup``)."""
        return 2 if self.zero_stage == 3 else 1


def placement_of(strategy: str, world_size: int, parts: int = 1) -> Placement:
    """The placement of a strategy file on so many processes.

    Args:
        parts: into which the model is divided where these are sharded, each on processes of its own.
    """
    n = world_size
    shards, of_part = n // REPLICAS, n // parts
    return {
        "single": Placement(1, 1, 1, 1, "plain"),
        "ddp": Placement(1, 1, 1, n, "replicated"),
        "fsdp2": Placement(n, n, n, 1, "fully_shard"),
        "fsdp2_offload": Placement(n, n, n, 1, "fully_shard", weights_on="host", optimizer_on="host"),
        "hsdp": Placement(shards, shards, shards, REPLICAS, "fully_shard"),
        "zero1": Placement(1, 1, n, 1, "zero", 1),
        "zero2": Placement(1, n, n, 1, "zero", 2),
        "zero3": Placement(n, n, n, 1, "zero", 3),
        "zero3_offload": Placement(n, n, n, 1, "zero", 3, weights_on="host", optimizer_on="host"),
        "zero3_nvme": Placement(n, n, n, 1, "zero", 3, weights_on="disk", optimizer_on="disk"),
        # of a part: into how many is the setting's to say
        **dict.fromkeys(IN_PARTS, Placement(1, 1, 1, n, "in_parts")),
        **dict.fromkeys(TOGETHER, Placement(n, n, n, 1, "fully_shard")),
        **dict.fromkeys(SHARDED_PARTS, Placement(of_part, of_part, of_part, 1, "fully_shard")),
    }[strategy]


def traced_as(strategy: str, world_size: int, parts: int = 1) -> tuple[str, int]:
    """The strategy that is traced in place of another, and its processes.

    A stage's step follows from that of the whole model on one GPU (``planner.pipelines``), and that of a part of each
    layer is the step of a smaller model (``trace.tensor_parts``). Where parts are sharded, only the processes that have
    the same one are traced (``trace.one_part``).

    ZeRO's engine cannot be traced with its offload, because without a GPU it puts everything into host memory. What it
    gathers of other processes it fetches from the host then, also where there is one process alone.

    Args:
        parts: as ``placement_of`` takes them.
    """
    if strategy in SHARDED_PARTS.values():
        return ("single", 1)
    if strategy in SHARDED_PARTS:
        return (strategy, world_size // parts)
    return ("zero3", max(2, world_size)) if strategy.startswith("zero3_") else (strategy, world_size)


def world_sizes_problem(strategy: str, world_size: int, sizes: Mapping[Size, int]) -> str | None:
    """Why a strategy cannot run on so many GPUs, as a sentence; None if it can.

    Args:
        sizes: how many GPUs do together each thing that the strategy is for.
    """
    together = math.prod(sizes.values())
    least = {size: max(2, number) for size, number in sizes.items()}
    fewest = 2 * math.prod(number for size, number in least.items() if size in (TENSOR, STAGES))
    if strategy in SHARDED_PARTS and world_size < fewest:
        return f"{strategy} shards each part over the GPUs that have the same one; use at least {fewest} of them."
    if 1 in sizes.values() or world_size % together:
        what = " and ".join(DOES_TOGETHER[size.field].format(number) for size, number in least.items())
        return f"{strategy} {what}; use a multiple of {math.prod(least.values())} GPUs."
    if strategy == "single" and world_size > 1:
        return "single is for one GPU; use ddp, or a strategy that shards."
    if strategy == "hsdp" and (world_size < 2 * REPLICAS or world_size % REPLICAS):
        return f"hsdp keeps {REPLICAS} replicas over at least 2 GPUs each; use an even number of them, at least 4."
    return None
