"""Supervised fine-tuning of a causal language model on conversations.

  accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \\
    recipes/sft.py --config recipes/configs/sample.yaml --train.learning_rate 1e-5

The strategy file decides how the work is spread, and never changes the result. Without the launcher,
`python recipes/sft.py ...` runs on one process.
"""

from finetune import start_up

if __name__ == "__main__":
    start_up.end_at_once()  # on a signal, from here on: the imports below take seconds

import json
import math
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from accelerate.utils import gather_object

from finetune import checkpoint, distributed
from finetune import planner as plans
from finetune.cache import key_of
from finetune.checkpoint import resuming
from finetune.config import sections
from finetune.data import batches, collation, dataset, streaming
from finetune.data.encoding_workers import Settings
from finetune.data.preparation import identity_of
from finetune.data.sampler import batch_problems, micro_batches
from finetune.errors import InputError, RunInterrupted, RunStopped, refuse_if_any
from finetune.models import adapter as adapters
from finetune.models import attention, packing_support, quantization, weights
from finetune.models import loading as models
from finetune.models.flops import training_flops_per_token
from finetune.optim.optimizer import build_optimizer, state_bytes
from finetune.optim.schedule import learning_rate
from finetune.output import output_folder, run_files
from finetune.run import data_checks
from finetune.run.entry import run
from finetune.run.screen import Preparing, Screen
from finetune.seeds import seed_of
from finetune.start_up import is_first_process
from finetune.training import evaluation
from finetune.training.loss import next_token_loss_sum
from finetune.training.memory_check import check_memory
from finetune.training.meter import Meter
from finetune.training.step import backward, step_if_finite


class Config(sections.Section):
    model: sections.Model
    quantization: sections.Quantization = sections.Quantization()
    adapter: sections.Adapter = sections.Adapter()
    data: sections.Data
    train: sections.Train
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    eval: sections.Eval = sections.Eval()
    log: sections.Log = sections.Log()


