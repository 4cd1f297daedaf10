"""Strategies by name: which there are, what each has in common with others, and the size that it is launched with."""

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
    "fsdp2_tp",
    "fsdp2_pp",
)
TOGETHER = ("cp", "ulysses")
"""Strategies under which several processes compute each row together."""
IN_PARTS = ("pp", "tp", "ep")
"""Strategies under which each process has a part of the model's own parameters. Accelerate's keys for them are those of
Megatron-LM."""
SHARDED_PARTS = {"tp": "fsdp2_tp", "pp": "fsdp2_pp"}
"""Which of these there are with parts that are sharded over the processes that would hold the same one."""


class Size(NamedTuple):
    """How many processes do together what a strategy is for."""

    field: str
    """Of ``distributed.Strategy``, and of ``trace.Setting`` for those that the planner knows."""
    key: str
    """Of the launch file. In capitals, the name of the environment variable that ``accelerate launch`` makes of it."""
    what: str
    """In words."""


SIZES = {
    "cp": Size("context", "parallelism_config_cp_size", "GPUs for each row"),
    "ulysses": Size("context", "parallelism_config_sp_size", "GPUs for each row"),
    "pp": Size("stages", "megatron_lm_pp_degree", "stages"),
    "tp": Size("tensor", "megatron_lm_tp_degree", "GPUs for each layer"),
    "ep": Size("experts", "megatron_lm_expert_model_parallel_size", "GPUs for the experts of each layer"),
}
SIZES |= {sharded: SIZES[name] for name, sharded in SHARDED_PARTS.items()}
"""Of the strategies that have one."""


def splits_layers(strategy: str) -> bool:
    """Whether several processes have a part of each layer."""
    return strategy in SIZES and SIZES[strategy].field == "tensor"


def has_stages(strategy: str) -> bool:
    """Whether several processes have layers of their own."""
    return strategy in SIZES and SIZES[strategy].field == "stages"
