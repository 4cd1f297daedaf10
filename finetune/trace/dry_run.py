"""The dry run: the recipe's step, as one process of a strategy, on tensors without contents."""

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from finetune import distributed
from finetune.compat.fake_tensors import FakeStore, answer_replicas
from finetune.compat.peft_private import import_peft
from finetune.compat.quick_operations import TracingMode
from finetune.compat.torch_private import without_modes
from finetune.config.compatibility import refusal, shard_problems
from finetune.config.strategy_names import splits_layers
from finetune.data.batches import document_bounds
from finetune.distributed.launch_environment import launch_environment
from finetune.distributed.sharding import engine_of
from finetune.errors import InputError, refuse_if_any
from finetune.models import tensor_plan
from finetune.models.context_attention import Bounds, ContextShare
from finetune.shipped import shipped_files
from finetune.trace import building
from finetune.trace.anatomy import decoder_layers
from finetune.trace.ledger import Ledger
from finetune.trace.one_part import OnePart, with_one_part
from finetune.trace.patches import (
    engines_take_fakes,
    kernels_of_a_gpu,
    libraries_take_fakes,
    offloaded_activations_are_known,
    routers_are_balanced,
    scores_in_two_parts,
)
from finetune.trace.placement import LAUNCHES_ONE_PART, world_sizes_problem
from finetune.trace.setting import Setting
from finetune.trace.work import Calls
from finetune.training import loss, step
from finetune.training.router_balance import RouterBalance

ON_HOST = frozenset({"weights", "gradients", "optimizer"})


def stepped(
    config: PreTrainedConfig,
    setting: Setting,
    *,
    rank: int = 0,
    real: bool = False,
    as_on_gpu: bool = True,
    counts_work: bool = False,
    scored: int | None = None,
) -> Ledger:
    """The ledger of two optimizer steps of a model under a setting.

    It changes the state of this process while it runs, and an engine keeps its process groups, which must be forgotten
    before another one is traced: ``serving`` does so, in processes that do nothing else. fp16 is traced as bf16, which
    has the same size. Not in it: workspaces of cuBLAS and NCCL, fragmentation, the load; of 8-bit layers, the columns
    of outliers. Under an engine, which steps within the last backward pass, weights are all that it makes beforehand:
    masters and buffers too.

    Args:
        rank: which of the setting's processes it is.
        real: on real tensors on the CPU, in processes that were launched for it: for a comparison, of a small model.
        as_on_gpu: compute with the kernels of a GPU, and count what they and CUDA's allocator take beside the tensors.
        counts_work: count the operations of the second step.
        scored: positions whose scores exist at a time; two such parts stand for all. By default as the recipe has it.

    Raises:
        InputError: if the setting cannot be trained, or not traced.
    """
    import_peft()  # not under the ledger: libraries make constants when they are imported
    refuse_if_any(problems(setting))
    fakes = contextlib.nullcontext() if real else TracingMode(allow_non_fake_inputs=True)
    ledger = Ledger(as_on_gpu)
    with contextlib.ExitStack() as stack:
        gc.disable()  # Python's own times for collecting would decide what a cycle of objects still holds
        stack.callback(gc.enable)
        if not real or setting.world_size == 1:
            stack.enter_context(_launched(setting, rank))
        if not real:
            stack.enter_context(libraries_take_fakes())
            stack.enter_context(routers_are_balanced(setting.expert_load))
        if scored is not None:
            stack.enter_context(scores_in_two_parts(scored, ledger))
        stack.enter_context(offloaded_activations_are_known(ledger))
        if as_on_gpu:
            stack.enter_context(kernels_of_a_gpu(flash=setting.flash))
        if not real and setting.placement.framework == "zero":
            stack.enter_context(engines_take_fakes(fp16=setting.precision == "fp16"))
        accelerator, strategy = _start(setting)
        with fakes, ledger:
            _trace(ledger, accelerator, strategy, config, setting, real=real, counts=counts_work)
        distributed.finish(accelerator, strategy, Path())
    return ledger


def problems(setting: Setting) -> list[str]:
    """Why a setting cannot be trained, as sentences."""
    is_one_part = setting.shards_parts and setting.model_parts == 1
    sizes = setting.strategy, setting.world_size, setting.sizes
    found = refusal(setting.cell), None if is_one_part else world_sizes_problem(*sizes)
    return [sentence for sentence in found if sentence]


