"""Private names of DeepSpeed. Read in 0.19.8. DeepSpeed is optional, and imported only where a function needs it.

``zero`` is DeepSpeed's optimizer, ``engine.optimizer``; a partition is one of its ``fp32_partitioned_groups_flat``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def flat_mapping(parameter: Any) -> Any:
    """ZeRO-1 and ZeRO-2: where a parameter lies in this process's flat partition; None if it has no part of it.

    Goes when DeepSpeed says where, as ``safe_get_full_fp32_param`` gives what.
    """
    return parameter._hp_mapping


@contextmanager
def in_memory(zero: Any, number: int) -> Iterator[torch.Tensor]:
    """A partition of ZeRO-3 and its state: read from disk if it lies there, and written back at the end.

    Goes when DeepSpeed has a public context for it.
    """
    swapped = zero._swappable_optimizer_subgroup(number)
    if swapped:
        zero._optimizer_states_and_gradient_swap_in(number)
    try:
        yield zero.fp32_partitioned_groups_flat[number]
    finally:
        if swapped:
            zero._optimizer_states_and_gradient_swap_out(number)


def step_partition(zero: Any, number: int) -> None:
    """ZeRO-3: step the inner optimizer on one partition. Goes when state can be made without a step."""
    zero._optimizer_step(number)


def drop_gathered_weights(zero: Any) -> None:
    """ZeRO-3: free the weights that are gathered to compute with. Goes with a public function for it."""
    zero._partition_all_parameters()


def write_compute_weights(zero: Any, number: int) -> None:
    """ZeRO-3: round the masters of a partition to the weights that the model computes with. Goes when
    ``update_lp_params``, which does it in ZeRO-1 and ZeRO-2, is there too."""
    zero._reassign_or_swap_out_partitioned_parameters(number)


def restore_linear() -> None:
    """Undo what ZeRO-3 does to ``torch.nn.functional.linear``. Goes when the engine's ``destroy`` does it."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    torch.nn.functional.linear = getattr(
        InsertPostInitMethodToModuleSubClasses, "linear_bk", torch.nn.functional.linear
    )
