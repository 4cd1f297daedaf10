"""Everything about a run that can be refused before it loads or writes anything, in the order in which it is known.

``check`` (configuration, launch, folder, model), then ``row_problems`` (the rows, as the model takes them). ``finetune
data`` calls the same functions for what it looks at. What a configuration alone shows is in
``finetune.config.refusals`` and ``config.compatibility``, which ``finetune plan`` shares: it imports no PyTorch.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from finetune import checkpoint, distributed
from finetune.checkpoint import resuming
from finetune.checkpoint.reader import Checkpoint
from finetune.config import adapter_file, sections
from finetune.config.compatibility import (
    averaging_problems,
    context_problems,
    expert_problems,
    fp8_problems,
    heads_problems,
    pipeline_problems,
    router_problems,
    scaling_problems,
    shard_problems,
    split_problems,
    spread_problems,
    stage_problems,
)
from finetune.config.recipe_classes import PairedRun
from finetune.config.refusals import (
    adapter_init_problems,
    batch_problems,
    position_problems,
    question_problems,
    resumption_problems,
    schedule_problems,
    task_problems,
    unused_adapter_keys,
)
from finetune.data import columns, sources, streaming
from finetune.data.named_templates import NAMED
from finetune.data.rows import Rows
from finetune.data.sources import Source, named_sources
from finetune.errors import InputError, refuse_if_any
from finetune.models import adapter as adapters
from finetune.models import (
    adapter_start,
    continued_adapter,
    expert_layers,
    fp8,
    loading,
    new_tokens,
    packing_support,
    pipeline_stages,
    quantization,
    recomputation,
    routers,
    tensor_plan,
    weights,
)
from finetune.models.spec import ModelSpec
from finetune.output import output_folder, run_files
from finetune.run import trackers
from finetune.scoring.scores import score_of
from finetune.trace import asking

Configuration = TypeVar("Configuration", bound=sections.Run)


def check(cfg: sections.Run, launch: distributed.Strategy) -> ModelSpec:
    """Refuse what the configuration, the launch, the folder and the model's files tell.

    Once there is nothing to refuse, what will trace the run's step begins to start, while the run reads its data.

    Returns:
        The model, of which nothing but its configuration and the headers of its files has been read.

    Raises:
        InputError: with every problem of the first kind that has some.
    """
    loading.quiet()
    method = _method(cfg)
    bits = None if cfg.quantization.bits == "none" else cfg.quantization.bits
    refuse_if_any(
        distributed.problems(launch, bits=bits, **method)
        + averaging_problems(launch.name, averages=cfg.train.averages)
        + context_problems(
            launch.name,
            embedding_noise=cfg.train.neftune_alpha > 0,
            paired=isinstance(cfg, PairedRun),
            attention=cfg.model.attention,
        )
        + pipeline_problems(
            launch.name,
            parts=cfg.train.pipeline_parts,
            schedule=cfg.train.pipeline_schedule,
            paired=isinstance(cfg, PairedRun),
            embedding_noise=cfg.train.neftune_alpha > 0,
        )
        + _fp8_problems(cfg, launch, bits)
        + scaling_problems(launch.name, precision=launch.mixed_precision)
        + batch_problems(cfg.train.global_batch_size, cfg.train.least_micro_batch_size, launch.data_processes)
        + configuration_problems(cfg)
        + trackers.problems(cfg.log.trackers)
        + folder_problems(cfg)
    )
    resumes_from, _ = checkpoint.look_for(cfg.checkpoint.resume, Path(cfg.train.output_dir))
    if resumes_from:
        weights_only = resuming.restarts_optimizer(resumes_from, cfg.checkpoint, cfg.train)
        precision = launch.mixed_precision
        now = cfg.model_dump()
        refuse_if_any(
            resuming.config_problems(resumes_from, now, precision=precision, weights_only=weights_only)
            + (resuming.rate_problems(resumes_from, cfg.train.learning_rate) if cfg.has_default_adapter_rate else [])
        )
    dtype = distributed.compute_dtype(launch, cfg.train.weights)
    template = cfg.data.chat_template
    packing = cfg.data.packing is True
    rows = new_tokens.grown_rows_of(resumes_from.contents["run"]) if resumes_from else None
    spec = ModelSpec.read(
        cfg.model, cfg.quantization, packing=packing, dtype=dtype, chat_template=template, grown_rows=rows
    )
    stored_bits = spec.stored_bits
    refuse_if_any(
        model_problems(spec, cfg.data, dtype)
        + _context_problems(spec, launch, dtype)
        + new_tokens.problems(spec.skeleton, spec.new_tokens, cfg.adapter)
        + (distributed.problems(launch, bits=stored_bits, **method) if stored_bits and not bits else [])
        + (_init_problems(cfg, stored_bits, is_stored=True) if stored_bits else [])
        + (_fp8_problems(cfg, launch, stored_bits) if stored_bits and not bits else [])
    )
    refuse_if_any(_layer_problems(cfg, launch, spec.skeleton))
    refuse_if_any(_part_problems(cfg, launch, spec))
    if Path(cfg.model.path).is_dir():  # those of the hub are downloaded once all else is known to be right
        weight_files(spec, cfg.adapter)
    if cfg.adapter.type != "none":
        _check_adapter(cfg, launch, spec)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        asking.get_ready()
    return spec


def _layer_problems(cfg: sections.Run, launch: distributed.Strategy, skeleton: PreTrainedModel) -> list[str]:
    """What the model's layers do not allow."""
    asked = cfg.train.router_aux_loss_coef
    return (
        (fp8.problems(skeleton) if cfg.model.fp8 else [])
        + recomputation.problems(skeleton, cfg.train.recomputed_layers, offloads=cfg.train.offloads_activations)
        + router_problems(
            launch.name,
            type(skeleton).__name__,
            coefficient=routers.own_coefficient(skeleton) if asked is None else asked,
            balances=routers.top_k_of(skeleton) is not None,
            paired=isinstance(cfg, PairedRun),
        )
    )


