"""The dry run: the recipe's step, as one process of a strategy, on tensors without contents."""

import contextlib
import gc
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, PreTrainedConfig

from finetune import distributed
from finetune.compat.fake_tensors import FakeStore, FakeTensorMode, without_modes
from finetune.config.compatibility import Cell, refusal
from finetune.data.batches import document_bounds
from finetune.distributed.launch_environment import launch_environment
from finetune.errors import InputError, refuse_if_any
from finetune.models import loading as models
from finetune.optim.optimizer import build_optimizer
from finetune.shipped import shipped_files
from finetune.trace.accounts import account
from finetune.trace.building import build
from finetune.trace.findings import Trace
from finetune.trace.kernel_workspace import bytes_inside
from finetune.trace.ledger import ALLOCATOR_ROUNDING, Ledger
from finetune.trace.patches import AnyValue, answer_replicas, engines_take_fakes, libraries_take_fakes
from finetune.trace.placement import Placement, placement_of, world_sizes_problem
from finetune.trace.setting import Setting
from finetune.training import loss, step

STEPS = 2
"""Of the optimizer: its state is made in the first."""
ON_HOST = frozenset({"weights", "gradients", "optimizer"})


def dry_run(
    model: str | dict[str, Any] | PreTrainedConfig,
    setting: Setting,
    *,
    rank: int = 0,
    real: bool = False,
    kernels: bool = True,
    rounding: int = ALLOCATOR_ROUNDING,
) -> Trace:
    """Trace two optimizer steps of a model under a setting.

    It changes the state of this process while it runs, and an engine keeps its process groups, so that a second one
    cannot be traced: ``child.trace_in_child`` runs it in a process of its own. fp16 is traced as bf16, which has the
    same size. Not in it: workspaces of cuBLAS and NCCL, fragmentation, the load; of 8-bit layers, the columns of
    outliers. Under an engine, which steps within the last backward pass, weights are all that it makes beforehand:
    masters and buffers too.

    Args:
        model: a configuration, as transformers or ``config.json`` have it, or the folder or hub id of one.
        rank: which of the setting's processes it is.
        real: on real tensors on the CPU, in processes that were launched for it: for a comparison, of a small model.
        kernels: count what kernels of a GPU take inside; real ones of a CPU take other memory.
        rounding: bytes to whose multiples blocks are rounded up.

    Raises:
        InputError: if the setting cannot be trained, or not traced.
    """
    import peft  # noqa: F401  # not under the ledger: libraries make constants when they are imported

    began = time.perf_counter()
    refuse_if_any(problems(setting, rank))
    config = _config(model)
    fakes = contextlib.nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(rounding=rounding, inside=bytes_inside if kernels else None)
    place = placement_of(setting.strategy, setting.world_size)
    among_others = real and setting.world_size > 1
    with contextlib.ExitStack() as stack:
        if not among_others:
            stack.enter_context(_launched(setting, rank))
        if not real:
            stack.enter_context(libraries_take_fakes())
        if not real and place.framework == "zero":
            stack.enter_context(engines_take_fakes())
        accelerator, strategy = _start(setting)
        with fakes, ledger, contextlib.nullcontext() if real else AnyValue():
            _trace(ledger, accelerator, strategy, config, setting, place, answers_itself=not real)
        distributed.finish(accelerator, strategy, Path())
    return account(
        ledger,
        logits=(setting.tokens, config.get_text_config().vocab_size),
        on_host=ON_HOST if place.weights_on != "gpu" else frozenset(),
        seconds=time.perf_counter() - began,
    )


def problems(setting: Setting, rank: int) -> list[str]:
    """Why a setting cannot be traced, as sentences."""
    found = [refusal(Cell(setting.strategy, setting.bits, setting.adapter, setting.optimizer))]
    found.append(world_sizes_problem(setting.strategy, setting.world_size))
    if not 0 <= rank < setting.world_size:
        found.append(f"The rank is {rank}; of {setting.world_size} processes it is from 0 to {setting.world_size - 1}.")
    place = placement_of(setting.strategy, setting.world_size)
    if place.framework == "zero" and place.optimizer_on != "gpu":
        found.append(
            f"{setting.strategy} cannot be traced: without a GPU, its engine puts everything into host memory; take "
            "the closed form, or trace the strategy without offload."
        )
    return [sentence for sentence in found if sentence]