@contextlib.contextmanager
def _launched(setting: Setting, rank: int) -> Iterator[None]:
    """The environment of a launched process, and its group, in which nobody else is."""
    before = dict(os.environ)
    name = LAUNCHES_ONE_PART if setting.shards_parts else setting.strategy
    file = shipped_files() / "accelerate_configs" / f"{name}.yaml"
    precision = "bf16" if setting.precision == "fp16" else setting.precision
    os.environ.update(launch_environment(file, setting.world_size, precision))
    if not setting.shards_parts:  # of which only one part is here
        os.environ.update({size.key.upper(): str(number) for size, number in setting.sizes.items()})
    is_distributed = setting.placement.framework != "plain"
    if is_distributed:
        place = {"RANK": rank, "WORLD_SIZE": setting.world_size}
        local = {f"LOCAL_{name}": number for name, number in place.items()}
        os.environ.update({name: str(number) for name, number in (place | local).items()})
        os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "1"})  # looked for, and not used
        dist.init_process_group("fake", rank=rank, world_size=setting.world_size, store=FakeStore())
    try:
        yield
    finally:
        if is_distributed and dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def _start(setting: Setting) -> tuple[Any, distributed.Strategy]:
    strategy = distributed.Strategy.from_environment()
    if not strategy.rehearsal:
        raise InputError("A dry run computes on the CPU; hide the GPUs of this process: CUDA_VISIBLE_DEVICES=''.")
    strategy = with_one_part(strategy) if setting.shards_parts else strategy
    accelerator = building.start(setting, strategy)
    accelerator.device_placement = False  # everything is where it belongs
    # fake tensors on "cpu" and on "cpu:0" do not go together
    accelerator.state.device = torch.device("cpu")  # type: ignore[attr-defined]  # taken from PartialState
    return accelerator, strategy