def _check_adapter(cfg: sections.Run, launch: distributed.Strategy, spec: ModelSpec) -> None:
    """Refuse an adapter that the model cannot have, or the strategy cannot divide.

    Raises:
        InputError: with every problem of the first kind that has some.
    """
    skeleton, new = spec.skeleton, spec.new_tokens
    refuse_if_any(
        adapters.problems(
            skeleton,
            targets=cfg.adapter.targets,
            modules_to_save=cfg.adapter.modules_to_save,
            quantised=spec.quantised_bits is not None,
            patterns={"rank_pattern": cfg.adapter.rank_pattern, "alpha_pattern": cfg.adapter.alpha_pattern},
        )
        + adapters.unreached_target_problems(skeleton, cfg.adapter)
        + (quantization.model_problems(skeleton) if spec.quantised_bits else [])
    )
    refuse_if_any(continued_adapter.problems(skeleton, cfg.adapter, new) if cfg.adapter.from_ else [])
    refuse_if_any(adapter_start.problems(skeleton, cfg.adapter, files=None))
    shards_layers = launch.shards_parts and launch.tensor > 1
    if shards_layers or cfg.adapter.init != "default":
        adapted = adapters.on_a_copy(skeleton, cfg.adapter)
        refuse_if_any(adapter_start.layer_problems(adapted, cfg.adapter))
        refuse_if_any(shard_problems(launch.name, tensor_plan.bundled(adapted, launch.tensor)) if shards_layers else [])


def configuration_problems(cfg: sections.Run) -> list[str]:
    """What the configuration and a look at the file system tell."""
    held_out = named_sources(cfg.data.eval)
    return (
        loading.problems(cfg.model.path, cfg.model.tokenizer, cfg.data.chat_template)
        + sources.problems(named_sources(cfg.data.train) + held_out)
        + columns.problems(cfg.data.columns)
        + held_out_problems(held_out)
        + (streaming.problems(cfg.data.eval, cfg.train.steps) if cfg.data.streaming else [])
        + question_problems(cfg.eval, cfg.data.eval)
        + task_problems(cfg.eval.tasks)
        + scoring_problems(cfg.eval.tasks)
        + unused_adapter_keys(cfg.adapter)
        + _init_problems(cfg, cfg.quantization.bits, is_stored=False)
        + schedule_problems(cfg.train)
        + resumption_problems(cfg.checkpoint)
    )


def _fp8_problems(cfg: sections.Run, launch: distributed.Strategy, bits: int | None) -> list[str]:
    known = {"strategy": launch.name, "precision": launch.mixed_precision}
    return fp8_problems(cfg.model.fp8, **known, bits=bits, capability=packing_support.own_capability())


