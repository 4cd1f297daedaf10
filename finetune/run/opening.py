"""How a run begins: its processes, what it reads, the record of what was asked for, and its first lines."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from finetune import distributed
from finetune.cache import key_of
from finetune.config import sections
from finetune.data import dataset
from finetune.data.batches import Batches
from finetune.data.rows import Rows, identity_of
from finetune.data.stages import Staged
from finetune.data.streaming import Stream
from finetune.errors import refuse_if_any
from finetune.models import continued_adapter, deferred_gradients, fp8, fused, loading
from finetune.models.pipeline_order import Order, deferred_share, waited_for
from finetune.models.recomputation import layers_of
from finetune.models.spec import ModelSpec
from finetune.optim import rounded_adamw
from finetune.optim.schedule import describe_warmup
from finetune.output import run_files
from finetune.output.run_record import RunRecord
from finetune.planner import RunPlan
from finetune.run import agreement
from finetune.run.sizes import Sizes
from finetune.training.loss import Objective
from finetune.training.task_scores import Task


def join(
    cfg: sections.Run,
    launch: distributed.Strategy,
    spec: ModelSpec,
    sizes: Sizes,
    inputs: Mapping[str, str | None],
    collate: Callable[..., Any],
) -> tuple[Accelerator, Callable[..., Any], list[str]]:
    """Join the other processes, and agree with them on what is trained.

    Args:
        inputs: fingerprints of what is read.
        collate: makes micro-batches of whole rows.

    Returns:
        The Accelerator of the run, what makes this process's micro-batches, and lines on differences between processes
        that do no harm.

    Raises:
        InputError: on those that do, or if kernels that the run needs cannot be made.
    """
    accelerator = distributed.start(
        launch,
        accumulation=cfg.train.global_batch_size // (sizes.micro_batch_size * launch.data_processes),
        micro_batch_size=sizes.micro_batch_size,
        max_grad_norm=cfg.train.max_grad_norm,
        optimizer=cfg.train.optimizer,
        weights=cfg.train.weights,
        largest_parameter=lambda: spec.largest_parameter,
        offload_folder=offload_folder(cfg),
    )
    noticed = agreement.agree(cfg, launch, inputs)
    uses_triton = steps_in_one_kernel(cfg, launch) or (cfg.model.kernels == "auto" and kernels_of(launch) == "Liger")
    uses_triton |= cfg.model.fp8 and not launch.rehearsal
    problems = gather_object(rounded_adamw.kernel_problems(accelerator.device) if uses_triton else [])
    refuse_if_any(list(dict.fromkeys(problems)))  # once for a machine
    return accelerator, distributed.shared(collate, launch), noticed


def offload_folder(cfg: sections.Run) -> Path:
    """For what a strategy keeps on disk during the run."""
    return Path(cfg.train.output_dir) / "nvme_offload"


def fingerprints(
    cfg: sections.Run,
    tokenizer: PreTrainedTokenizerBase,
    batches: Batches | Stream,
    held_out: Rows | None,
    tasks: Sequence[Task],
    spec: ModelSpec,
    objective: Objective,
) -> dict[str, str | None]:
    """Of what is read: another run is known by them, and a process that reads something else.

    Of the base its weights too, where a checkpoint is of no use without them: one of an adapter, one that lacks what
    stays as it was, or one of a run whose loss compares with what it began with.
    """
    model = cfg.model
    needs_base = cfg.adapter.type != "none" or spec.keeps_of_base or objective.remembers_beginning
    found = {
        "train": batches.fingerprint,
        "eval": held_out.fingerprint if held_out else None,
        "tokenizer": key_of(identity_of(tokenizer)),
        "base": loading.identity(model.path, revision=model.revision, weights=needs_base and not model.random_weights),
    }
    found |= {"tasks": key_of([task.fingerprint for task in tasks])} if tasks else {}
    return found | continued_adapter.identity(cfg.adapter)


def new_record(
    cfg: sections.Run,
    launch: distributed.Strategy,
    spec: ModelSpec,
    read: dict[str, str | None],
    chat_template: Any,
    batches: Batches | Stream,
    held_out: Rows | None,
    plan: RunPlan | None,
) -> RunRecord:
    """The record of a run that begins, with an id of its own; collective.

    Args:
        read: fingerprints of what is read.
    """
    known = {"eval": dataset.figures([held_out])} if held_out else {}
    together = {"processes_of_a_row": launch.context} if launch.context > 1 else {}
    together |= {"stages": launch.stages} if launch.stages > 1 else {}
    together |= {"processes_of_a_layer": launch.tensor} if launch.tensor > 1 else {}
    together |= {"processes_of_the_experts": launch.experts} if launch.experts > 1 else {}
    if isinstance(batches, Batches):
        mixes = batches.mixes if isinstance(batches, Staged) else [batches]
        known = {"train": dataset.figures([mix.rows for mix in mixes])} | known
    return RunRecord(
        config=cfg.model_dump(),
        strategy={"name": launch.name, "processes": launch.world_size, "precision": launch.mixed_precision} | together,
        data=read,
        chat_template=chat_template,
        steps=batches.steps,
        plan=plan.record() if plan else None,
        kernels=spec.fused | {"computed_by": kernels_of(launch)} | _step_of(cfg, launch) | _in_fp8(spec),
        launcher=distributed.launcher_of(launch),
        environment=run_files.environment(),
        id=gather_object([uuid4().hex])[0],
        data_figures=known or None,
        new_tokens=spec.new_tokens.record(),
    )


def kernels_of(launch: distributed.Strategy) -> str:
    """Whose kernels compute what is one operation."""
    return fused.computed_by("cpu" if launch.rehearsal else "cuda")


def steps_in_one_kernel(cfg: sections.Run, launch: distributed.Strategy) -> bool:
    """Whether AdamW over bf16 weights is a kernel in Triton: on a GPU, where the weights are."""
    is_asked = cfg.train.weights == "bf16" and cfg.train.optimizer == "adamw" and cfg.model.kernels == "auto"
    return is_asked and not launch.rehearsal and not launch.offloads and rounded_adamw.has_kernel()


def _step_of(cfg: sections.Run, launch: distributed.Strategy) -> dict[str, str]:
    """Whose kernels step bf16 weights, as run.yaml says it."""
    if cfg.train.weights != "bf16" or cfg.train.optimizer != "adamw":
        return {}
    return {"stepped_by": "Triton" if steps_in_one_kernel(cfg, launch) else "PyTorch"}


def _in_fp8(spec: ModelSpec) -> dict[str, int]:
    """How many linear layers multiply in fp8, as run.yaml says it."""
    return {"linear layers in fp8": len(fp8.layers_of(spec.skeleton))} if spec.section.fp8 else {}


def order_of(cfg: sections.Run, launch: distributed.Strategy) -> Order:
    """In which micro-batches pass the stages of a pipeline."""
    return Order(launch.stages, cfg.train.pipeline_parts, cfg.train.pipeline_schedule)


def _waited_for(cfg: sections.Run, spec: ModelSpec, order: Order) -> float:
    """Of a stage's time for a micro-batch, what the next one waits for and cannot fill."""
    if not order.zero_bubble:
        return 1.0
    layers, again = len(layers_of(spec.skeleton)), cfg.train.recomputed_layers
    deferrable = deferred_gradients.share_of(spec.skeleton)
    deferred = deferred_share(deferrable, adapter=cfg.adapter.type, fp8=cfg.model.fp8)
    return waited_for(deferred, recomputed=1.0 if again is None else again / layers)


