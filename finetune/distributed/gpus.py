"""The GPUs of a launch, for the planner."""

import os
from typing import Any

import torch

from finetune.distributed.strategy import Strategy
from finetune.hardware.cards import Gpu, Machines, lookup


def card_of(properties: Any) -> Gpu:
    """The card whose ``torch.cuda.get_device_properties`` these are."""
    capability = None if torch.version.hip else (properties.major, properties.minor)
    return lookup(properties.name, properties.total_memory, capability)


def machines_of(strategy: Strategy) -> Machines | None:
    """The machines of a launch, assumed to be like this one; None in a rehearsal without a GPU."""
    if strategy.rehearsal:
        return None
    properties = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", strategy.world_size))
    gpu = card_of(properties)
    if strategy.world_size % processes:  # machines of different sizes: as if every GPU stood alone
        return Machines(gpu, 1, strategy.world_size)
    return Machines(gpu, processes, strategy.world_size // processes)