def _init_problems(cfg: sections.Run, bits: int | str, *, is_stored: bool) -> list[str]:
    random_weights = cfg.model.random_weights
    return adapter_init_problems(cfg.adapter, bits, is_stored=is_stored, random_weights=random_weights)


def folder_problems(cfg: sections.Run) -> list[str]:
    """Why the run may not write to its output folder."""
    folder = Path(cfg.train.output_dir)
    named = named_sources(cfg.data.train) + named_sources(cfg.data.eval)
    named += [Source(task.data) for task in cfg.eval.tasks]
    if cfg.adapter.from_ and _replaces_adapter(cfg, Path(cfg.adapter.from_)):
        return ["adapter.from is the result that this run would replace; choose another train.output_dir."]
    return output_folder.problems(
        folder,
        overwrite=cfg.train.overwrite,
        resumes=resuming.is_in(cfg.checkpoint.resume, folder),
        inputs=[source.path for source in named]
        + [file for file in [cfg.data.chat_template] if file and file not in NAMED]
        + [path for path in [cfg.adapter.from_] if path and folder.resolve() == Path(path).resolve().parent],
    )


def _replaces_adapter(cfg: sections.Run, continued: Path) -> bool:
    """Whether a run begins that will put its result where the adapter lies that it continues from.

    One that was interrupted has not replaced it yet, and may be resumed.
    """
    source, folder = adapter_file.folder_of(continued) or continued, Path(cfg.train.output_dir)
    places = (source.resolve(), source.parent.resolve() / source.name)
    if folder.resolve() / "final" not in places:
        return False
    resume = cfg.checkpoint.resume
    return not resuming.is_in(resume, folder) or checkpoint.look_for(resume, folder)[0] is None


def room_problems(
    cfg: sections.Run, spec: ModelSpec, steps: int, trained: Mapping[str, tuple[int, ...]], own: Checkpoint | None
) -> list[str]:
    """Why the disk of the output folder has no space for the run's checkpoints and its result.

    Args:
        trained: shapes of the trained weights.
        own: the checkpoint of this run that it resumes from.
    """
    keeps_best = cfg.eval.keep_best
    at_once = resuming.checkpoints_at_once(cfg.checkpoint, steps, best_of_every=cfg.eval.every if keeps_best else 0)
    result = sum(each.numel() * each.dtype.itemsize for each in spec.skeleton.parameters())
    if cfg.adapter.type != "none":  # which is saved as it was trained
        result = sum(map(math.prod, trained.values())) * (2 if cfg.train.weights == "bf16" else 4)
    return checkpoint.room_problems(
        Path(cfg.train.output_dir),
        resuming.bytes_of(trained, cfg.train),
        at_once=at_once,
        keeps_best=keeps_best,
        result_bytes=result,
        resumed_step=own.step if own else None,
    )


def model_problems(spec: ModelSpec, data: sections.Data, dtype: torch.dtype) -> list[str]:
    """Why the model cannot be loaded as requested, or cannot take rows that are packed.

    Args:
        dtype: in which it computes.
    """
    found = quantization.problems(spec.config, spec.bits)
    if packing_support.reads_both_ways(spec.skeleton):
        kind = spec.config.model_type
        found.append(f"model.path: {kind} shows each token those that follow it; use a model that generates text.")
    found += loading.attention_problems(spec.config, spec.section.attention, spec.section.trust_remote_code)
    if data.packing is True:  # rows that cut through documents are one document each
        found += packing_support.problems(
            spec.config,
            attention=spec.attention,
            dtype=dtype,
            capability=packing_support.own_capability(),
            own_code=spec.section.trust_remote_code,
        )
    return found


def _context_problems(spec: ModelSpec, launch: distributed.Strategy, dtype: torch.dtype) -> list[str]:
    if launch.context == 1:
        return []
    capability, own_code = packing_support.own_capability(), spec.section.trust_remote_code
    reasons = packing_support.why_not_spread(spec.config, dtype=dtype, capability=capability, own_code=own_code)
    heads, key_heads = packing_support.heads_of(spec.config)
    return spread_problems(launch.name, reasons) or heads_problems(launch.name, launch.context, heads, key_heads)