def main(cfg: Config) -> None:
    # Everything that can be wrong is looked at before any weight is loaded.
    models.quiet()
    strategy = distributed.Strategy.from_environment()
    folder, offload_folder = Path(cfg.train.output_dir), Path(cfg.train.output_dir) / "nvme_offload"
    bits = None if cfg.quantization.bits == "none" else cfg.quantization.bits
    method = {"adapter": cfg.adapter.type, "optimizer": cfg.train.optimizer, "weights": cfg.train.weights}
    resume, overwrite = cfg.checkpoint.resume, cfg.train.overwrite
    launcher = distributed.launcher_of(strategy)
    if distributed.was_restarted() and run_files.identity_of_run(folder).get("launcher") == launcher:
        resume, overwrite = "auto", False  # the launcher goes on with what it has begun
    named = dataset.named_sources(cfg.data.train) + dataset.named_sources(cfg.data.eval)
    folder_problems = partial(
        output_folder.problems,
        folder,
        overwrite=overwrite,
        resumes=resuming.is_in(resume, folder),
        inputs=[source.path for source in named] + [file for file in [cfg.data.chat_template] if file],
    )
    refuse_if_any(
        distributed.problems(strategy, bits=bits, **method)
        + batch_problems(cfg.train.global_batch_size, rows_at_least(cfg.train), strategy.world_size)
        + data_checks.problems_before_reading(cfg.model, cfg.data, cfg.train)
        + folder_problems()
        + question_problems(cfg.eval, cfg.data.eval)
        + unused_adapter_keys(cfg.adapter)
    )
    resumes_from, _ = checkpoint.look_for(resume, folder)
    precision = strategy.mixed_precision
    if resumes_from:
        weights_only = resuming.restarts_optimizer(resumes_from, cfg.checkpoint.resume_weights_only)
        refuse_if_any(
            resuming.config_problems(resumes_from, cfg.model_dump(), precision=precision, weights_only=weights_only)
        )
    source: dict[str, Any] = {"revision": cfg.model.revision, "trust_remote_code": cfg.model.trust_remote_code}
    model_config = models.load_config(cfg.model.path, **source)
    stored_dtype, stored_bits = models.stored_dtype(model_config), quantization.stored_bits(model_config)
    quantised_bits = bits or stored_bits
    packed_by_default = cfg.data.packing and cfg.model.attention == "auto"
    attention_name = attention.PACKED if packed_by_default else cfg.model.attention
    refuse_if_any(
        quantization.problems(model_config, bits)
        + models.attention_problems(model_config, cfg.model.attention, cfg.model.trust_remote_code)
        + (distributed.problems(strategy, bits=stored_bits, **method) if stored_bits and not bits else [])
        + (
            packing_problems(model_config, attention_name, distributed.compute_dtype(strategy, cfg.train.weights))
            if cfg.data.packing
            else []
        )
    )
    skeleton = models.without_weights(model_config, cfg.model.trust_remote_code)
    if Path(cfg.model.path).is_dir():  # those of the hub are downloaded once all else is known to be right
        weights_of(cfg, skeleton)
    quantised_bytes, trains_tied_weights = 0, False
    if cfg.adapter.type != "none":
        refuse_if_any(
            adapters.problems(
                skeleton,
                targets=cfg.adapter.targets,
                modules_to_save=cfg.adapter.modules_to_save,
                quantised=quantised_bits is not None,
            )
            + (quantization.model_problems(skeleton) if quantised_bits else [])
        )
        quantised_bytes = quantization.quantised_bytes(skeleton, quantised_bits) if quantised_bits else 0
        trains_tied_weights = adapters.trains_tied_weights(skeleton, cfg.adapter.modules_to_save)

    # Data: before the process group exists, so that no collective waits for a tokenizer. One process prepares it.
    tokenizer = models.load_tokenizer(
        cfg.model.tokenizer or cfg.model.path, chat_template=cfg.data.chat_template, **source
    )
    rows, held_out = read_data(cfg, tokenizer, model_config)
    work = batches_of(cfg, tokenizer, model_config.get_text_config(), rows)
    asked = evaluation.questions(cfg.eval.prompts, held_out, tokenizer, compared=cfg.eval.exact_match)
    fingerprints = {
        "train": work.fingerprint,
        "eval": held_out.fingerprint if held_out else None,
        "tokenizer": key_of(identity_of(tokenizer)),
        "base": models.identity(
            cfg.model.path,
            revision=cfg.model.revision,
            weights=cfg.adapter.type != "none" and not cfg.model.random_weights,
        ),
    }
    if resume == "auto" and run_files.finished_steps(folder) == work.steps:
        if is_first_process():
            print(f"The run in {folder} is finished: its {work.steps:,} steps are done.")
        return

    # What it will take, and what is left to the planner to choose.
    planned, unplanned = plan_of(cfg, strategy, model_config, quantised_bits, work)
    refuse_if_any(planned.problems() if planned and cfg.train.plan_check == "on" else [])
    cfg = with_choices(cfg, planned)
    weight_files = weights_of(cfg, skeleton)
    same_run: dict[str, Any] = {"now": cfg.model_dump(), "precision": precision}
    work = batches_of(cfg, tokenizer, model_config.get_text_config(), rows)
    micro_batch_size = rows_at_least(cfg.train)
    accumulation = cfg.train.global_batch_size // (micro_batch_size * strategy.world_size)
    collate = partial(collation.collate, packed=cfg.data.packing)

    with checkpoint.hold(folder) if is_first_process() else nullcontext():  # one run at a time works in a folder
        if is_first_process():  # what the folder held may have changed while it was waited for
            refuse_if_any(folder_problems())

        # Start: from here on the processes work together.
        accelerator = distributed.start(
            strategy,
            accumulation=accumulation,
            micro_batch_size=micro_batch_size,
            max_grad_norm=cfg.train.max_grad_norm,
            optimizer=cfg.train.optimizer,
            weights=cfg.train.weights,
            largest_parameter=partial(models.largest_parameter, model_config, cfg.model.trust_remote_code),
            offload_folder=offload_folder,
        )
        if any(other != fingerprints for other in gather_object([fingerprints])):
            raise InputError("The processes read different data; make the data files the same on every machine.")
        shares = {"rank": strategy.rank, "world_size": strategy.world_size}
        refuse_if_any(gather_object(weights.not_finite(weight_files, **shares)))
        choices = gather_object([(micro_batch_size, recomputes(cfg.train))])
        if len({rows for rows, _ in choices}) > 1:
            raise InputError(
                "The processes have different GPUs, for which the planner chose different micro-batches; set "
                "train.micro_batch_size to a number."
            )
        recompute = any(recomputed for _, recomputed in choices)
        record = {
            "config": cfg.model_dump(),
            "strategy": {
                "name": strategy.name,
                "processes": strategy.world_size,
                "precision": strategy.mixed_precision,
            },
            "data": fingerprints,
            "chat_template": tokenizer.chat_template,
            "steps": work.steps,
            "plan": planned.record() if planned else None,
            "launcher": launcher,
            **run_files.environment(),
        }
        screen = Screen(shown=accelerator.is_main_process, total_steps=work.steps, every=cfg.log.every)
        screen.say(distributed.describe(strategy))
        if cfg.model.random_weights:
            screen.say(
                f"random weights drawn from seed {cfg.train.seed}, as model.random_weights asks: nothing learnt yet"
            )
        for line in work.describe() + (planned.describe() if planned else unplanned):
            screen.say(line)
        if held_out:
            screen.say(dataset.describe(held_out, "held-out"))
            if isinstance(work, batches.Batches) and (shared := dataset.shared_with(held_out, work.rows)):
                screen.say(
                    f"{shared:,} of the held-out rows are trained too, so the held-out loss says less than it seems"
                )

        # What it goes on from, looked for again: another run may have left it while this one waited for the folder.
        resumes_from = checkpoint.chosen(resume, folder, strategy, say=screen.say)
        refuse_if_any(resuming.step_problems(folder, resumes_from, work.steps) if resume != "none" else [])
        if resumes_from:
            weights_only = resuming.restarts_optimizer(resumes_from, cfg.checkpoint.resume_weights_only)
            refuse_if_any(
                resuming.config_problems(resumes_from, **same_run, weights_only=weights_only)
                + resuming.input_problems(resumes_from, fingerprints)
            )
        goes_on = resumes_from is not None and checkpoint.is_own(resumes_from, folder)
        record["id"] = gather_object([uuid4().hex])[0]
        if resumes_from and goes_on:
            record["id"] = resumes_from.contents["run"]["id"]

        # Model and optimizer.
        device = distributed.loading_device(accelerator, strategy, quantised_bytes)
        if device != accelerator.device:
            screen.say("Quantising on the CPU, for want of room on the GPU: up to a minute for each billion weights")
        dtype = distributed.compute_dtype(strategy, cfg.train.weights)
        with distributed.loading(
            accelerator,
            strategy,
            whole=cfg.model.random_weights or bool(quantised_bits),
            by_every_process=trains_tied_weights,
        ):
            model: Any = models.load_model(
                cfg.model.path,
                model_config,
                attention=attention_name,
                dtype=dtype,
                seed=cfg.train.seed,
                bits=bits,
                device=device,
                random_weights=cfg.model.random_weights,
                **source,
            )
        if cfg.adapter.type != "none":
            adapters.attach(
                model,
                kind=cfg.adapter.type,
                rank=cfg.adapter.rank,
                alpha=cfg.adapter.alpha,
                rank_stabilized=cfg.adapter.rank_stabilized,
                dropout=cfg.adapter.dropout,
                targets=cfg.adapter.targets,
                modules_to_save=cfg.adapter.modules_to_save,
                base=cfg.model.path,
                revision=cfg.model.revision,
                dtype=dtype,
                seed=cfg.train.seed,
            )
        trained_shapes = distributed.trained_shapes(model)
        if resumes_from:
            refuse_if_any(resuming.weight_problems(resumes_from, trained_shapes))
        checkpoint_bytes = resuming.bytes_of(trained_shapes, optimizer=cfg.train.optimizer, weights=cfg.train.weights)
        at_once = resuming.checkpoints_at_once(cfg.checkpoint, work.steps)
        refuse_if_any(checkpoint.room_problems(folder, checkpoint_bytes, at_once=at_once))
        if recompute:
            models.recompute_activations(model)
        optimizer = build_optimizer(
            model,
            name=cfg.train.optimizer,
            learning_rate=cfg.train.learning_rate,
            weight_decay=cfg.train.weight_decay,
            weights=cfg.train.weights,
            fused=distributed.fuses(accelerator),
            rounding_seed=cfg.train.seed * strategy.shards + strategy.shard,
        )
        flops = training_flops_per_token(**models.shape(model), mean_row_length=work.mean_document_tokens)
        model, optimizer = distributed.prepare(accelerator, strategy, model, optimizer, weights=cfg.train.weights)
        sharding = distributed.sharding_of(strategy, model, optimizer)
        record["strategy"]["sharding"] = sharding.record()
        screen.say(f"{sum(map(math.prod, trained_shapes.values())):,} trained weights; {sharding.describe()}")

        # The heaviest micro-batch of the run, once and for nothing: what does not fit fails now, not in hours.
        model.train()
        heaviest = work.heaviest()
        check_memory(
            accelerator,
            model,
            optimizer,
            next_token_loss_sum,
            collate(heaviest, accelerator.device),
            optimizer_bytes=state_bytes(model, cfg.train.optimizer),
            what=batches.describe_batch(heaviest),
            advice=advice_on_memory(cfg, strategy.world_size),
        )

        evaluate = partial(
            evaluation.evaluate,
            accelerator,
            model,
            next_token_loss_sum,
            micro_batch_size=micro_batch_size,
            collate=collate,
        )
        answers = partial(evaluation.answers, accelerator, model, tokenizer, asked, cfg.eval.max_new_tokens)
        finished: list[dict[str, Any]] = []
        with distributed.Interruption(strategy) as interruption, screen:
            saver = checkpoint.Saver(
                folder,
                rank=strategy.rank,
                world_size=strategy.world_size,
                keep=cfg.checkpoint.keep,
                gather=interruption.gather,
                expected_bytes=checkpoint_bytes,
            )

            def evaluates_after(step: int) -> bool:
                return step == work.steps or is_due(step, cfg.eval.every)

            def last_checkpoint() -> str:
                saver.finish()
                newest = checkpoint.describe_newest(folder)
                interruption.expect_the_end()
                return newest

            # All that could be refused has been: an earlier run may be replaced now, or gone on with.
            progress: dict[str, Any] = {"step": 0, "metrics": [], "counters": None, "answers": {}, "eval_loss": None}
            if resumes_from:
                checkpoint.restore(resumes_from, strategy, accelerator, model, optimizer, weights_only=weights_only)
                progress |= resumes_from.contents["progress"]
                length: dict[str, Any] = {"steps": work.steps, "tokens_of": lambda step: work.step(step).trained_tokens}
                for line in resuming.describe(resumes_from, **same_run, weights_only=weights_only, **length):
                    screen.say(line)
            metrics_file = run_files.Journal(folder / "metrics.jsonl")
            rejected_file = run_files.Journal(folder / "rejected.jsonl")
            if accelerator.is_main_process:
                for line in resuming.prepare_folder(folder, resumes_from if goes_on else None, overwrite=overwrite):
                    screen.say(line)
                run_files.write_run(folder, record)
                own_files = None if isinstance(cfg.data.eval, float) else held_out
                rejected_file.append(chain(work.newly_rejected(), dataset.rejected_lines(own_files)))
            if resumes_from:
                # The run may have ended between the checkpoint of a step and the evaluation after it: make up for it.
                step, metrics = progress["step"], progress["metrics"][-1]
                if goes_on:
                    metrics |= gather_object([run_files.read_metrics(folder)[0].get(step, {})])[0]
                is_lacking = "eval_loss" not in metrics and (goes_on or step == work.steps)
                if held_out and is_lacking and evaluates_after(step):
                    metrics["eval_loss"] = evaluate(held_out)
                    screen.say(f"step {step}: held-out loss {metrics['eval_loss']:.4f}")
                    if accelerator.is_main_process:
                        run_files.complete_metrics(folder, step, [metrics])
            else:
                if held_out:
                    progress["eval_loss"] = evaluate(held_out)
                    screen.say(f"held-out loss before training: {progress['eval_loss']:.4f}")
                progress["answers"] = answers()

            # Training.
            interruption.take_signals()
            model.train()
            meter = Meter(
                accelerator,
                flops_per_token=flops,
                peak_flops=distributed.peak_flops_of(accelerator),
                max_bad_steps=cfg.train.max_bad_steps,
                last_checkpoint=last_checkpoint,
                counters=progress["counters"],
            )
            for step in range(progress["step"] + 1, work.steps + 1):
                torch.manual_seed(seed_of(cfg.train.seed, step, strategy.rank))  # dropout, differently on each process
                batch = work.step(step)
                rate = learning_rate(
                    step,
                    total_steps=work.steps,
                    peak=cfg.train.learning_rate,
                    schedule=cfg.train.schedule,
                    warmup_ratio=cfg.train.warmup_ratio,
                )
                for group in optimizer.param_groups:  # before backward: DeepSpeed steps inside it
                    group["lr"] = rate

                losses = []
                for places in micro_batches(
                    batch.places,
                    rank=accelerator.process_index,
                    world_size=accelerator.num_processes,
                    micro_batch_size=micro_batch_size,
                ):
                    micro_batch = collate([work.documents(place) for place in places], accelerator.device)
                    losses.append(
                        backward(accelerator, model, next_token_loss_sum, micro_batch, divide_by=batch.trained_tokens)
                    )
                grad_norm = step_if_finite(accelerator, model, optimizer, cfg.train.max_grad_norm)

                finished = meter.update(
                    step=step,
                    rows=batch.sources,
                    losses=torch.stack(losses),
                    tokens=batch.trained_tokens,
                    row_tokens=batch.tokens,
                    total_tokens=batch.total_tokens,
                    grad_norm=grad_norm,
                    learning_rate=rate,
                    skipped=accelerator.optimizer_step_was_skipped,
                )
                asked_to_end, save_failed = interruption.agree(interruption.asked, saver.failed)
                evaluates = not asked_to_end and evaluates_after(step)
                saves_at_end = cfg.checkpoint.at_end and step == work.steps
                saves_now = asked_to_end or saves_at_end or is_due(step, cfg.checkpoint.every)
                if evaluates or saves_now:
                    finished += meter.flush()
                if save_failed:
                    saver.give_up()
                if saves_now:  # before the evaluation, which may take long, and is made up for by a run that goes on
                    progress |= {"step": step, "metrics": finished, "counters": meter.counters}
                    progress["measured"] = meter.measured()
                    stalled = checkpoint.save(
                        saver, strategy, accelerator, model, optimizer, run=record, progress=progress
                    )
                    finished[-1]["save_stall_seconds"] = stalled
                    meter.restart_clock()
                if evaluates and held_out:
                    finished[-1]["eval_loss"] = evaluate(held_out)
                    meter.restart_clock()
                rejected = work.newly_rejected()
                for metrics in finished:
                    screen.step(metrics)
                if accelerator.is_main_process:
                    for problem in metrics_file.append(map(json.dumps, finished)) + rejected_file.append(rejected):
                        screen.say(problem)
                ending = last_checkpoint() if asked_to_end else ""
                for problem in saver.problems():
                    screen.say(problem)
                if asked_to_end:
                    raise RunInterrupted(
                        f"{distributed.name_of(asked_to_end)} ended the run after step {step} of {work.steps}; {ending}."
                    )
            saver.finish()
            for problem in saver.problems() + metrics_file.close() + rejected_file.close():
                screen.say(problem)

            # Result.
            if nothing_learnt := meter.result_problem(work.steps):
                interruption.expect_the_end()
                raise RunStopped(nothing_learnt)
            metrics = finished[-1] if finished else progress["metrics"][-1]
            if held_out:
                record["eval_loss"] = {"before": progress["eval_loss"], "after": metrics["eval_loss"]}
            measured = meter.measured() if finished else progress.get("measured", meter.measured())
            record["measured"] = measured
            answers_after = answers()
            if cfg.eval.exact_match:
                record["exact_match"] = {
                    "rows": sum(question.expected is not None for question in asked),
                    "before": evaluation.exact_match(asked, progress["answers"]),
                    "after": evaluation.exact_match(asked, answers_after),
                }
            if accelerator.is_main_process:  # before final/, whose name stands for a run that is finished
                run_files.write_run(folder, record)
            with distributed.main_process_writes():
                run_files.save_final(
                    folder,
                    accelerator.unwrap_model(model),
                    tokenizer,
                    distributed.full_parameters(accelerator, model),
                    distributed.working_parameters(accelerator, model),
                    adapter_alone=cfg.adapter.type != "none",
                    shapes=trained_shapes,
                    dtype=stored_dtype,
                    card=run_files.model_card(cfg.model.path, record, metrics) if accelerator.is_main_process else None,
                    record=record,
                )
        if held_out:
            before, after = record["eval_loss"].values()
            screen.say(f"held-out loss: {before:.4f} before, {after:.4f} after training")
        if cfg.eval.exact_match:
            screen.say(run_files.describe_exact_match(record["exact_match"]))
        for line in planned.compare(**measured) if planned else []:
            screen.say(line)
        if answers_shown := evaluation.shown(asked, answers_after, cfg.eval.prompts):
            screen.answers(progress["answers"], answers_shown)
        if cfg.adapter.type == "none":
            screen.say(f"The fine-tuned model lies in {folder / 'final'}")
        else:
            screen.say(
                f"The adapter lies in {folder / 'final'}; a model of its own: finetune merge {folder} --output DIR"
            )
        distributed.finish(accelerator, strategy, offload_folder)


