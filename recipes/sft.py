"""Supervised fine-tuning of a causal language model on conversations.

  accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \\
    recipes/sft.py --config recipes/configs/sample.yaml --train.learning_rate 1e-5

The strategy file decides how the work is spread, and never changes the result. Without the launcher,
`python recipes/sft.py ...` runs on one process.
"""

from functools import partial

from finetune import start_up

if __name__ == "__main__":
    start_up.end_at_once()  # on a signal, from here on: the imports below take seconds

from finetune.config import sections
from finetune.distributed import Strategy
from finetune.optim.schedule import learning_rate
from finetune.run.entry import run
from finetune.run.inputs import batches_of, load_rows, load_tokenizer
from finetune.run.preflight import as_restarted, check
from finetune.run.resumption import is_finished
from finetune.run.run_result import RunResult
from finetune.run.session import Session
from finetune.training.loss import next_token_loss_sum
from finetune.training.router_balance import RouterBalance
from finetune.training.step import backward, step_if_finite


class Config(sections.Recipe):
    """The sections that every recipe has, and no others."""


def main(cfg: Config) -> RunResult:
    launch = Strategy.from_environment()
    cfg = as_restarted(cfg, launch)  # by the launcher, after a process died: resume
    spec = check(cfg, launch)  # all that can be refused before anything is loaded or written

    tokenizer = load_tokenizer(cfg.model, cfg.data)
    rows, held_out = load_rows(cfg.data, tokenizer, spec)
    batches = batches_of(cfg.data, cfg.train, tokenizer, spec, rows)  # row order: a function of (seed, epoch, step)
    if is_finished(cfg, batches):
        return RunResult.of(cfg)

    balance = RouterBalance.of(cfg.train.router_aux_loss_coef, spec.skeleton)  # of a mixture of experts
    smoothing = cfg.train.label_smoothing
    loss_sum = partial(next_token_loss_sum, label_smoothing=smoothing, balance=balance.of_micro_batch)
    with Session(cfg, launch, spec, tokenizer, batches, held_out, balance.objective(loss_sum)) as session:
        model = session.load_model()
        optimizer = session.build_optimizer(model)
        model, optimizer = session.prepare(model, optimizer)  # the strategy is active, the heaviest rows fit
        session.begin()  # a new run, or one brought to where it stood
        for step in session.steps():
            batch = batches.step(step)
            rate = learning_rate(step, batches.steps, cfg.train)
            for group in optimizer.param_groups:  # before backward: DeepSpeed steps inside it
                group["lr"] = rate * group["lr_scale"]
            micro_batches = session.micro_batches(batch)
            losses = backward(session.accelerator, model, loss_sum, micro_batches, divide_by=batch.trained_tokens)
            grad_norm = step_if_finite(session.accelerator, model, optimizer, cfg.train.max_grad_norm)
            session.close_step(step, batch, losses, grad_norm, rate)  # saved, evaluated, ended on a signal
        return session.finish()


if __name__ == "__main__":
    run(main, Config)
