"""Supervised fine-tuning of a causal language model on conversations.

  accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \\
    recipes/sft.py --config recipes/configs/sample.yaml --train.learning_rate 1e-5

The strategy file decides how the work is spread, and never changes the result. Without the launcher,
`python recipes/sft.py ...` runs on one process.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from finetune import adapter as adapters
from finetune import config, data, output, quantization
from finetune import model as models
from finetune import strategy as strategies
from finetune.command_line import run
from finetune.errors import InputError, refuse_if_any
from finetune.flops import training_flops_per_token
from finetune.loss import token_loss_sum
from finetune.metrics import Meter
from finetune.optimizer import build_optimizer
from finetune.progress import Screen
from finetune.row_order import EMPTY, batch_problems, global_batch, micro_batches, positions_in
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
    train_files, eval_files = as_list(cfg.data.train), as_list(cfg.data.eval)
    bits = None if cfg.quantization.bits == "none" else cfg.quantization.bits
    method = {"adapter": cfg.adapter.type, "optimizer": cfg.train.optimizer, "weights": cfg.train.weights}
    refuse_if_any(
        strategies.problems(strategy, bits=bits, **method)
        + batch_problems(cfg.train.global_batch_size, cfg.train.micro_batch_size, strategy.world_size)
        + models.problems(cfg.model.path, cfg.model.tokenizer, cfg.data.chat_template)
        + data.missing_files(train_files + eval_files)
        + output.problems(folder, cfg.train.overwrite)
        + question_problems(cfg.eval.prompts, eval_files)
        + unused_adapter_keys(cfg.adapter)
    )
    source: dict[str, Any] = {"revision": cfg.model.revision, "trust_remote_code": cfg.model.trust_remote_code}
    model_config = models.load_config(cfg.model.path, **source)
    stored_dtype, stored_bits = models.stored_dtype(model_config), quantization.stored_bits(model_config)
    quantised_bits = bits or stored_bits
    refuse_if_any(
        quantization.problems(model_config, bits)
        + (strategies.problems(strategy, bits=stored_bits, **method) if stored_bits and not bits else [])
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

    # Data: read by every process before the process group exists, so that no collective waits for a tokenizer.
    tokenizer = models.load_tokenizer(
        cfg.model.tokenizer or cfg.model.path, chat_template=cfg.data.chat_template, **source
    )
    train = data.read_rows(train_files, tokenizer, cfg.data.max_length)
    held_out = data.read_rows(eval_files, tokenizer, cfg.data.max_length) if eval_files else None
    refuse_if_any(data.vocabulary_problems([train, held_out], model_config.get_text_config().vocab_size))
    conversations = questions(cfg.eval.prompts, held_out)

    batch_size, micro_batch_size = cfg.train.global_batch_size, cfg.train.micro_batch_size
    accumulation = batch_size // (micro_batch_size * strategy.world_size)
    rows_in_run = cfg.train.steps * batch_size if cfg.train.steps else max(1, round(len(train) * cfg.train.epochs))
    total_steps = math.ceil(rows_in_run / batch_size)

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
    fingerprints = {"train": train.fingerprint, "eval": held_out.fingerprint if held_out else None}
    if any(other != fingerprints for other in gather_object([fingerprints])):
        raise InputError("The processes read different data; make the data files the same on every machine.")
    record = {
        "config": cfg.model_dump(),
        "strategy": {"name": strategy.name, "processes": strategy.world_size, "precision": strategy.mixed_precision},
        "data": fingerprints,
        **output.environment(),
    }
    screen = Screen(shown=accelerator.is_main_process, total_steps=total_steps, every=cfg.log.every)
    screen.say(strategies.describe(strategy))
    screen.say(train.describe("training"))
    if held_out:
        screen.say(held_out.describe("held-out"))

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
            attention=cfg.model.attention,
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
    flops = training_flops_per_token(**models.shape(model), mean_row_length=sum(train.lengths) / len(train))
    model, optimizer = strategies.prepare(accelerator, strategy, model, optimizer, weights=cfg.train.weights)
    sharding = strategies.sharding_of(strategy, model, optimizer)
    record["strategy"]["sharding"] = sharding.record()
    screen.say(f"{sum(map(math.prod, trained_shapes.values())):,} trained weights; {sharding.describe()}")
    set_seed(cfg.train.seed, device_specific=True)  # dropout differs from process to process
    if accelerator.is_main_process:  # all that could be refused has been: an earlier run may be replaced now
        output.prepare_folder(folder)
        output.write_run(folder, record)

    if held_out:
        loss_before = evaluate(accelerator, model, held_out, micro_batch_size)
        screen.say(f"held-out loss before training: {loss_before:.4f}")
        record["eval_loss"] = {"before": loss_before}
    answers_before = answers(accelerator, model, tokenizer, conversations, cfg.eval.max_new_tokens)

    # Training.
    model.train()
    meter = Meter(accelerator, flops_per_token=flops, peak_flops=strategies.peak_flops_of(accelerator))
    with screen:
        for step in range(1, total_steps + 1):
            rows = global_batch(
                step, rows=len(train), rows_in_run=rows_in_run, global_batch_size=batch_size, seed=cfg.train.seed
            )
            # Trained tokens of this step over all processes: every process knows all rows, so nobody has to ask.
            tokens = sum(train.trained_tokens[i] for i in rows if i != EMPTY)
            rate = learning_rate(
                step,
                total_steps=total_steps,
                peak=cfg.train.learning_rate,
                schedule=cfg.train.schedule,
                warmup_ratio=cfg.train.warmup_ratio,
            )
            for group in optimizer.param_groups:  # before backward: DeepSpeed steps inside it
                group["lr"] = rate

            losses = []
            for indices in micro_batches(
                rows,
                rank=accelerator.process_index,
                world_size=accelerator.num_processes,
                micro_batch_size=micro_batch_size,
            ):
                batch = data.collate(train.rows, indices, accelerator.device)
                with accelerator.accumulate(model):
                    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
                    loss = token_loss_sum(logits, batch["next_tokens"])
                    # backward averages over processes and micro-batches: undo both, divide once by the step's tokens
                    accelerator.backward(loss * accelerator.num_processes * accumulation / tokens)
                    if accelerator.sync_gradients:
                        grad_norm = strategies.clip_grad_norm(accelerator, model, cfg.train.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())

            finished = meter.update(
                step=step,
                rows=[train.rows[i].source for i in rows if i != EMPTY],
                losses=torch.stack(losses),
                tokens=tokens,
                row_tokens=sum(train.lengths[i] for i in rows if i != EMPTY),
                total_tokens=positions_in(rows, train.lengths, micro_batch_size),
                grad_norm=grad_norm,
                learning_rate=rate,
                skipped=accelerator.optimizer_step_was_skipped,
            )
            if step == total_steps or (cfg.eval.every and step % cfg.eval.every == 0):
                finished += meter.flush()
                if held_out:
                    finished[-1]["eval_loss"] = evaluate(accelerator, model, held_out, micro_batch_size)
                    meter.restart_clock()
            for metrics in finished:
                if accelerator.is_main_process:
                    output.append_metrics(folder, metrics)
                screen.step(metrics)

    # Result.
    answers_after = answers(accelerator, model, tokenizer, conversations, cfg.eval.max_new_tokens)
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
    if conversations:
        screen.answers([messages[-1]["content"] for messages in conversations], answers_before, answers_after)
    if cfg.adapter.type == "none":
        screen.say(f"The fine-tuned model lies in {folder / 'final'}")
    else:
        screen.say(f"The adapter lies in {folder / 'final'}; a model of its own: finetune merge {folder} --output DIR")
    strategies.finish(accelerator, strategy, offload_folder)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, held_out: data.Rows, micro_batch_size: int) -> float:
    """Loss per trained token over the held-out rows, in nats."""
    model.eval()
    at_once = micro_batch_size * accelerator.num_processes
    order = sorted(range(len(held_out)), key=held_out.lengths.__getitem__)  # rows of like length: little padding
    order += [EMPTY] * (-len(order) % at_once)
    loss_sum = torch.zeros((), device=accelerator.device)
    for indices in micro_batches(
        order,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        micro_batch_size=micro_batch_size,
    ):
        batch = data.collate(held_out.rows, indices, accelerator.device)
        loss_sum += token_loss_sum(model(input_ids=batch["input_ids"], use_cache=False).logits, batch["next_tokens"])
    model.train()
    return accelerator.reduce(loss_sum, "sum").item() / sum(held_out.trained_tokens)


def answers(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: models.PreTrainedTokenizerBase,
    conversations: list[list[dict[str, str]]],
    max_new_tokens: int,
) -> list[str]:
    """Greedy answers; every process answers all of them, since layers may be sharded over the processes."""
    model.eval()
    bare = accelerator.unwrap_model(model)
    texts = [
        models.answer(bare, tokenizer, messages, max_new_tokens=max_new_tokens, device=accelerator.device)
        for messages in conversations
    ]
    model.train()
    return texts


def questions(prompts: int | list[str], held_out: data.Rows | None) -> list[list[dict[str, str]]]:
    """The conversations to answer: given texts, or the first held-out ones up to their last answer."""
    if isinstance(prompts, list):
        return [[{"role": "user", "content": text}] for text in prompts]
    return [data.without_last_answer(messages) for messages in held_out.messages[:prompts]] if held_out else []


def unused_adapter_keys(adapter: config.Adapter) -> list[str]:
    default = config.Adapter()
    given = [key for key, value in adapter if value != getattr(default, key)] if adapter.type == "none" else []
    return [
        f"adapter.{key} is given, but adapter.type is none; set adapter.type to lora, or leave it out." for key in given
    ]


def question_problems(prompts: int | list[str], eval_files: list[str]) -> list[str]:
    if isinstance(prompts, int) and prompts and not eval_files:
        return ["eval.prompts asks for held-out conversations, but data.eval names no file; set data.eval."]
    return []


def as_list(files: str | list[str] | None) -> list[str]:
    return [] if files is None else [files] if isinstance(files, str) else files


if __name__ == "__main__":
    run(main, Config)