def weights_of(cfg: Config, skeleton: models.PreTrainedModel) -> list[Path]:
    """The files of the model's weights, which belong to it by their headers; none where random ones are drawn.

    Raises:
        InputError: if files are missing, damaged or those of another model.
    """
    if cfg.model.random_weights:
        return []
    files = weights.files(cfg.model.path, cfg.model.revision)
    refuse_if_any(weights.problems(skeleton, files))
    return files


def settings_of(cfg: Config) -> Settings:
    """How rows are read."""
    return Settings(
        format=cfg.data.format,
        train_on=cfg.data.train_on,
        max_length=cfg.data.max_length,
        split_key=cfg.data.split_key,
    )


def read_data(
    cfg: Config, tokenizer: models.PreTrainedTokenizerBase, model_config: models.PreTrainedConfig
) -> tuple[dataset.Rows | None, dataset.Rows | None]:
    """The training rows (None where they are streamed), and the held-out rows where there are some."""
    train = dataset.named_sources(cfg.data.train)
    held_out = cfg.data.eval if isinstance(cfg.data.eval, float) else dataset.named_sources(cfg.data.eval)
    settings, skip = settings_of(cfg), cfg.data.on_bad_row == "skip"
    with Preparing(shown=is_first_process()) as tell:
        if cfg.data.streaming:
            assert not isinstance(held_out, float)  # refused above
            rows, held = None, dataset.read_some(held_out, tokenizer, settings, skip_bad_rows=skip, tell=tell)
        else:
            rows, held = dataset.load(train, held_out, tokenizer, settings, skip_bad_rows=skip, tell=tell)
    refuse_if_any(data_checks.problems_of_rows(rows, held, cfg.data, model_config))
    return rows, held


