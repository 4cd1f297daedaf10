"""Private names of DeepSpeed's engine that a trace of its step needs. Read in 0.19.8."""

import importlib
import sys
from typing import Any

import torch

GROUPS = ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP")
"""DeepSpeed's, of the whole launch."""
FORGOTTEN: list[Any] = []


def forget_process_groups() -> None:
    """See ``fake_tensors.forget_process_groups``; DeepSpeed knows groups as well, once it has been imported."""
    for module, names in (("deepspeed.comm.comm", ("cdb",)), ("deepspeed.utils.groups", GROUPS)):
        if module in sys.modules:
            for name in names:
                FORGOTTEN.append(getattr(sys.modules[module], name))
                setattr(sys.modules[module], name, None)


def held_by(engine: Any) -> dict[str, list[torch.Tensor]]:
    """What an engine keeps between its steps besides the optimizer's state: weights (its 16-bit copies, shards and
    masters) and gradients (their partition of stage 3). Goes when the engine lists its memory."""
    zero = engine.optimizer
    lists = ("bit16_groups_flat", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    weights = [tensor for name in lists for tensor in getattr(zero, name, ())]
    weights += [each.ds_tensor for each in engine.module.parameters() if hasattr(each, "ds_tensor")]
    partition = getattr(zero, "grad_partitions_flat_buffer", None)
    return {"weights": weights, "gradients": [] if partition is None else [partition]}


def fake_tensor_changes(*, fp16: bool) -> list[tuple[Any, str, Any]]:
    """What the engine does besides its step, and cannot or need not do in a trace; and what it does in fp16, which is
    traced as bf16: stage 3 looks for infinite gradients in the whole of its fp32 buffer, and takes a copy to do so.

    Stage 3 has all processes compare the order in which they gather, and there are no others to disagree: goes when
    DeepSpeed compares in debugging only. On a CPU it compiles an operation to communicate through shared memory, for
    half a minute: goes when it is compiled at its first use.
    """
    import deepspeed.runtime.zero.partition_parameters as partitions
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    import deepspeed.runtime.zero.stage3 as stage
    import deepspeed.runtime.zero.stage_1_and_2 as replicated

    communication = importlib.import_module("deepspeed.comm.torch")  # whose package has PyTorch by that name
    name = "assert_ints_same_as_other_ranks"
    changes: list[tuple[Any, str, Any]] = [(communication, "build_shm_op", lambda: None)]
    changes += [(module, name, lambda numbers: None) for module in (partitions, coordinator, stage)]
    changes.append((replicated.DeepSpeedZeroOptimizer, "allreduce_and_scatter", _in_one_piece(replicated)))
    if fp16:
        zero = stage.DeepSpeedZeroOptimizer_Stage3
        scale = zero._loss_scale_update_and_overflow_cleanup
        changes.append((zero, scale.__name__, lambda self: (self.check_overflow(), scale(self))[1]))
    return changes


def _in_one_piece(stages: Any) -> Any:
    """Stages 1 and 2 reduce a gradient that is larger than their bucket by itself, cut where partitions begin. In a
    shallow model it is cut into more pieces than in a deep one, whose partitions are larger than any gradient."""
    scatter = stages.DeepSpeedZeroOptimizer.allreduce_and_scatter

    def allreduce_and_scatter(self: Any, bucket: list[Any], *args: Any, **kwargs: Any) -> None:
        ranks, pieces, outputs = zip(*bucket, strict=True)
        elements = sum(piece.numel() for piece in pieces)
        if elements > self.reduce_bucket_size and not any(output is not None for output in outputs):
            bucket = [(frozenset().union(*ranks), pieces[0].as_strided((elements,), (1,)), None)]
        scatter(self, bucket, *args, **kwargs)

    return allreduce_and_scatter
