"""Supervised fine-tuning of a causal language model on conversations.

  accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \\
    recipes/sft.py --config recipes/configs/sample.yaml --train.learning_rate 1e-5

The strategy file decides how the work is spread, and never changes the result. Without the launcher,
`python recipes/sft.py ...` runs on one process.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from finetune import adapter as adapters
from finetune import attention, batches, config, data, output, packing_support, quantization, sources, streaming
from finetune import model as models
from finetune import strategy as strategies
from finetune.command_line import is_first_process, run
from finetune.errors import InputError, refuse_if_any
from finetune.flops import training_flops_per_token
from finetune.loss import token_loss_sum
from finetune.metrics import Meter
from finetune.optimizer import build_optimizer, state_bytes
from finetune.pipeline import Settings
from finetune.progress import Preparing, Screen
from finetune.row_order import EMPTY, batch_problems, micro_batches
from finetune.schedule import learning_rate


class Config(config.Section):
    model: config.Model
    quantization: config.Quantization = config.Quantization()
    adapter: config.Adapter = config.Adapter()
    data: config.Data
    train: config.Train
    eval: config.Eval = config.Eval()
    log: config.Log = config.Log()


def main(cfg: Config) -> None:
    # Everything that can be wrong is looked at before any weight is loaded.
    models.quiet()
    strategy = strategies.asked_for()
    folder, offload_folder = Path(cfg.train.output_dir), Path(cfg.train.output_dir) / "nvme_offload"
    bits = None if cfg.quantization.bits == "none" else cfg.quantization.bits
    method = {"adapter": cfg.adapter.type, "optimizer": cfg.train.optimizer, "weights": cfg.train.weights}
    refuse_if_any(
        strategies.problems(strategy, bits=bits, **method)
        + batch_problems(cfg.train.global_batch_size, cfg.train.micro_batch_size, strategy.world_size)
        + models.problems(cfg.model.path, cfg.model.tokenizer, cfg.data.chat_template)
        + sources.problems(data.named_sources(cfg.data.train) + data.named_sources(cfg.data.eval))
        + data.held_out_problems(data.named_sources(cfg.data.eval))
        + output.problems(folder, cfg.train.overwrite)
        + question_problems(cfg.eval.prompts, cfg.data.eval)
        + (streaming.problems(cfg.data.eval, cfg.train.steps) if cfg.data.streaming else [])
        + unused_adapter_keys(cfg.adapter)
    )
    source: dict[str, Any] = {"revision": cfg.model.revision, "trust_remote_code": cfg.model.trust_remote_code}
    model_config = models.load_config(cfg.model.path, **source)
    stored_dtype, stored_bits = models.stored_dtype(model_config), quantization.stored_bits(model_config)
    quantised_bits = bits or stored_bits
    packed_by_default = cfg.data.packing and cfg.model.attention == "auto"
    attention_name = attention.PACKED if packed_by_default else cfg.model.attention
    refuse_if_any(
        quantization.problems(model_config, bits)
        + (strategies.problems(strategy, bits=stored_bits, **method) if stored_bits and not bits else [])
        + (
            packing_problems(model_config, attention_name, strategies.compute_dtype(strategy, cfg.train.weights))
            if cfg.data.packing
            else []
        )
    )
    quantised_bytes, trains_tied_weights = 0, False
    if cfg.adapter.type != "none":
        skeleton = models.without_weights(model_config, cfg.model.trust_remote_code)
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
    work, held_out = read_data(cfg, tokenizer, model_config.get_text_config())
    asked = questions(cfg.eval.prompts, held_out, tokenizer)
    micro_batch_size = cfg.train.micro_batch_size
    accumulation = cfg.train.global_batch_size // (micro_batch_size * strategy.world_size)
    collate = partial(batches.collate, packed=cfg.data.packing)

    # Start: from here on the processes work together.
    accelerator = strategies.start(
        strategy,
        accumulation=accumulation,
        micro_batch_size=micro_batch_size,
        max_grad_norm=cfg.train.max_grad_norm,
        optimizer=cfg.train.optimizer,
        weights=cfg.train.weights,
        largest_parameter=partial(models.largest_parameter, model_config, cfg.model.trust_remote_code),
        offload_folder=offload_folder,
    )
    fingerprints = {"train": work.fingerprint, "eval": held_out.fingerprint if held_out else None}
    if any(other != fingerprints for other in gather_object([fingerprints])):
        raise InputError("The processes read different data; make the data files the same on every machine.")
    record = {
        "config": cfg.model_dump(),
        "strategy": {"name": strategy.name, "processes": strategy.world_size, "precision": strategy.mixed_precision},
        "data": fingerprints,
        **output.environment(),
    }
    screen = Screen(shown=accelerator.is_main_process, total_steps=work.steps, every=cfg.log.every)
    screen.say(strategies.describe(strategy))
    for line in work.describe():
        screen.say(line)
    if held_out:
        screen.say(data.describe(held_out, "held-out"))
        if isinstance(work, batches.Batches) and (shared := data.shared_with(held_out, work.rows)):
            screen.say(f"{shared:,} of the held-out rows are trained too, so the held-out loss says less than it seems")

    # Model and optimizer.
    device = strategies.loading_device(accelerator, strategy, quantised_bytes)
    if device != accelerator.device:
        screen.say("Quantising on the CPU, for want of room on the GPU: up to a minute for each billion weights")
    dtype = strategies.compute_dtype(strategy, cfg.train.weights)
    with strategies.loading(
        accelerator,
        strategy,
        whole=models.is_bare_config(cfg.model.path) or bool(quantised_bits),
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
    trained_shapes = strategies.trained_shapes(model)
    if cfg.train.activation_checkpointing == "full":
        models.recompute_activations(model)
    optimizer = build_optimizer(
        model,
        name=cfg.train.optimizer,
        learning_rate=cfg.train.learning_rate,
        weight_decay=cfg.train.weight_decay,
        weights=cfg.train.weights,
        fused=strategies.fuses(accelerator),
        rounding_seed=cfg.train.seed * strategy.shards + strategy.shard,
    )
    flops = training_flops_per_token(**models.shape(model), mean_row_length=work.mean_document_tokens)
    model, optimizer = strategies.prepare(accelerator, strategy, model, optimizer, weights=cfg.train.weights)
    sharding = strategies.sharding_of(strategy, model, optimizer)
    record["strategy"]["sharding"] = sharding.record()
    screen.say(f"{sum(map(math.prod, trained_shapes.values())):,} trained weights; {sharding.describe()}")

    # The heaviest micro-batch of the run, once and for nothing: what does not fit fails now, not in hours.
    model.train()
    heaviest = work.heaviest()
    with strategies.rehearsal(
        accelerator,
        model,
        optimizer,
        optimizer_bytes=state_bytes(model, cfg.train.optimizer),
        what=batches.describe_batch(heaviest),
        advice=advice_on_memory(cfg, strategy.world_size),
    ) as backward_for_nothing:
        next_tokens, inputs = collate(heaviest, accelerator.device)
        backward_for_nothing(token_loss_sum(model(**inputs, use_cache=False).logits, next_tokens))

    set_seed(cfg.train.seed, device_specific=True)  # dropout differs from process to process
    if accelerator.is_main_process:  # all that could be refused has been: an earlier run may be replaced now
        output.prepare_folder(folder)
        output.write_run(folder, record)
        own_files = None if isinstance(cfg.data.eval, float) else held_out
        output.append_rejected(folder, chain(work.newly_rejected(), data.rejected_lines(own_files)))

    if held_out:
        loss_before = evaluate(accelerator, model, held_out, micro_batch_size, collate)
        screen.say(f"held-out loss before training: {loss_before:.4f}")
        record["eval_loss"] = {"before": loss_before}
    answers_before = answers(accelerator, model, tokenizer, asked, cfg.eval.max_new_tokens)

    # Training.
    model.train()
    meter = Meter(accelerator, flops_per_token=flops, peak_flops=strategies.peak_flops_of(accelerator))
    with screen:
        for step in range(1, work.steps + 1):
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
                next_tokens, inputs = collate([work.documents(place) for place in places], accelerator.device)
                with accelerator.accumulate(model):
                    loss = token_loss_sum(model(**inputs, use_cache=False).logits, next_tokens)
                    # backward averages over processes and micro-batches: undo both, divide once by the step's tokens,
                    # those of all processes, which each knows from the rows
                    accelerator.backward(loss * accelerator.num_processes * accumulation / batch.trained_tokens)
                    if accelerator.sync_gradients:
                        grad_norm = strategies.clip_grad_norm(accelerator, model, cfg.train.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())

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
            if step == work.steps or (cfg.eval.every and step % cfg.eval.every == 0):
                finished += meter.flush()
                if held_out:
                    finished[-1]["eval_loss"] = evaluate(accelerator, model, held_out, micro_batch_size, collate)
                    meter.restart_clock()
            rejected = work.newly_rejected()
            if accelerator.is_main_process:
                output.append_rejected(folder, rejected)
            for metrics in finished:
                if accelerator.is_main_process:
                    output.append_metrics(folder, metrics)
                screen.step(metrics)

    # Result.
    answers_after = answers(accelerator, model, tokenizer, asked, cfg.eval.max_new_tokens)
    with strategies.one_writes():
        output.save_final(
            folder,
            accelerator.unwrap_model(model),
            tokenizer,
            strategies.full_parameters(accelerator, model),
            strategies.working_parameters(accelerator, model),
            adapter_alone=cfg.adapter.type != "none",
            shapes=trained_shapes,
            dtype=stored_dtype,
            card=output.model_card(cfg.model.path, record, metrics) if accelerator.is_main_process else None,
            record=record,
        )
    if held_out:
        record["eval_loss"]["after"] = metrics["eval_loss"]
        screen.say(f"held-out loss: {loss_before:.4f} before, {metrics['eval_loss']:.4f} after training")
    if accelerator.is_main_process:
        output.write_run(folder, record)
    if asked:
        screen.answers([question for question, _ in asked], answers_before, answers_after)
    if cfg.adapter.type == "none":
        screen.say(f"The fine-tuned model lies in {folder / 'final'}")
    else:
        screen.say(f"The adapter lies in {folder / 'final'}; a model of its own: finetune merge {folder} --output DIR")
    strategies.finish(accelerator, strategy, offload_folder)


def read_data(
    cfg: Config, tokenizer: models.PreTrainedTokenizerBase, model_config: models.PreTrainedConfig
) -> tuple[batches.Batches | streaming.Stream, data.Rows | None]:
    """The batches of the run, and the held-out rows where there are some."""
    train = data.named_sources(cfg.data.train)
    held_out = cfg.data.eval if isinstance(cfg.data.eval, float) else data.named_sources(cfg.data.eval)
    settings = Settings(
        format=cfg.data.format,
        train_on=cfg.data.train_on,
        max_length=cfg.data.max_length,
        split_key=cfg.data.split_key,
    )
    form: dict[str, Any] = {
        "packing": cfg.data.packing,
        "global_batch_size": cfg.train.global_batch_size,
        "micro_batch_size": cfg.train.micro_batch_size,
        "seed": cfg.train.seed,
    }
    skip, steps = cfg.data.on_bad_row == "skip", cfg.train.steps
    with Preparing(shown=is_first_process()) as tell:
        if cfg.data.streaming:
            assert not isinstance(held_out, float)  # refused above
            rows, held = None, data.read_some(held_out, tokenizer, settings, skip_bad_rows=skip, tell=tell)
        else:
            rows, held = data.load(train, held_out, tokenizer, settings, skip_bad_rows=skip, tell=tell)
    vocabulary, positions = model_config.vocab_size, models.most_positions(model_config)
    refuse_if_any(
        data.vocabulary_problems([rows, held], vocabulary)
        + data.position_problems(rows, held, settings.max_length, positions)
    )
    if rows is not None:
        return batches.Batches(rows, max_length=settings.max_length, steps=steps, epochs=cfg.train.epochs, **form), held
    assert steps is not None  # refused above
    return streaming.Stream(
        train, tokenizer, settings, steps=steps, vocabulary=vocabulary, skip_bad_rows=skip, **form
    ), held


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: torch.nn.Module, held_out: data.Rows, micro_batch_size: int, collate: Callable
) -> float:
    """Loss per trained token over the held-out rows, in nats."""
    model.eval()
    at_once = micro_batch_size * accelerator.num_processes
    order = held_out.lengths.argsort(kind="stable").tolist()  # rows of like length: little padding
    order += [EMPTY] * (-len(order) % at_once)
    loss_sum = torch.zeros((), device=accelerator.device)
    for places in micro_batches(
        order,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        micro_batch_size=micro_batch_size,
    ):
        next_tokens, inputs = collate([[held_out[i]] if i != EMPTY else [] for i in places], accelerator.device)
        loss_sum += token_loss_sum(model(**inputs, use_cache=False).logits, next_tokens)
    model.train()
    return accelerator.reduce(loss_sum, "sum").item() / int(held_out.trained_tokens.sum())


def answers(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: models.PreTrainedTokenizerBase,
    asked: list[tuple[str, list[int]]],
    max_new_tokens: int,
) -> list[str]:
    """Greedy answers; every process answers all of them, since layers may be sharded over the processes."""
    model.eval()
    bare = accelerator.unwrap_model(model)
    texts = [
        models.answer(bare, tokenizer, prompt, max_new_tokens=max_new_tokens, device=accelerator.device)
        for _, prompt in asked
    ]
    model.train()
    return texts


def questions(
    prompts: int | list[str], held_out: data.Rows | None, tokenizer: models.PreTrainedTokenizerBase
) -> list[tuple[str, list[int]]]:
    """What to answer, in words and in tokens: given texts, or the first held-out rows up to their last answer."""
    if isinstance(prompts, list):
        return [(text, models.prompt_tokens(tokenizer, text)) for text in prompts]
    if not prompts or held_out is None:
        return []
    rows = list(islice((row for row in held_out if row.prompt_tokens), prompts))
    if not rows:
        raise InputError(
            "eval.prompts asks for answers to held-out questions, but no held-out row has an answer that can be told "
            "from its question (plain texts, or data.train_on all); give the questions as a list of texts, or set it "
            "to 0."
        )
    return [(row.question, row.tokens[: row.prompt_tokens].tolist()) for row in rows]


def unused_adapter_keys(adapter: config.Adapter) -> list[str]:
    default = config.Adapter()
    given = [key for key, value in adapter if value != getattr(default, key)] if adapter.type == "none" else []
    return [
        f"adapter.{key} is given, but adapter.type is none; set adapter.type to lora, or leave it out." for key in given
    ]


def question_problems(prompts: int | list[str], held_out: object) -> list[str]:
    if isinstance(prompts, int) and prompts and not held_out:
        return ["eval.prompts asks for held-out conversations, but data.eval names none; set data.eval."]
    return []


def packing_problems(model_config: models.PreTrainedConfig, attention_name: str, dtype: torch.dtype) -> list[str]:
    on_gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if on_gpu else None
    return packing_support.problems(model_config, attention=attention_name, dtype=dtype, capability=capability)


def advice_on_memory(cfg: Config, world_size: int) -> str:
    """What of a configuration would take less memory, the cheapest first."""
    smaller = {
        f"train.micro_batch_size {cfg.train.micro_batch_size // 2}": cfg.train.micro_batch_size > 1,
        "train.activation_checkpointing full": cfg.train.activation_checkpointing == "none",
        f"data.max_length {cfg.data.max_length // 2}": True,
        "train.optimizer adamw_8bit": cfg.train.optimizer == "adamw",
        "adapter.type lora": cfg.adapter.type == "none",
        "quantization.bits 4": cfg.adapter.type != "none" and cfg.quantization.bits == "none",
    }
    changes = ", ".join(change for change, helps in smaller.items() if helps)
    return f"Set one of {changes}; or launch on more GPUs than {world_size} with a strategy that shards."


if __name__ == "__main__":
    run(main, Config)