def plan_of(
    cfg: Config,
    strategy: distributed.Strategy,
    model_config: models.PreTrainedConfig,
    bits: int | None,
    work: batches.Batches | streaming.Stream,
) -> tuple[plans.RunPlan | None, list[str]]:
    """What the run will take; or a line that says why the planner cannot tell, which ends no run that can do without.

    Raises:
        InputError: if it cannot tell, and is asked to choose the micro-batch.
    """
    train = cfg.train
    longest = max(sum(len(row.tokens) for row in documents) for documents in work.heaviest())
    mean_row = longest if cfg.data.packing else work.mean_document_tokens
    try:
        if cfg.model.attention == "eager":
            raise InputError("The planner counts no eager attention.")
        if strategy.replicas > 1 and strategy.replicas != plans.REPLICAS:
            raise InputError(f"The planner does not know {strategy.replicas} replicas.")
        return plans.plan_run(
            model_config.to_dict(),
            plans.Setting(
                strategy=strategy.name,
                world_size=strategy.world_size,
                bits=bits,
                adapter=cfg.adapter.type,
                rank=cfg.adapter.rank,
                dropout=cfg.adapter.dropout,
                targets=cfg.adapter.targets if isinstance(cfg.adapter.targets, str) else tuple(cfg.adapter.targets),
                modules_to_save=tuple(cfg.adapter.modules_to_save),
                optimizer=train.optimizer,
                weights=train.weights,
                precision=strategy.mixed_precision,
                row_tokens=longest,
                packing=cfg.data.packing,
            ),
            machines=distributed.machines_of(strategy),
            global_batch_size=train.global_batch_size,
            mean_row_tokens=mean_row,
            mean_document_tokens=work.mean_document_tokens,
            micro_batch_size=None if train.micro_batch_size == "auto" else train.micro_batch_size,
            activation_checkpointing=None if train.activation_checkpointing == "auto" else recomputes(train),
        ), []
    except InputError as error:
        why = " ".join(error.problems)
        if train.micro_batch_size == "auto":
            raise InputError(f"train.micro_batch_size: auto is up to the planner. {why} Set it to a number.") from error
        return None, [f"plan: none. {why}"]


