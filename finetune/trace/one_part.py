"""A model that is one part by itself: what the processes see of it that hold shards of the same part.

Under fsdp2_tp, fsdp2_pp, fsdp2_tp_pp and cp_tp other processes have other parts. Here there are none, so that the step
can be traced for which ``distributed.part_shards`` has sharded this one. Example: of 16 processes, 8 for each layer,
two hold shards of a part. They are traced, with a group of one process in the place of each 8. Under cp_tp these two
compute each row together, and do so in the trace.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from finetune.distributed import Strategy
from finetune.distributed.held_parts import HeldParts
from finetune.trace.placement import ONE_PART


def with_one_part(strategy: Strategy) -> Strategy:
    """A launch of ``LAUNCHES_ONE_PART`` as one that shards its only part."""
    return replace(strategy, name=ONE_PART)


class OnePart(HeldParts):
    """All of a model, as the only part of it.

    Args:
        model: not prepared yet.
    """

    strategy = "tp"

    def settle(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Each is where it belongs."""
