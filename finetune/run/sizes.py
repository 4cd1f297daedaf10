"""What a run will take, and what of its sizes is left to the planner: micro-batch and activation checkpointing."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from finetune import distributed, planner
from finetune.config import sections
from finetune.config.refusals import planner_problems
from finetune.config.strategy_names import SIZES
from finetune.data.batches import Batches
from finetune.data.streaming import Stream
from finetune.errors import InputError, RunStopped, refuse_if_any
from finetune.models.pipeline_order import deferred_share
from finetune.models.spec import ModelSpec
from finetune.optim.rounded_adamw import has_kernel
from finetune.planner import REPLICAS, RunPlan, Setting
from finetune.trace.setting import APART
from finetune.trace.tracer import Tracer


@dataclass(frozen=True)
class Sizes:
    """Decided once, and the same on all processes: see ``agreed``."""

    micro_batch_size: int
    recomputed_layers: int | None
    """How many layers are computed again in the backward pass, the first ones; None for all."""
    offloads_activations: bool
    """Whether what these keep is in host memory."""
    flat: bool
    """The rows of a micro-batch lie end to end, without padding."""

    def agreed(self, everyone: list["Sizes"]) -> "Sizes":
        """Those of the whole run, given those of each process, of which some may have smaller GPUs than others.

        Raises:
            InputError: if the planner chose different micro-batches, or some GPUs need padding and others do not.
        """
        if len({each.flat for each in everyone}) > 1:
            raise InputError(
                "The processes have different GPUs, of which only some can compute rows without padding; set "
                "model.attention to sdpa."
            )
        if len({each.micro_batch_size for each in everyone}) > 1:
            raise InputError(
                "The processes have different GPUs, for which the planner chose different micro-batches; set "
                "train.micro_batch_size to a number."
            )
        layers = [each.recomputed_layers for each in everyone]
        most = None if None in layers else max(filter(None, layers), default=0)
        return replace(
            self, recomputed_layers=most, offloads_activations=any(each.offloads_activations for each in everyone)
        )

    def written_into(self, train: sections.Train) -> sections.Train:
        """The section with these sizes where it left them open."""
        recomputed = {0: "none", None: "full"}.get(self.recomputed_layers, self.recomputed_layers)
        chosen = {
            "micro_batch_size": self.micro_batch_size,
            "activation_checkpointing": "offload" if self.offloads_activations else recomputed,
        }
        return train.model_copy(update=chosen)


@dataclass(frozen=True)
class Planned:
    """The plan of a run, or why there is none."""

    plan: RunPlan | None
    lines: list[str]
    """For the run's output."""
    sizes: Sizes