def bubble_line(order: Order, micro_batches: int, waited: float = 1.0) -> str:
    """How long the stages of a pipeline wait in a step.

    Args:
        waited: as ``Order.idle_share`` takes it.
    """
    share, stages = order.idle_share(micro_batches, waited), order.stages
    which = f"{stages} stages" + (f" of {order.parts} parts" if order.parts > 1 else "")
    more = order.computed(micro_batches) - micro_batches
    filled = f" and computes {more} that train{'s' if more == 1 else ''} nothing" if more else ""
    return (
        f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} in a step for {which}: each is idle{filled} "
        f"for {share:.0%} of it, less with more and smaller micro-batches"
        + (f", best a multiple of {stages}" if more else "")
    )


def introduction(
    cfg: sections.Run,
    launch: distributed.Strategy,
    spec: ModelSpec,
    batches: Batches | Stream,
    held_out: Rows | None,
    plan_lines: list[str],
) -> list[str]:
    """Lines for the run's output: strategy, rows, plan."""
    lines = [distributed.describe(launch)]
    if launch.stages > 1:
        at_a_time = cfg.train.least_micro_batch_size * launch.data_processes
        micro_batches = cfg.train.global_batch_size // at_a_time
        order = order_of(cfg, launch)
        lines.append(bubble_line(order, micro_batches, _waited_for(cfg, spec, order)))
    if cfg.model.random_weights:
        seed = cfg.train.seed
        lines.append(f"random weights drawn from seed {seed} (model.random_weights is set): the model is untrained")
    if cfg.adapter.from_:
        lines.append(f"the adapter continues from {continued_adapter.file_of(cfg.adapter).parent}")
    if cfg.has_default_adapter_rate:
        lines.append(f"train.learning_rate is not set: {cfg.train.learning_rate:g}, the default with an adapter")
    lines += describe_warmup(cfg.train, batches.steps)
    if cfg.adapter.init != "default":
        lines.append(f"the adapter's start is computed from the weights ({cfg.adapter.init})")
    lines += spec.new_tokens.describe()
    if cfg.train.averages:
        decay = f"averaging weights with decay {cfg.train.ema_decay:g}"
        lines.append(f"{decay}: the averages are what is evaluated and saved")
    lines += batches.describe()
    if not batches.flat:
        lines.append("micro-batches are padded to their longest row: model.attention, the model or the GPU needs it")
    if spec.fused:
        kinds = ", ".join(f"{count} {kind}s" for kind, count in spec.fused.items())
        lines.append(f"fused kernels ({kernels_of(launch)}): {kinds}")
    if spec.section.fp8:
        lines.append(f"{len(fp8.layers_of(spec.skeleton))} linear layers multiply in fp8 while training")
    if _step_of(cfg, launch):
        how = "in one kernel (Triton)" if steps_in_one_kernel(cfg, launch) else "in chunks, by PyTorch's operations"
        lines.append(f"bf16 weights are updated {how}")
    lines += plan_lines
    if held_out:
        lines.append(dataset.describe(held_out, "held-out"))
        if isinstance(batches, Batches) and (shared := dataset.shared_with(held_out, batches.rows)):
            lines.append(f"eval_loss is optimistic: {shared:,} of the held-out rows are in the training data too")
    return lines
