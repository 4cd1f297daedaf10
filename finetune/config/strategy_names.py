"""Strategies by name: which there are, what each has in common with others, and the sizes that it is launched with."""

from collections.abc import Iterable
from typing import NamedTuple

STRATEGIES = (
    "single",
    "ddp",
    "fsdp2",
    "fsdp2_offload",
    "hsdp",
    "zero1",
    "zero2",
    "zero3",
    "zero3_offload",
    "zero3_nvme",
    "cp",
    "ulysses",
    "pp",
    "tp",
    "ep",
    "tp_pp",
    "fsdp2_tp",
    "fsdp2_pp",
    "fsdp2_tp_pp",
    "cp_tp",
)
TOGETHER = {"cp": "fsdp2", "ulysses": "fsdp2", "cp_tp": "fsdp2_tp"}
"""Strategies under which several processes compute each row together, and what each of them is but for that."""
IN_PARTS = ("pp", "tp", "ep", "tp_pp")
"""Strategies under which each process has a part of the model's own parameters. Accelerate's keys for them, and for
their shards, are those of Megatron-LM."""
SHARDED_PARTS = {"fsdp2_tp": "tp", "fsdp2_pp": "pp", "fsdp2_tp_pp": "tp_pp", "cp_tp": "tp"}
"""Strategies under which such parts are sharded over the processes that would hold the same one, and the one that has
them whole."""


class Size(NamedTuple):
    """How many processes do together what a strategy is for."""

    field: str
    """Of ``distributed.Strategy``, and of ``trace.Setting`` for those that the planner knows."""
    key: str
    """Of the launch file. In capitals, the name of the environment variable that ``accelerate launch`` makes of it."""
    what: str
    """In words."""


ROW = "GPUs for each row"
TENSOR = Size("tensor", "megatron_lm_tp_degree", "GPUs for each layer")
STAGES = Size("stages", "megatron_lm_pp_degree", "stages")
EXPERTS = Size("experts", "megatron_lm_expert_model_parallel_size", "GPUs for the experts of each layer")
SIZES = {
    "cp": (Size("context", "parallelism_config_cp_size", ROW),),
    "ulysses": (Size("context", "parallelism_config_sp_size", ROW),),
    "pp": (STAGES,),
    "tp": (TENSOR,),
    "ep": (EXPERTS,),
    "tp_pp": (TENSOR, STAGES),
    "fsdp2_tp": (TENSOR,),
    "fsdp2_pp": (STAGES,),
    "fsdp2_tp_pp": (TENSOR, STAGES),
    "cp_tp": (Size("context", "megatron_lm_context_parallel_size", ROW), TENSOR),
}
"""Of the strategies that have one, or several."""
SWAPPED_TOGETHER = 100_000_000
"""Weights of a process that zero3_nvme reads from disk, steps and writes back at a time, with their state."""


def in_parts(sizes: Iterable[Size]) -> str | None:
    """The strategy under which each process has a part of the model's own parameters, by the sizes that it has; None
    where there is no such one."""
    return next((name for name in IN_PARTS if set(SIZES[name]) == set(sizes)), None)


def sharded_as(strategy: str) -> str | None:
    """The strategy that shards the parts of another, and does nothing else; None where there is none."""
    return next((name for name, whole in SHARDED_PARTS.items() if whole == strategy and name not in TOGETHER), None)


def whole_layers(strategy: str) -> str:
    """The nearest strategy that shards layers, and splits none."""
    return "cp" if strategy in TOGETHER else "fsdp2"


def splits_layers(strategy: str) -> bool:
    """Whether several processes have a part of each layer."""
    return TENSOR in SIZES.get(strategy, ())


def has_stages(strategy: str) -> bool:
    """Whether several processes have layers of their own."""
    return STAGES in SIZES.get(strategy, ())
