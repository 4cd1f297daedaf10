"""What each strategy splits over its processes, where it lies, and when it travels: the planner's table of strategies.

Read off ``accelerate_configs/*.yaml`` and ``distributed/``; ``tests/test_plan_sharded.py`` holds it against what
real processes hold.
"""

from dataclasses import dataclass
from typing import Literal

from finetune.config.compatibility import IN_PARTS, STRATEGIES, TOGETHER

REPLICAS = 2
"""Copies of the sharded model under hsdp."""
PLANNED = tuple(strategy for strategy in STRATEGIES if strategy != "ep")
"""Strategies that the planner knows. How many tokens the GPUs of ep get is for routers to say."""
SPLITS = (2, 4, 8)
"""Numbers of GPUs that may split each layer, inside a machine."""
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
    framework: Literal["plain", "replicated", "fully_shard", "zero"]
    """Whose buffers are allocated: none, DistributedDataParallel, FSDP2, DeepSpeed."""
    zero_stage: int = 0
    weights_on: Place = "gpu"
    """Of the sharded weights between the layers' uses."""
    optimizer_on: Place = "gpu"

    @property
    def communicates_each_micro_batch(self) -> bool:
        """Weights are gathered and gradients reduced with every micro-batch; else gradients once a step."""
        return self.framework == "fully_shard" or self.zero_stage >= 2

    @property
    def reach(self) -> int:
        """Layers from an end within which spans of the step differ from those in the middle: ZeRO-3 holds two layers
        gathered (``distributed.setup``)."""
        return 2 if self.zero_stage == 3 else 1


def placement_of(strategy: str, world_size: int) -> Placement:
    """The placement of a strategy file on so many processes.

    Raises:
        KeyError: for a strategy that is none of ``PLANNED``.
    """
    n = world_size
    shards = n // REPLICAS
    return {
        "single": Placement(1, 1, 1, 1, "plain"),
        "ddp": Placement(1, 1, 1, n, "replicated"),
        "pp": Placement(1, 1, 1, n, "replicated"),  # of a stage: how many there are is the setting's to say
        "tp": Placement(1, 1, 1, n, "replicated"),  # of a part of each layer, likewise
        "fsdp2": Placement(n, n, n, 1, "fully_shard"),
        "fsdp2_offload": Placement(n, n, n, 1, "fully_shard", weights_on="host", optimizer_on="host"),
        "hsdp": Placement(shards, shards, shards, REPLICAS, "fully_shard"),
        "zero1": Placement(1, 1, n, 1, "zero", 1),
        "zero2": Placement(1, n, n, 1, "zero", 2),
        "zero3": Placement(n, n, n, 1, "zero", 3),
        "zero3_offload": Placement(n, n, n, 1, "zero", 3, weights_on="host", optimizer_on="host"),
        "zero3_nvme": Placement(n, n, n, 1, "zero", 3, weights_on="disk", optimizer_on="disk"),
        **dict.fromkeys(TOGETHER, Placement(n, n, n, 1, "fully_shard")),
    }[strategy]


def traced_as(strategy: str, world_size: int) -> tuple[str, int]:
    """The strategy that is traced in place of another, and its processes.

    A stage's step follows from that of the whole model on one GPU (``planner.pipelines``), and that of a part of each
    layer is the step of a smaller model (``trace.tensor_parts``).

    ZeRO's engine cannot be traced with its offload, because without a GPU it puts everything into host memory. What it
    gathers of other processes it fetches from the host then, also where there is one process alone.
    """
    if strategy in IN_PARTS:
        return ("single", 1)
    return ("zero3", max(2, world_size)) if strategy.startswith("zero3_") else (strategy, world_size)


def world_sizes_problem(
    strategy: str, world_size: int, context: int = 1, stages: int = 1, tensor: int = 1
) -> str | None:
    """Why a strategy cannot run on so many GPUs, as a sentence; None if it can.

    Args:
        context: GPUs that compute each row together.
        stages: of a pipeline.
        tensor: GPUs that split each layer.
    """
    if strategy == "tp" and (tensor == 1 or world_size % tensor):
        return f"tp splits each layer over {max(2, tensor)} GPUs; take a multiple of them."
    if strategy == "pp" and (stages == 1 or world_size % stages):
        return f"pp has {max(2, stages)} stages, each on GPUs of its own; take a multiple of {max(2, stages)} GPUs."
    if strategy in TOGETHER and (context == 1 or world_size % context):
        return f"{strategy} has each row computed by {max(2, context)} GPUs; take a multiple of them."
    if strategy == "single" and world_size > 1:
        return "single is for one GPU; take ddp, or a strategy that shards."
    if strategy == "hsdp" and (world_size < 2 * REPLICAS or world_size % REPLICAS):
        return f"hsdp keeps {REPLICAS} replicas over at least 2 GPUs each; take a multiple of 2 from 4 on."
    return None
