"""Process group, Accelerator and preparation, with one numerical policy under every strategy; and the end."""

import contextlib
import io
import logging
import multiprocessing
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    ParallelismConfig,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from finetune.compat.accelerate_private import forget_state
from finetune.compat.deepspeed_private import restore_linear
from finetune.config.strategy_names import SWAPPED_TOGETHER
from finetune.distributed import deepspeed_ops
from finetune.distributed.active import prove_active
from finetune.distributed.model_parts import take_part, trained_everywhere
from finetune.distributed.part_shards import shard_part
from finetune.distributed.sharded_state import inner_optimizer
from finetune.distributed.strategy import Strategy, compute_dtype
from finetune.distributed.weight_copies import compute_with_copies
from finetune.distributed.whole_buffers import kept_whole
from finetune.errors import InputError
from finetune.hardware import cores
from finetune.models.pipeline_order import Order
from finetune.models.quantization import keep_partitioned
from finetune.optim.averaging import keep_averages

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Gradients that DeepSpeed reduces at a time. Its default of 500 million takes gigabytes of each GPU, even for
adapters."""


def start(
    strategy: Strategy,
    *,
    accumulation: int,
    micro_batch_size: int,
    max_grad_norm: float,
    optimizer: str,
    weights: str,
    largest_parameter: Callable[[], int],
    offload_folder: Path,
) -> Accelerator:
    """Join the process group and make the Accelerator of this run.

    Args:
        accumulation: micro-batches of one process in an optimizer step.
        micro_batch_size: rows of a micro-batch (DeepSpeed wants to know it).
        max_grad_norm: 0 for no clipping.
        optimizer: the recipe's name of it.
        weights: ``fp32_master`` or ``bf16``.
        largest_parameter: tells the elements of the model's largest parameter.
        offload_folder: for the files of ZeRO's NVMe offload, unless
            ``ACCELERATE_DEEPSPEED_OFFLOAD_{PARAM,OPTIMIZER}_NVME_PATH`` name a folder on a faster disk.
    """
    if strategy.rehearsal:
        share_cores(strategy)
        deepspeed_ops.prepare_import()  # Accelerate imports DeepSpeed under every strategy
    if strategy.name.endswith("_nvme"):
        for what in ("PARAM", "OPTIMIZER"):
            os.environ.setdefault(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_NVME_PATH", str(offload_folder))
    if strategy.is_deepspeed:
        deepspeed_ops.build(cpu=strategy.rehearsal, offload=strategy.offloads, nvme=strategy.name.endswith("_nvme"))
        logger = logging.getLogger("DeepSpeed")
        logger.setLevel(logging.ERROR)  # without its notes on defaults that we set on purpose
        # DeepSpeed 0.19 calls collectives by names that PyTorch 2.13 has replaced
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if strategy.stages > 1:  # without the whole order of a step beside an error that we tell
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    if strategy.replicas > 1 or strategy.context > 1:
        # Accelerate 1.15 slices its mesh in a way that later versions of PyTorch will not allow
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh", category=UserWarning)
    _forget_earlier_runs()
    _join_apart_from_earlier_attempts(strategy)
    # counted before ZeRO-3 is known to transformers, which would partition the model that is counted
    buffer_elements = largest_parameter() if strategy.name.endswith("_nvme") else 0
    if strategy.rehearsal and (strategy.is_fsdp or strategy.is_deepspeed):
        _join_over_gloo(strategy)
    with _megatron_lm_is_not_asked_for():
        accelerator = _accelerator(strategy, accumulation, weights)
    if strategy.is_fsdp:
        _configure_fsdp(accelerator, strategy, weights)
    if strategy.is_deepspeed:
        _configure_deepspeed(accelerator, accumulation, micro_batch_size, max_grad_norm, optimizer, weights)
    if buffer_elements:
        _size_buffers(accelerator, buffer_elements)
    return accelerator


def _accelerator(strategy: Strategy, accumulation: int, weights: str) -> Accelerator:
    return Accelerator(
        # bf16 weights are computed with as they are: nothing to cast, no master to keep
        mixed_precision="no" if weights == "bf16" and not strategy.is_deepspeed else strategy.mixed_precision,
        cpu=strategy.rehearsal and not (strategy.is_fsdp or strategy.is_deepspeed),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation,
            # the default ends accumulation early at the end of a data loader and shifts the gradient of that step
            sync_with_dataloader=False,
        ),
        parallelism_config=_parallelism(strategy),
        # otherwise it keeps every gradient twice
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )


@contextlib.contextmanager
def _megatron_lm_is_not_asked_for() -> Iterator[None]:
    """Accelerate would look for Megatron-LM under pp, tp and ep, whose launch files it takes for those of that. What
    the launch asked for stays known to another run in this process."""
    name = "ACCELERATE_USE_MEGATRON_LM"
    is_asked = os.environ.get(name) == "true"
    if is_asked:
        os.environ[name] = "false"
    try:
        yield
    finally:
        if is_asked:
            os.environ[name] = "true"


def share_cores(strategy: Strategy) -> None:
    """Divide the cores among the processes of this machine, unless OMP_NUM_THREADS sets the threads of each."""
    if multiprocessing.parent_process() is not None:
        torch.set_num_threads(1)  # forked from a notebook, it hangs if it starts OpenMP threads after its parent did
    elif "OMP_NUM_THREADS" not in os.environ:  # which PyTorch has read
        local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", strategy.world_size))
        torch.set_num_threads(max(1, cores.usable() // local_processes))


def _join_apart_from_earlier_attempts(strategy: Strategy) -> None:
    """Join the process group of a restarted launch under its own store prefix.

    A launcher that restarts its processes (``--max_restarts``) keeps the store in which they find each other, which
    still has the addresses of the dead ones (pytorch/pytorch#135712, seen in PyTorch 2.13).
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(strategy.world_size)  # others count their own attempts
    if attempt == "0" or not one_machine or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, strategy.world_size, is_master=False)
    dist.init_process_group(
        "gloo" if strategy.rehearsal else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=strategy.rank,
        world_size=strategy.world_size,
    )


