"""DDP, FSDP2, DeepSpeed ZeRO, pipelines, split layers and shared experts: the only room that knows them by name.

``strategy`` (the launch, and whether it can work), ``gpus`` (GPUs of the launch), ``setup`` (process group,
Accelerator, preparation, end), ``weight_loading`` (where weights are loaded, and by which process), ``active`` (proof
of what is active; whole parameters), ``sharding`` (how much each process holds), ``context`` (rows that several
processes compute together), ``pipeline`` (one stage of a model's layers), ``pipeline_step`` (micro-batches on their way
through the stages), ``tensor_parallel`` (a part of each layer), ``expert_parallel`` (a share of a mixture's experts),
``part_groups`` (which processes have parts of the same), ``held_parts`` (what a process has of a model, and what is
done with the parts of all), ``model_parts`` (how it comes to them), ``part_shards`` (shards of such parts, and of
stages), ``clipping`` (gradients of all parts by one norm), ``flat_shards`` (which elements of a parameter a process
holds, and where), ``sharded_state`` (weights and optimizer state as such shards, as checkpoints store them),
``weight_copies`` (in 16 bits, which single, ddp, pp, tp, ep and tp_pp compute with), ``whole_buffers`` (of sharded
models), ``averaged_weights`` (averages in the place of the weights, for a while), ``remembered_weights`` (the trained
weights of the beginning, to compute with), ``loss_scale`` (of fp16, to resume with), ``interruption`` (signals, lost
processes), ``heartbeat`` (lost machines), ``long_timeout`` (collectives that wait), ``deepspeed_ops`` (DeepSpeed's C++
operations, built once), ``built_operations`` (whether they are built), ``launch_environment`` (the environment of a
strategy file, for notebooks and tests), ``launcher`` (the processes of ``finetune train``).
Compatibility is in ``finetune.config.compatibility``.

The launch file (``accelerate_configs/*.yaml``) selects the strategy. ``accelerate launch`` turns it into environment
variables, which are read and checked here. All strategies follow one numerical policy, and each is proven active after
preparation.

The policy: trained parameters have fp32 master weights and fp32 optimizer state; computation runs in the
launch file's ``mixed_precision``; gradients are accumulated and reduced in fp32; the gradient norm is the
norm before clipping, of unscaled gradients. Where each part comes from:

=========  ==========================  =================================  ==========================
part       single, ddp, pp, tp, ep,    fsdp2, hsdp, cp, ulysses,          zero1, zero2, zero3
           tp_pp                       fsdp2_tp, fsdp2_pp, fsdp2_tp_pp,
                                       cp_tp
=========  ==========================  =================================  ==========================
masters    fp32 parameters             fp32 sharded parameters            fp32 partitions
compute    copies in bf16 or fp16      ``MixedPrecisionPolicy``           parameters in bf16 or fp16
gradients  fp32                        reduced in fp32                    ``data_types``, communication
                                                                          in fp32
clipping   by the norm in fp32         the same, over DTensors            inside the engine's step
=========  ==========================  =================================  ==========================

On a machine without a GPU the same classes run on CPU over gloo, as a rehearsal of the launch.
"""

from finetune.distributed.active import (
    active_name,
    full_parameters,
    fuses,
    peak_flops_of,
    trained_shapes,
    working_parameters,
)
from finetune.distributed.averaged_weights import AVERAGES, averaged_weights
from finetune.distributed.context import HOW, shared
from finetune.distributed.deepspeed_ops import prepare_import
from finetune.distributed.gpus import machines_of
from finetune.distributed.held_parts import pipeline_of
from finetune.distributed.interruption import Interruption, name_of
from finetune.distributed.long_timeout import long_timeout_gather, long_wait
from finetune.distributed.loss_scale import loss_scale, restore_loss_scale
from finetune.distributed.model_parts import trained_everywhere
from finetune.distributed.remembered_weights import RememberedWeights
from finetune.distributed.setup import finish, leave, prepare, start
from finetune.distributed.sharded_state import (
    WEIGHTS,
    Piece,
    make_optimizer_state,
    optimizer_steps,
    pieces,
    set_optimizer_steps,
    sync_compute_weights,
)
from finetune.distributed.sharding import held_bytes, sharding_of
from finetune.distributed.strategy import (
    DTYPES,
    Strategy,
    compute_dtype,
    describe,
    launcher_of,
    native_precision,
    precision_problem,
    problems,
    was_restarted,
)
from finetune.distributed.weight_loading import counts, loading, loading_device, whole_weights

__all__ = [
    "AVERAGES",
    "DTYPES",
    "HOW",
    "WEIGHTS",
    "Interruption",
    "Piece",
    "RememberedWeights",
    "Strategy",
    "active_name",
    "averaged_weights",
    "compute_dtype",
    "counts",
    "describe",
    "finish",
    "full_parameters",
    "fuses",
    "held_bytes",
    "launcher_of",
    "leave",
    "loading",
    "loading_device",
    "long_timeout_gather",
    "long_wait",
    "loss_scale",
    "machines_of",
    "make_optimizer_state",
    "name_of",
    "native_precision",
    "optimizer_steps",
    "peak_flops_of",
    "pieces",
    "pipeline_of",
    "precision_problem",
    "prepare",
    "prepare_import",
    "problems",
    "restore_loss_scale",
    "set_optimizer_steps",
    "sharding_of",
    "shared",
    "start",
    "sync_compute_weights",
    "trained_everywhere",
    "trained_shapes",
    "was_restarted",
    "whole_weights",
    "working_parameters",
]