def _part_problems(cfg: sections.Run, launch: distributed.Strategy, spec: ModelSpec) -> list[str]:
    """Why the model cannot be divided into what the strategy gives each process: stages, parts of layers, experts."""
    skeleton, kind = spec.skeleton, type(spec.skeleton).__name__
    found = expert_problems(kind, expert_layers.experts_of(skeleton), launch.experts)
    if launch.stages > 1:
        layers = len(pipeline_stages.units_of(skeleton))
        found += stage_problems(launch.name, kind, layers, launch.stages, cfg.train.pipeline_parts)
    if launch.tensor > 1:
        saved = sorted(tensor_plan.split_names(skeleton) & set(cfg.adapter.modules_to_save))
        reasons = list(tensor_plan.why_not(skeleton, launch.tensor, bits=spec.quantised_bits))
        found += split_problems(launch.name, reasons, saved)
    return found


def weight_files(spec: ModelSpec, adapter: sections.Adapter) -> list[Path]:
    """The files of the model's weights, which belong to it by their headers; none where random ones are drawn.

    Raises:
        InputError: if files are missing, damaged or those of another model, or not what the adapter's start needs.
    """
    if spec.section.random_weights:
        return []
    files = weights.files(spec.section.path, spec.section.revision)
    refuse_if_any(weights.problems(spec.stored_skeleton, files))
    if adapter.init == "loftq":
        refuse_if_any(adapter_start.problems(spec.skeleton, adapter, files))
    return files


def row_problems(train: Rows | None, held_out: Rows | None, data: sections.Data, spec: ModelSpec) -> list[str]:
    """What the tokenised rows have that the model cannot take.

    Args:
        train: None where the rows of a stream are not read yet; then, as with rows at hand of data that a run would
            stream, each may have ``max_length`` tokens.
    """
    lengths = [int(rows.lengths.max()) for rows in (None if data.streaming else train, held_out) if rows is not None]
    longest = max([data.max_length, *lengths] if data.streaming or train is None else lengths)
    vocabulary: int = spec.text_config.vocab_size
    return vocabulary_problems([train, held_out], vocabulary) + position_problems(
        longest, loading.most_positions(spec.text_config)
    )


def scoring_problems(tasks: Sequence[sections.Task]) -> list[str]:
    """Scores of eval.tasks that there are not, and data that are not there."""
    found = [f"eval.tasks: {task.name}: {each}" for task in tasks for each in sources.problems([Source(task.data)])]
    for task in tasks:
        try:
            score_of(task.score)
        except InputError as error:
            found += [f"eval.tasks: {task.name}: {problem}" for problem in error.problems]
    return found


def held_out_problems(entries: Sequence[Source]) -> list[str]:
    """Weights in data.eval, where they would mean nothing: the loss is that of every held-out row."""
    return [
        f"data.eval: {entry.path} has the weight {entry.weight:g}, but held-out rows count once each; remove the "
        "weight."
        for entry in entries
        if entry.weight != 1
    ]


def vocabulary_problems(read: Sequence[Rows | None], vocabulary: int) -> list[str]:
    """Tokens that the model has no embedding for."""
    largest = max((rows.summary["largest_token"] for rows in read if rows is not None), default=0)
    return streaming.vocabulary_problems(largest, vocabulary)


def as_restarted(cfg: Configuration, launch: distributed.Strategy) -> Configuration:
    """The configuration of a process that its launcher started in place of one that died: it resumes what that began,
    or begins as that did, if it has saved nothing.

    Another launch finds the configuration as it is.
    """
    if not distributed.was_restarted():
        return cfg
    folder, resume = Path(cfg.train.output_dir), cfg.checkpoint.resume
    if run_files.identity_of_run(folder).get("launcher") != distributed.launcher_of(launch):
        return cfg
    is_from_elsewhere = resume not in ("none", "auto") and not checkpoint.has_saved(folder)
    return cfg.model_copy(
        update={
            "checkpoint": cfg.checkpoint.model_copy(update={"resume": resume if is_from_elsewhere else "auto"}),
            "train": cfg.train.model_copy(update={"overwrite": is_from_elsewhere}),  # what that began
        }
    )


def _method(cfg: sections.Run) -> dict[str, str]:
    return {"adapter": cfg.adapter.type, "optimizer": cfg.train.optimizer, "weights": cfg.train.weights}