def _join_over_gloo(strategy: Strategy) -> None:
    """Accelerate switches FSDP on for GPUs only, and starts DeepSpeed without a backend where there is none.

    Its process state, created here with gloo, is what its Accelerator takes up. Until Accelerate knows FSDP on
    CPU (1.15 does not), FSDP also needs the type of a multi-GPU launch.
    """
    with _without_chatter():
        state = PartialState(backend="gloo")
    if strategy.is_fsdp:
        state.distributed_type = DistributedType.MULTI_GPU


def _without_chatter() -> contextlib.AbstractContextManager[object]:
    """DeepSpeed prints which operations it built, and its memory use at four points of its set-up."""
    return contextlib.redirect_stdout(io.StringIO())


def _parallelism(strategy: Strategy) -> ParallelismConfig | None:
    if not strategy.is_fsdp or strategy.replicas == strategy.context == 1:
        return None
    # sharded over processes that compute rows together, too; how they do is ours (context.py), not Accelerate's
    return ParallelismConfig(
        dp_replicate_size=strategy.replicas, dp_shard_size=strategy.shards, tp_size=1, cp_size=1, sp_size=1
    )


def _configure_fsdp(accelerator: Accelerator, strategy: Strategy, weights: str) -> None:
    plugin = accelerator.state.fsdp_plugin
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(strategy, weights), reduce_dtype=torch.float32
    )
    if strategy.rehearsal and strategy.offloads:
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator


def _wrap_what_is_there(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Shard the layers that transformers names, of which a model may lack some (Gemma 3 has no encoder of texts):
    Accelerate would refuse it."""
    plugin, there = accelerator.state.fsdp_plugin, {type(module).__name__ for module in model.modules()}
    if plugin.transformer_cls_names_to_wrap is None:
        named: Any = getattr(model, "_no_split_modules", None) or ()
        plugin.transformer_cls_names_to_wrap = sorted(there & set(named))


def _configure_deepspeed(
    accelerator: Accelerator,
    accumulation: int,
    micro_batch_size: int,
    max_grad_norm: float,
    optimizer: str,
    weights: str,
) -> None:
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    clipping = config.get("gradient_clipping", "auto")
    if clipping not in ("auto", max_grad_norm):
        raise InputError(
            f"The launch file clips gradients at {clipping}, the recipe at {max_grad_norm}; remove gradient_clipping "
            "from the launch file, since train.max_grad_norm decides."
        )
    config["gradient_clipping"] = max_grad_norm  # left out, Accelerate makes 1.0 of it
    # of a launch file, in which `accelerate config` writes 1, Accelerate would take what is not auto
    config["gradient_accumulation_steps"] = accumulation
    config["train_micro_batch_size_per_gpu"] = micro_batch_size
    config["zero_optimization"]["reduce_bucket_size"] = REDUCE_BUCKET_ELEMENTS
    if config["bf16"]["enabled"] or config["fp16"]["enabled"]:
        config["communication_data_type"] = "fp32"
        if weights == "bf16":
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        else:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    if optimizer != "adamw":
        config["zero_force_ds_cpu_optimizer"] = False  # its CPU optimizers are Adam, Adagrad and Lion


def _size_buffers(accelerator: Accelerator, elements: int) -> None:
    """Fit the buffers of the NVMe swap to the model: the default, 100 million elements each, is too small for the
    embedding of a large model, and gigabytes too many for a small one. And have fewer weights step together than by
    default, which is a billion; a launch file that says how many decides."""
    plugin = accelerator.state.deepspeed_plugin
    zero = plugin.deepspeed_config["zero_optimization"]
    offload = zero["offload_param"]
    if offload["device"] == "nvme":
        offload["buffer_size"] = elements
        zero.setdefault("sub_group_size", SWAPPED_TOGETHER)
        plugin.set_deepspeed_weakref()  # transformers reads the weights by a copy of the configuration


def _limit_gathered(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Have ZeRO-3 hold the weights of two layers: the one that computes, and the next, which is fetched meanwhile.

    By default it holds a billion weights: all of a small model, and many layers of one in 4 bits. A launch file that
    sets these limits decides.
    """
    layers = [layer for each in model.modules() if isinstance(each, torch.nn.ModuleList) for layer in each]
    largest = max(
        (sum(getattr(each, "ds_numel", each.numel()) for each in layer.parameters()) for layer in layers), default=0
    )
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    for name in ("stage3_max_live_parameters", "stage3_max_reuse_distance"):
        zero.setdefault(name, 2 * largest)


def _gather_adapted_experts_at_once(model: torch.nn.Module) -> None:
    """Have ZeRO-3 take the experts of a layer and their adapters as one module.

    PEFT hides the experts' weights while they compute, from modules that DeepSpeed would gather one after another.
    """
    from peft.tuners.lora.layer import ParamWrapper

    if any(isinstance(each, ParamWrapper) for each in model.modules()):
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, [ParamWrapper])