def with_choices(cfg: Config, planned: plans.RunPlan | None) -> Config:
    """The configuration with what the planner chose; activations are kept where it could not tell."""
    chosen: dict[str, Any] = {"activation_checkpointing": "full" if recomputes(cfg.train) else "none"}
    if planned:
        chosen = {
            "micro_batch_size": planned.setting.micro_batch_size,
            "activation_checkpointing": "full" if planned.setting.activation_checkpointing else "none",
        }
    return cfg.model_copy(update={"train": cfg.train.model_copy(update=chosen)})


def batches_of(
    cfg: Config,
    tokenizer: models.PreTrainedTokenizerBase,
    model_config: models.PreTrainedConfig,
    rows: dataset.Rows | None,
) -> batches.Batches | streaming.Stream:
    """The batches of the run."""
    form: dict[str, Any] = {
        "packing": cfg.data.packing,
        "global_batch_size": cfg.train.global_batch_size,
        "micro_batch_size": rows_at_least(cfg.train),
        "seed": cfg.train.seed,
    }
    steps = cfg.train.steps
    if rows is not None:
        return batches.Batches(rows, max_length=cfg.data.max_length, steps=steps, epochs=cfg.train.epochs, **form)
    assert steps is not None  # refused above
    return streaming.Stream(
        dataset.named_sources(cfg.data.train),
        tokenizer,
        settings_of(cfg),
        steps=steps,
        vocabulary=model_config.vocab_size,
        skip_bad_rows=cfg.data.on_bad_row == "skip",
        **form,
    )