def _config(model: str | dict[str, Any] | PreTrainedConfig) -> PreTrainedConfig:
    if isinstance(model, PreTrainedConfig):
        return model
    if isinstance(model, str):
        return models.load_config(model, revision=None, trust_remote_code=False)
    fields = {key: value for key, value in model.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(model["model_type"], **fields)
    except (KeyError, ValueError) as error:
        raise InputError(f"The configuration is of no model that transformers knows ({error}).") from error


@contextlib.contextmanager
def _launched(setting: Setting, rank: int) -> Iterator[None]:
    """The environment of a launched process, and its group, in which nobody else is."""
    before = dict(os.environ)
    file = shipped_files() / "accelerate_configs" / f"{setting.strategy}.yaml"
    precision = "bf16" if setting.precision == "fp16" else setting.precision
    os.environ.update(launch_environment(file, setting.world_size, precision))
    if several := setting.world_size > 1:
        place = {"RANK": rank, "WORLD_SIZE": setting.world_size}
        local = {f"LOCAL_{name}": number for name, number in place.items()}
        os.environ.update({name: str(number) for name, number in (place | local).items()})
        os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "1"})  # looked for, and not used
        dist.init_process_group("fake", rank=rank, world_size=setting.world_size, store=FakeStore())
    try:
        yield
    finally:
        if several and dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def _start(setting: Setting) -> tuple[Any, distributed.Strategy]:
    strategy = distributed.Strategy.from_environment()
    if not strategy.rehearsal:
        raise InputError("A dry run computes on the CPU; hide the GPUs of this process: CUDA_VISIBLE_DEVICES=''.")
    accelerator = distributed.start(
        strategy,
        accumulation=setting.accumulation,
        micro_batch_size=setting.micro_batch_size,
        max_grad_norm=1.0,
        optimizer=setting.optimizer,
        weights=setting.weights,
        largest_parameter=lambda: 0,
        offload_folder=Path(),
    )
    accelerator.device_placement = False  # everything is where it belongs
    return accelerator, strategy


def _trace(
    ledger: Ledger,
    accelerator: Any,
    strategy: distributed.Strategy,
    config: PreTrainedConfig,
    setting: Setting,
    place: Placement,
    *,
    answers_itself: bool,
) -> None:
    dtype = distributed.compute_dtype(strategy, setting.weights)
    # by every process: how weights come to their places is not traced, and the other processes send none
    with distributed.loading(accelerator, strategy, whole=True, by_every_process=True):
        model: Any = build(config, setting, dtype, real=not answers_itself)
    optimizer = build_optimizer(
        model,
        name=setting.optimizer,
        learning_rate=1e-4,
        weight_decay=0.0,
        weights=setting.weights,
        fused=True,  # as on a GPU
        rounding_seed=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = distributed.prepare(accelerator, strategy, model, optimizer, weights=setting.weights)
    if place.framework == "replicated" and answers_itself:
        answer_replicas(model)
    model.train()
    micro_batch = next_tokens, inputs = _micro_batch(setting)
    gc.collect()
    ledger.tell([next_tokens, *(each for each in inputs.values() if isinstance(each, torch.Tensor))], "activations")
    model.register_forward_hook(lambda *_: ledger.begin("loss"))

    def loss_sum(model: torch.nn.Module, micro_batch: Any) -> torch.Tensor:
        ledger.begin("forward")
        summed = loss.next_token_loss_sum(model, micro_batch)
        ledger.begin("backward")
        return summed

    for _ in range(STEPS):
        ledger.tell([*model.parameters(), *model.buffers()], "weights")  # again: the first use may lay shards out anew
        for _ in range(setting.accumulation):
            step.backward(accelerator, model, loss_sum, micro_batch, divide_by=setting.tokens)
            ledger.tell([p.grad for p in model.parameters() if p.grad is not None], "gradients")
        ledger.begin("step")
        step.step_if_finite(accelerator, model, optimizer, 1.0)


def _micro_batch(setting: Setting) -> tuple[torch.Tensor, dict[str, Any]]:
    """Every row of the longest length; packed, each a document of the one row."""
    if not setting.packing:
        shape = (setting.micro_batch_size, setting.row_tokens)
        return torch.zeros(shape, dtype=torch.int64), {"input_ids": torch.zeros(shape, dtype=torch.int64)}
    with without_modes():  # the bounds of documents are read
        bounds = document_bounds([setting.row_tokens] * setting.micro_batch_size, torch.device("cpu"))
    return torch.zeros(1, setting.tokens, dtype=torch.int64), {
        "input_ids": torch.zeros(1, setting.tokens, dtype=torch.int64),
        **bounds,
    }