def _trace(
    ledger: Ledger,
    accelerator: Any,
    strategy: distributed.Strategy,
    config: PreTrainedConfig,
    setting: Setting,
    *,
    real: bool,
    counts: bool,
) -> None:
    dtype = distributed.compute_dtype(strategy, setting.weights)
    # by every process: how weights come to their places is not traced, and the other processes send none
    with distributed.loading(accelerator, strategy, whole=True, by_every_process=True):
        model: Any = building.build(config, setting, dtype, real=real)
    ledger.trained.update(tuple(each.shape) for each in model.parameters() if each.requires_grad)
    optimizer = building.optimizer_of(model, setting, fused=True)  # as on a GPU
    bare, ledger.built, head = model, ledger.events, loss.head_of(model)
    if strategy.shards_parts:
        if splits_layers(setting.strategy):  # of the part, as a run asks of the whole model
            refuse_if_any(shard_problems(setting.strategy, tensor_plan.bundled(model, 1)))
        OnePart(model, strategy, accelerator.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = distributed.prepare(accelerator, strategy, model, optimizer, weights=setting.weights)
    if setting.placement.framework == "replicated" and not real:
        answer_replicas(model)
    model.train()
    micro_batch = next_tokens, inputs = _micro_batch(setting)
    if setting.context > 1:
        inputs["context_share"] = _context_share(setting, real=real)
    gc.collect()
    given = [next_tokens, *vars(next_tokens).values(), *inputs.values()]
    ledger.tell([each for each in given if isinstance(each, torch.Tensor)], "activations")
    _tell_layers(ledger, model, config.get_text_config().num_hidden_layers)
    head.register_forward_pre_hook(lambda *_: ledger.begin("loss"))
    if engine := engine_of(model):  # which steps within the last backward pass
        update = engine.step

        def stepping() -> None:
            ledger.begin("step")
            update()

        engine.step = stepping

    added: dict[str, Any] = {"label_smoothing": 0.1} if setting.smooths_labels else {}
    balance = RouterBalance.of(setting.router_aux_loss_coef, bare)
    added |= {"balance": balance.of_micro_batch} if balance.coefficient else {}

    def loss_sum(model: torch.nn.Module, micro_batch: Any) -> torch.Tensor:
        summed = loss.next_token_loss_sum(model, micro_batch, **added)
        ledger.begin("backward")
        return summed

    # the first step makes the optimizer's state, of gradients that are zero where a first use lays out nothing else
    first = 1 if setting.placement.framework in ("fully_shard", "zero") else 0
    for is_last, micro_batches in ((False, first), (True, setting.accumulation)):
        accelerator.gradient_accumulation_steps, accelerator.step = max(1, micro_batches), 0
        ledger.calls = Calls() if counts and is_last else None
        ledger.tell([*model.parameters(), *model.buffers()], "weights")  # again: the first use may lay shards out anew
        _tell_engine(ledger, model)
        if micro_batches:
            given_out = _given_out([micro_batch] * micro_batches, ledger, model)
            step.backward(accelerator, model, loss_sum, given_out, divide_by=setting.tokens)
        if ledger.phase != "step":
            ledger.begin("step")
        for weight in model.parameters() if not micro_batches else ():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        step.step_if_finite(accelerator, model, optimizer, 1.0)


def _given_out(micro_batches: Sequence[Any], ledger: Ledger, model: torch.nn.Module) -> Iterator[Any]:
    """Each when the one before it is done: then its gradients are there."""
    for place_in_step, micro_batch in enumerate(micro_batches):
        gc.collect()
        ledger.begin("forward", micro_batch=place_in_step)
        yield micro_batch
        ledger.tell([p.grad for p in model.parameters() if p.grad is not None], "gradients")


def _tell_engine(ledger: Ledger, model: torch.nn.Module) -> None:
    """What an engine keeps, beside the model's parameters."""
    if engine := engine_of(model):
        from finetune.compat.traced_engine import held_by

        for category, tensors in held_by(engine).items():
            ledger.tell(tensors, category)


def _tell_layers(ledger: Ledger, model: torch.nn.Module, layers: int) -> None:
    """Have the ledger know when each layer's forward and backward pass begins."""
    every = decoder_layers(model, layers)

    def begins(place: int | None) -> None:
        if ledger.phase == "forward":  # else it is recomputed
            ledger.begin("forward", place)

    def left(place: int, output: Any) -> None:
        begins(place + 1 if place + 1 < layers else None)
        hidden = output[0] if isinstance(output, tuple) else output
        if ledger.phase == "forward" and hidden.requires_grad:
            hidden.register_hook(lambda _: ledger.begin("backward", place))

    def entered(hidden: torch.Tensor) -> None:
        begins(0)
        if ledger.phase == "forward" and hidden.requires_grad and not hidden.is_leaf:
            hidden.register_hook(lambda _: ledger.begin("backward"))

    every[0].register_forward_pre_hook(
        lambda module, args, kwargs: entered(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    for place, layer in enumerate(every):
        layer.register_forward_hook(lambda module, args, output, place=place: left(place, output))


def _micro_batch(setting: Setting) -> tuple[torch.Tensor, dict[str, Any]]:
    """Every row of the longest length; flat, each a document of the one row."""
    if not setting.flat and setting.context == 1:
        shape = (setting.micro_batch_size, setting.row_tokens)
        labels: Any = torch.zeros(shape, dtype=torch.int64)
        labels.line_tokens = torch.full((setting.micro_batch_size,), setting.row_tokens)
        return labels, {"input_ids": torch.zeros(shape, dtype=torch.int64)}
    with without_modes():  # the bounds of documents are read
        bounds = document_bounds([setting.own_row_tokens] * setting.micro_batch_size, torch.device("cpu"))
    return torch.zeros(1, setting.tokens, dtype=torch.int64), {
        "input_ids": torch.zeros(1, setting.tokens, dtype=torch.int64),
        **bounds,
    }


def _context_share(setting: Setting, *, real: bool) -> ContextShare:
    """Of rows that each are one document. Real shares see half a chunk less than a whole row and a chunk: for which
    here there is one more."""
    size, rows = setting.context, setting.micro_batch_size
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, setting.world_size, size)]
    group, how, here = groups[dist.get_rank() // size], distributed.HOW[setting.strategy], torch.device("cpu")
    if real:
        return ContextShare.of([setting.row_tokens] * rows, group, how, here)
    with without_modes():
        order = torch.zeros(setting.tokens * size, dtype=torch.int64)
        keys = torch.zeros(setting.tokens * (size + 1), dtype=torch.int64)
        bounds = Bounds.of([number * setting.row_tokens for number in range(rows + 1)], here)
    return ContextShare(group, how, order[: setting.tokens], order, order, (keys,), bounds, bounds, bounds)