def rows_at_least(train: sections.Train) -> int:
    """Rows of a micro-batch, as far as they are given."""
    return 1 if train.micro_batch_size == "auto" else train.micro_batch_size


def recomputes(train: sections.Train) -> bool:
    return train.activation_checkpointing == "full"


def is_due(step: int, every: int) -> bool:
    """Whether a step is one of every so many; never, for 0."""
    return every > 0 and step % every == 0


def unused_adapter_keys(adapter: sections.Adapter) -> list[str]:
    default = sections.Adapter()
    given = [key for key, value in adapter if value != getattr(default, key)] if adapter.type == "none" else []
    return [
        f"adapter.{key} is given, but adapter.type is none; set adapter.type to lora, or leave it out." for key in given
    ]


def question_problems(section: sections.Eval, held_out: object) -> list[str]:
    asks = {"prompts": isinstance(section.prompts, int) and section.prompts > 0, "exact_match": section.exact_match}
    return [
        f"eval.{key} asks for held-out conversations, but data.eval names none; set data.eval."
        for key, is_asked in asks.items()
        if is_asked and not held_out
    ]


def packing_problems(model_config: models.PreTrainedConfig, attention_name: str, dtype: torch.dtype) -> list[str]:
    on_gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if on_gpu else None
    return packing_support.problems(model_config, attention=attention_name, dtype=dtype, capability=capability)


def advice_on_memory(cfg: Config, world_size: int) -> str:
    """What of a configuration would take less memory, the cheapest first."""
    smaller = {
        f"train.micro_batch_size {rows_at_least(cfg.train) // 2}": rows_at_least(cfg.train) > 1,
        "train.activation_checkpointing full": not recomputes(cfg.train),
        f"data.max_length {cfg.data.max_length // 2}": True,
        "train.optimizer adamw_8bit": cfg.train.optimizer == "adamw",
        "adapter.type lora": cfg.adapter.type == "none",
        "quantization.bits 4": cfg.adapter.type != "none" and cfg.quantization.bits == "none",
    }
    changes = ", ".join(change for change, helps in smaller.items() if helps)
    return f"Set one of {changes}; or launch on more GPUs than {world_size} with a strategy that shards."


if __name__ == "__main__":
    run(main, Config)