def plan_of(cfg: sections.Run, launch: distributed.Strategy, spec: ModelSpec, batches: Batches | Stream) -> Planned:
    """What the run will take by the planner, and its choice of what is left open. A run can do without.

    Raises:
        InputError: if it cannot fit, or if the planner cannot tell and is asked to choose the micro-batch.
    """
    lengths = [sum(len(row.tokens) for row in documents) for documents in batches.heaviest()]
    longest = -(-sum(lengths) // len(lengths)) if batches.flat else max(lengths)
    config, problems = spec.config.to_dict(), list[str]()
    config.pop("_name_or_path", None)  # wherever it was read from, its traces are the same
    try:
        with Tracer(config, row_tokens=longest) as tracer:
            plan = _plan(cfg, launch, spec, batches, planner.Model(config, tracer), longest)
            if cfg.train.plan_check == "on":
                problems = plan.problems()
    except (InputError, RunStopped) as error:
        why = str(error).replace("\n", " ")
        if cfg.train.micro_batch_size == "auto":
            raise InputError(
                f"train.micro_batch_size: auto lets the planner choose. {why} Set it to a number."
            ) from error
        recomputed = cfg.train.recomputed_layers
        sizes = Sizes(cfg.train.micro_batch_size, recomputed, cfg.train.offloads_activations, batches.flat)
        return Planned(None, [f"plan: none. {why}"], sizes)
    refuse_if_any(problems)
    chosen = plan.setting
    recomputed = chosen.recomputed_layers if chosen.activation_checkpointing else 0
    sizes = Sizes(chosen.micro_batch_size, recomputed, chosen.offloads_activations, batches.flat)
    return Planned(plan, plan.describe(), sizes)


def _plan(
    cfg: sections.Run,
    launch: distributed.Strategy,
    spec: ModelSpec,
    batches: Batches | Stream,
    model: planner.Model,
    longest: int,
) -> RunPlan:
    train = cfg.train
    refuse_if_any(planner_problems(cfg.model.attention))
    if launch.replicas > 1 and launch.replicas != REPLICAS:
        raise InputError(f"The planner does not know {launch.replicas} replicas.")
    left_open: dict[str, Any] = {
        "micro_batch_size": None if train.micro_batch_size == "auto" else train.micro_batch_size,
        "activation_checkpointing": None if train.activation_checkpointing == "auto" else train.recomputes,
    }
    setting = Setting.of(
        cfg,
        adapter=cfg.adapter.type,
        bits=spec.quantised_bits,
        world_size=launch.world_size,
        precision=launch.mixed_precision,
        row_tokens=longest,
        token_rows=len(spec.new_tokens.rows),
        triton=launch.rehearsal or has_kernel(),
        # traced by our own attention, which a GPU computes in 16 bits only: other rows are planned as if padded
        flat=batches.flat
        and model.anatomy.keeps_apart
        and distributed.compute_dtype(launch, train.weights) != torch.float32,
    )
    return planner.plan_run(
        model,
        replace(setting, strategy=launch.name, **{each: getattr(launch, each) for each in APART}),
        machines=distributed.machines_of(launch),
        global_batch_size=train.global_batch_size,
        mean_row_tokens=longest if cfg.data.packing else batches.mean_document_tokens * (1 + batches.paired),
        mean_document_tokens=batches.mean_document_tokens,
        attended_tokens=batches.attended_tokens,
        **left_open,
    )


def advice_on_memory(cfg: sections.Run, launch: distributed.Strategy) -> str:
    """What of a configuration would take less memory, the cheapest first."""
    rows = cfg.train.least_micro_batch_size
    zero_bubble = cfg.train.pipeline_schedule == "zero_bubble"
    deferred = deferred_share(float(zero_bubble), adapter=cfg.adapter.type, fp8=cfg.model.fp8)
    smaller = {
        "train.pipeline_schedule 1f1b": bool(deferred) and cfg.train.pipeline_parts == 1,
        "train.pipeline_parts 1": cfg.train.pipeline_parts > 1,
        f"train.micro_batch_size {rows // 2}": rows > 1,
        "train.activation_checkpointing full": cfg.train.activation_checkpointing not in ("full", "offload"),
        "train.activation_checkpointing offload": cfg.train.activation_checkpointing == "full",
        f"data.max_length {cfg.data.max_length // 2}": True,
        "train.optimizer adamw_8bit": cfg.train.optimizer == "adamw",
        "train.ema_decay 0": cfg.train.averages,
        "adapter.type lora": cfg.adapter.type == "none",
        "quantization.bits 4": cfg.adapter.type != "none" and cfg.quantization.bits == "none",
    }
    changes = ", ".join(change for change, helps in smaller.items() if helps)
    return f"Set one of {changes}; or launch {_on_more(launch)}."


def _on_more(launch: distributed.Strategy) -> str:
    """GPUs than there are, of which each then has less."""
    if not (sizes := SIZES.get(launch.name)):
        return f"on more GPUs than {launch.world_size} with a strategy that shards"
    return " or ".join(f"with more {size.what} than {getattr(launch, size.field)} (--{size.key})" for size in sizes)
