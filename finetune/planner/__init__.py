"""The planner: what fits, under which strategy, how fast, before anything is loaded.

Arithmetic on traces of the recipe's own step, which ``finetune.trace`` makes and remembers. Nothing here imports
PyTorch, so that an answer whose traces are known takes a second.

The question: ``written`` and ``asked`` (from what a user wrote), ``model_config``, ``machine``, ``strategy_file``,
``question``.
The model: ``model`` (what its steps take, by their traces). Memory: ``memory``, ``optimizer_state``. Time: ``speed``,
``communication``, ``rates``.
The answer: ``judged_rows``, ``changes``, ``candidates``, ``preference``, ``nearest``, ``choose``; said by ``reasons``,
``largest_term`` and ``launch_command``; shown by ``plan_tables``, ``picture`` and ``json_answer``. Held against real
steps by ``probed``.
``of_run``: the plan of a run that starts.
"""

from finetune.planner.model import Model
from finetune.planner.of_run import RunPlan, plan_run
from finetune.trace.placement import REPLICAS
from finetune.trace.setting import Setting

__all__ = ["REPLICAS", "Model", "RunPlan", "Setting", "plan_run"]
