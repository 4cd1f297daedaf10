"""Preference tuning of a causal language model on pairs of answers, or on answers that are judged one by one.

  accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \\
    recipes/dpo.py --config recipes/configs/dpo_sample.yaml --dpo.loss ipo

The strategy file decides how the work is spread, and never changes the result. Without the launcher,
`python recipes/dpo.py ...` runs on one process.
"""

from finetune import start_up

if __name__ == "__main__":
    start_up.end_at_once()  # on a signal, from here on: the imports below take seconds

from finetune.config.recipe_classes import PairedRun
from finetune.config.sections import Recipe
from finetune.distributed import Strategy
from finetune.errors import refuse_if_any
from finetune.optim.schedule import learning_rate
from finetune.run.entry import run
from finetune.run.inputs import batches_of, load_rows, load_tokenizer
from finetune.run.pairs import caches_reference, kind_problems, pair_problems, preferences_of
from finetune.run.preflight import as_restarted, check
from finetune.run.reference_point import know_reference_point
from finetune.run.references import know_references
from finetune.run.resumption import is_finished
from finetune.run.run_result import RunResult
from finetune.run.session import Session
from finetune.training.preferences import collate
from finetune.training.step import backward, step_if_finite


class Config(PairedRun, Recipe):
    """The sections that every recipe has, and this one's own."""


def main(cfg: Config) -> RunResult:
    launch = Strategy.from_environment()
    cfg = as_restarted(cfg, launch)  # by the launcher, after a process died: resume
    refuse_if_any(pair_problems(cfg, cfg.dpo, launch))
    spec = check(cfg, launch)  # all that can be refused before anything is loaded or written

    tokenizer = load_tokenizer(cfg.model, cfg.data)
    rows, held_out = load_rows(cfg.data, tokenizer, spec, paired=True)
    refuse_if_any(kind_problems(cfg.dpo, rows, held_out))
    batches = batches_of(
        cfg.data, cfg.train, tokenizer, spec, rows, paired=True
    )  # row order: a function of (seed, epoch, step)
    if is_finished(cfg, batches):
        return RunResult.of(cfg)

    learnt = preferences_of(cfg, cfg.dpo, launch)
    with Session(cfg, launch, spec, tokenizer, batches, held_out, learnt.objective, collate=collate) as session:
        model = session.load_model()
        optimizer = session.build_optimizer(model)
        model, optimizer = session.prepare(model, optimizer)  # the strategy is active, the heaviest rows fit
        if caches_reference(cfg, cfg.dpo, launch):
            know_references(session)
        session.begin()  # a new run, or one brought to where it stood
        for step in session.steps():
            batch = batches.step(step)
            rate = learning_rate(step, batches.steps, cfg.train)
            for group in optimizer.param_groups:  # before backward: DeepSpeed steps inside it
                group["lr"] = rate * group["lr_scale"]
            know_reference_point(learnt, session, batch)  # of kto
            micro_batches = session.micro_batches(batch)
            losses = backward(session.accelerator, model, learnt.loss_sum, micro_batches, divide_by=batch.rows)
            grad_norm = step_if_finite(session.accelerator, model, optimizer, cfg.train.max_grad_norm)
            session.close_step(step, batch, losses, grad_norm, rate)  # saved, evaluated, ended on a signal
        return session.finish()


if __name__ == "__main__":
    run(main, Config)
