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
)
TOGETHER = ("cp", "ulysses")
"""Strategies under which several processes compute each row together."""
IN_PARTS = ("pp", "tp", "ep", "tp_pp")
"""Strategies under which each process has a part of the model's own parameters. Accelerate's keys for them are those of
Megatron-LM."""
SHARDED_PARTS = {"tp": "fsdp2_tp", "pp": "fsdp2_pp", "tp_pp": "fsdp2_tp_pp"}
"""Which of these there are with parts that are sharded over the processes that would hold the same one."""


class Size(NamedTuple):
    """How many processes do together what a strategy is for."""

    field: str
    """Of ``distributed.Strategy``, and of ``trace.Setting`` for those that the planner knows."""
    key: str
    """Of the launch file. In capitals, the name of the environment variable that ``accelerate launch`` makes of it."""
    what: str
    """In words."""


CONTEXT = "GPUs for each row"
TENSOR = Size("tensor", "megatron_lm_tp_degree", "GPUs for each layer")
STAGES = Size("stages", "megatron_lm_pp_degree", "stages")
EXPERTS = Size("experts", "megatron_lm_expert_model_parallel_size", "GPUs for the experts of each layer")
SIZES = {
    "cp": (Size("context", "parallelism_config_cp_size", CONTEXT),),
    "ulysses": (Size("context", "parallelism_config_sp_size", CONTEXT),),
    "pp": (STAGES,),
    "tp": (TENSOR,),
    "ep": (EXPERTS,),
    "tp_pp": (TENSOR, STAGES),
}
SIZES |= {sharded: SIZES[name] for name, sharded in SHARDED_PARTS.items()}
"""Of the strategies that have one, or several."""


def in_parts(sizes: Iterable[Size]) -> str | None:
    """The strategy under which each process has a part of the model's own parameters, by the sizes that it has; None
    where there is no such one."""
    return next((name for name in IN_PARTS if set(SIZES[name]) == set(sizes)), None)


def not_sharded(strategy: str) -> str:
    """Of a strategy whose parts are sharded, the one whose parts are not."""
    return next(name for name, sharded in SHARDED_PARTS.items() if sharded == strategy)


def splits_layers(strategy: str) -> bool:
    """Whether several processes have a part of each layer."""
    return TENSOR in SIZES.get(strategy, ())


def has_stages(strategy: str) -> bool:
    """Whether several processes have layers of their own."""
    return STAGES in SIZES.get(strategy, ())
