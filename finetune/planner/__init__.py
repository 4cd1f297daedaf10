"""The planner: what fits, under which strategy, how fast, before anything is loaded.

Arithmetic on traces of the recipe's own step, which ``finetune.trace`` makes and remembers. Nothing here imports
PyTorch, so that an answer whose traces are known takes a second. (What a user of ``finetune plan`` writes and reads is
in ``finetune.cli.planning``.)

``question`` (what is asked), ``model`` (what its steps take, by their traces), ``pipelines`` (of a stage). Memory:
``memory``. Time: ``speed``, ``communication``, ``part_traffic``. The answer: ``possible``, ``judged_rows``,
``changes``, ``candidates``, ``preference``, ``nearest``, ``choose``.
``of_run``: the plan of a run that starts.
"""

from finetune.planner.model import Model
from finetune.planner.of_run import RunPlan, plan_run
from finetune.trace.placement import REPLICAS
from finetune.trace.setting import Setting

__all__ = ["REPLICAS", "Model", "RunPlan", "Setting", "plan_run"]
