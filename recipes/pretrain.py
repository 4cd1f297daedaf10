"""Pretraining of a causal language model on a corpus of texts: from random weights, or continued from a model.

  accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \\
    recipes/pretrain.py --config recipes/configs/llama3.2_1b_continued.yaml --train.tokens 1e9

The strategy file decides how the work is spread, and never changes the result. Without the launcher,
`python recipes/pretrain.py ...` runs on one process.
"""

from finetune import start_up

if __name__ == "__main__":
    start_up.end_at_once()  # on a signal, from here on: the imports below take seconds

from finetune.config.recipe_classes import CorpusRun
from finetune.config.sections import Recipe
from finetune.config.token_budget import in_rows
from finetune.distributed import Strategy
from finetune.errors import refuse_if_any
from finetune.models.initialisation import scale_by_depth
from finetune.optim.schedule import learning_rate
from finetune.run.corpus import corpus_of, corpus_problems
from finetune.run.entry import run
from finetune.run.inputs import load_tokenizer
from finetune.run.preflight import as_restarted, check
from finetune.run.resumption import is_finished
from finetune.run.run_result import RunResult
from finetune.run.session import Session
from finetune.training.accumulation import accumulate
from finetune.training.pretraining import Pretraining
from finetune.training.router_balance import RouterBalance
from finetune.training.step import backward, step_if_finite


class Config(CorpusRun, Recipe):
    """The sections that every recipe has, with more keys in two of them, and this one's own."""


def main(cfg: Config) -> RunResult:
    launch = Strategy.from_environment()
    cfg = as_restarted(cfg, launch)  # by the launcher, after a process died: resume
    refuse_if_any(corpus_problems(cfg, launch.data_processes))
    cfg = in_rows(cfg)
    spec = check(cfg, launch)  # all that can be refused before anything is loaded or written

    tokenizer = load_tokenizer(cfg.model, cfg.data)
    batches, held_out = corpus_of(cfg, tokenizer, spec)  # row order: a function of (seed, epoch, step)
    if is_finished(cfg, batches):
        return RunResult.of(cfg)

    balance = RouterBalance.of(cfg.train.router_aux_loss_coef, spec.skeleton)  # of a mixture of experts
    smoothing = cfg.train.label_smoothing
    learnt = Pretraining(cfg.pretrain.z_loss, held_out, label_smoothing=smoothing, balance=balance)
    with Session(cfg, launch, spec, tokenizer, batches, held_out, learnt.objective, collate=learnt.collate) as session:
        model = session.load_model()
        if cfg.pretrain.depth_scaled:
            scale_by_depth(model)
        optimizer = session.build_optimizer(model)
        model, optimizer = session.prepare(model, optimizer)  # the strategy is active, the heaviest rows fit
        session.begin()  # a new run, or one brought to where it stood
        for step in session.steps():
            batch = batches.step(step)
            accumulate(
                session.accelerator, model, len(batch.places) // (batches.micro_batch_size * launch.data_processes)
            )
            rate = learning_rate(step, batches.steps, cfg.train)
            for group in optimizer.param_groups:  # before backward: DeepSpeed steps inside it
                group["lr"] = rate * group["lr_scale"]
            micro_batches = session.micro_batches(batch)
            losses = backward(
                session.accelerator, model, learnt.loss_sum, micro_batches, divide_by=batch.trained_tokens
            )
            grad_norm = step_if_finite(session.accelerator, model, optimizer, cfg.train.max_grad_norm)
            session.close_step(step, batch, losses, grad_norm, rate)  # saved, evaluated, ended on a signal
        return session.finish()


if __name__ == "__main__":
    run(main, Config)
