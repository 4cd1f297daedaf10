"""The planner: what fits, under which strategy, how fast, before anything is loaded.

Pure arithmetic on a configuration: nothing here imports PyTorch, so that an answer takes milliseconds.

The question: ``written`` and ``asked`` (from what a user wrote), ``model_config``, ``machine``, ``strategy_file``,
``question``.
The model: ``shape``, ``model_shape``, ``families`` and ``fields`` (told from its config.json), ``trained``,
``inventory`` and ``matrices`` (its weights).
Memory: ``peak_memory``, a step on tensors without values: ``tape``, ``operations``, ``linear``, ``attending``,
``experts``, ``dialects``, ``decoder_layer``, ``decoder``, ``build``; with what FSDP2 and DeepSpeed allocate,
``shards``, ``sharded_units``, ``zero``, ``zero_gather``, ``zero_step``; and ``optimizer_state``.
Time: ``speed``, ``work``, ``kernel_count``, ``communication``, ``rates``.
The answer: ``judged_rows``, ``changes``, ``candidates``, ``preference``, ``nearest``, ``choose``; said by ``reasons``,
``largest_term`` and ``launch_command``; shown by ``plan_tables``, ``picture`` and ``json_answer``. Held against a dry
run (``traced``) and real steps (``probed``, ``calibration``).
``of_run``: the plan of a run that starts.
"""

from finetune.planner.of_run import RunPlan, plan_run
from finetune.trace.placement import REPLICAS
from finetune.trace.setting import Setting

__all__ = ["REPLICAS", "RunPlan", "Setting", "plan_run"]
