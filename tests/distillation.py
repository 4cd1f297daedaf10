"""Distillation to fixed targets: a recipe that differs from sft.py in its loss alone."""

import torch
import torch.nn.functional as F

from finetune.config import sections
from finetune.data.batches import IGNORED
from finetune.distributed import Strategy
from finetune.optim.schedule import learning_rate
from finetune.run.inputs import batches_of, load_rows, load_tokenizer
from finetune.run.preflight import as_restarted, check
from finetune.run.session import Session
from finetune.training.step import backward, step_if_finite


class Config(sections.Recipe):
    """The sections that every recipe has, and no others."""


def loss_sum(model: torch.nn.Module, micro_batch: tuple) -> torch.Tensor:
    """Cross-entropy with a teacher that gives nine tenths to the next token and the rest to the one after it by id."""
    next_tokens, inputs = micro_batch
    log_probabilities = F.log_softmax(model(**inputs, use_cache=False).logits.float(), dim=-1)
    trained = next_tokens != IGNORED
    targets = next_tokens.where(trained, 0)
    second = (targets + 1) % log_probabilities.shape[-1]
    found = [log_probabilities.gather(-1, each[..., None])[..., 0] for each in (targets, second)]
    return -((0.9 * found[0] + 0.1 * found[1]) * trained).sum()


def main(cfg: Config) -> None:
    launch = Strategy.from_environment()
    cfg = as_restarted(cfg, launch)
    spec = check(cfg, launch)
    tokenizer = load_tokenizer(cfg.model, cfg.data)
    rows, held_out = load_rows(cfg.data, tokenizer, spec)
    batches = batches_of(cfg.data, cfg.train, tokenizer, spec, rows)
    with Session(cfg, launch, spec, tokenizer, batches, held_out, loss_sum) as session:
        model = session.load_model()
        model, optimizer = session.prepare(model, session.build_optimizer(model))
        session.begin()
        for step in session.steps():
            batch = batches.step(step)
            rate = learning_rate(step, batches.steps, cfg.train)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_scale"]
            micro_batches = session.micro_batches(batch)
            losses = backward(session.accelerator, model, loss_sum, micro_batches, divide_by=batch.trained_tokens)
            grad_norm = step_if_finite(session.accelerator, model, optimizer, cfg.train.max_grad_norm)
            session.close_step(step, batch, losses, grad_norm, rate)
        session.finish()
