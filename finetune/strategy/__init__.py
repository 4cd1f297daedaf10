"""DDP, FSDP2 and DeepSpeed ZeRO: the only place that knows them by name.

``request`` (what the launch asks for, and whether it can work), ``gpus`` (those of the launch), ``setup`` (process
group, Accelerator, preparation, end), ``loading`` (where weights are read to, and by whom), ``active`` (what is really
active; norms and whole parameters), ``sharding`` (how much of it each process holds), ``rehearsal`` (a pass that leaves
no trace), ``stretches`` (which elements of a parameter a process holds, and where), ``state`` (weights and optimizer
state as such stretches, which a checkpoint holds), ``loss_scale`` (of fp16, to go on with), ``step`` (which nothing
reaches that is not finite), ``interruption`` (signals, lost processes), ``patience`` (collectives that wait),
``deepspeed_ops`` (its C++ parts, built once), ``launch`` (the environment of a strategy file, for notebooks and tests).
What goes with what stands in ``finetune.compatibility``.

The launch file (``accelerate_configs/*.yaml``) chooses; the environment that ``accelerate launch`` makes
of it is read here, checked, brought to one numerical policy, and proven active after preparation.

The policy: trained parameters have fp32 master weights and fp32 optimizer state; computation runs in the
launch file's ``mixed_precision``; gradients are accumulated and reduced in fp32; the gradient norm is the
norm before clipping, of unscaled gradients. Where each part comes from:

=========  ==========================  =================================  ==========================
part       single, ddp                 fsdp2, hsdp                        zero1, zero2, zero3
=========  ==========================  =================================  ==========================
masters    fp32 parameters             fp32 sharded parameters            fp32 partitions
compute    autocast                    ``MixedPrecisionPolicy``           parameters in bf16 or fp16
gradients  fp32                        reduced in fp32                    ``data_types``, communication
                                                                          in fp32
clipping   ``clip_grad_norm_``         the same, over DTensors            inside the engine's step
=========  ==========================  =================================  ==========================

On a machine without a GPU the same classes run on CPU over gloo, as a rehearsal of the launch.
"""

from .active import (
    active_name,
    full_parameters,
    fuses,
    peak_flops_of,
    trained_shapes,
    working_parameters,
)
from .deepspeed_ops import prepare_import
from .gpus import machines_of
from .interruption import Interruption, name_of
from .loading import loading, loading_device
from .loss_scale import loss_scale, restore_loss_scale
from .patience import one_writes, patiently
from .rehearsal import rehearsal
from .request import (
    Strategy,
    asked_for,
    compute_dtype,
    describe,
    launcher_of,
    native_precision,
    problems,
    was_restarted,
)
from .setup import finish, leave, prepare, start
from .sharding import sharding_of
from .state import Piece, make_optimizer_state, optimizer_steps, pieces, set_optimizer_steps, settle
from .step import scaled, step_if_finite

__all__ = [
    "Interruption",
    "Piece",
    "Strategy",
    "active_name",
    "asked_for",
    "compute_dtype",
    "describe",
    "finish",
    "full_parameters",
    "fuses",
    "launcher_of",
    "leave",
    "loading",
    "loading_device",
    "loss_scale",
    "machines_of",
    "make_optimizer_state",
    "name_of",
    "native_precision",
    "one_writes",
    "optimizer_steps",
    "patiently",
    "peak_flops_of",
    "pieces",
    "prepare",
    "prepare_import",
    "problems",
    "rehearsal",
    "restore_loss_scale",
    "scaled",
    "set_optimizer_steps",
    "settle",
    "sharding_of",
    "start",
    "step_if_finite",
    "trained_shapes",
    "was_restarted",
    "working_parameters",
]
