"""The planner: what fits, under which strategy, how fast, before anything is loaded.

Pure arithmetic on a configuration: nothing here imports PyTorch, so that an answer takes milliseconds. ``shape`` (a
model, told from its config.json), ``setting`` and ``placement`` (a way to train, and what its strategy splits),
``memory`` (the peak: a step on tensors without values, ``tape``, ``operations`` and ``decoder``; with what FSDP2 and
DeepSpeed allocate, ``sharded_units`` and ``zero``), ``speed`` (the time), ``choose`` (the answer to a question),
``of_run`` (the plan of a run that starts), ``paper`` (parallelism that the recipes do not run).
"""

from .of_run import RunPlan, plan_run
from .placement import REPLICAS
from .setting import Setting

__all__ = ["REPLICAS", "RunPlan", "Setting", "plan_run"]