def prepare(
    accelerator: Accelerator,
    strategy: Strategy,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    weights: str,
    order: Order | None = None,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Shard or wrap model and optimizer as the launch requested, and prove that it happened.

    Args:
        weights: ``fp32_master`` or ``bf16``.
        order: in which micro-batches pass the stages of a pipeline; 1F1B without it.

    Raises:
        RuntimeError: if the active strategy is not the requested one.
    """
    dtype = compute_dtype(strategy, weights)
    part = take_part(model, optimizer, strategy, accelerator.device, dtype, order or Order(strategy.stages))
    pipeline = part.pipeline if part else None
    makes_masters = weights == "fp32_master" and not strategy.is_deepspeed  # DeepSpeed makes its own

    def settle(parameters: Mapping[str, torch.nn.Parameter]) -> None:
        if part:
            part.settle(model, parameters)
        for parameter in parameters.values():
            if makes_masters and parameter.requires_grad:
                parameter.data = parameter.data.float()

    with trained_everywhere(model):
        if part and strategy.shards_parts:
            holders = part.groups.replicas.group
            shard_part(model, optimizer, holders, settle, device=accelerator.device, dtype=dtype)
        else:
            settle(dict(model.named_parameters()))
    if makes_masters and strategy.keeps_parameters and dtype != torch.float32:
        with_copies = compute_with_copies(model, dtype)
        if pipeline:
            pipeline.with_copies = with_copies
    if strategy.gathers_in_order:
        _limit_gathered(accelerator, model)
        keep_partitioned(model)
        if "peft" in sys.modules:
            _gather_adapted_experts_at_once(model)
    if pipeline:
        pipeline.begin(model)
    if strategy.is_fsdp:
        _wrap_what_is_there(accelerator, model)
    whole = kept_whole(model, accelerator.device) if strategy.is_fsdp and not part else contextlib.nullcontext()
    with _without_chatter(), whole:
        if part:
            optimizer = accelerator.prepare(optimizer)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
    prove_active(accelerator, strategy, model, optimizer)
    keep_averages(inner_optimizer(model, optimizer))  # now: Accelerate may have put another one in its place
    return model, optimizer


def finish(accelerator: Accelerator, strategy: Strategy, offload_folder: Path) -> None:
    """Leave the process group and remove the files of NVMe offload, so that this process can start another run."""
    accelerator.wait_for_everyone()
    if strategy.name.endswith("_nvme") and accelerator.is_local_main_process:
        shutil.rmtree(offload_folder, ignore_errors=True)  # a shared one is removed by every machine at once
    if dist.is_initialized():
        dist.destroy_process_group()
    if strategy.is_deepspeed:
        restore_linear()
    _forget_earlier_runs()


def _forget_earlier_runs() -> None:
    """Accelerate and transformers keep a run's settings for the whole process, but a notebook runs several."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    forget_state()


def leave(code: int) -> None:
    """Exit this process with a code, without the destructors of the communication libraries.

    A process that exits normally sometimes aborts ("terminate called without an active exception") after all work is
    done, which the launcher reports as a failed run. After an error, leaving the group properly could wait for
    processes that never come.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more, or the disk under it is full: the code tells
            stream.flush()
    os._exit(code)
