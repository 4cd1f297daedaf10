"""A run from its lock to its result: folder, processes, records, checkpoints, signals, screen.

A session has no loop and no step, which are the recipe's, and nothing to override. A recipe opens it with ``with``, so
that it is closed on every path, and calls in this order::

    with Session(cfg, launch, spec, tokenizer, batches, held_out, loss_sum) as session:
        model = session.load_model()
        optimizer = session.build_optimizer(model)
        model, optimizer = session.prepare(model, optimizer)
        session.begin()
        for step in session.steps():
            ...  # the recipe's own
            session.close_step(step, batch, losses, grad_norm, rate)
        result = session.finish()
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from finetune import checkpoint, distributed
from finetune.checkpoint import resuming
from finetune.config import sections
from finetune.data import batches as data_batches
from finetune.data.batches import Batch, Batches, Inputs, describe_batch
from finetune.data.rows import Rows
from finetune.data.sampler import micro_batches
from finetune.data.streaming import Stream
from finetune.data.template_process import end_of_turn
from finetune.errors import RunInterrupted, RunStopped, refuse_if_any
from finetune.models import generation_settings, loading, weights
from finetune.models.flops import training_flops
from finetune.models.spec import ModelSpec
from finetune.optim.optimizer import state_bytes
from finetune.optim.schedule import is_due
from finetune.output.run_record import Progress
from finetune.report import pages
from finetune.run import improvement, model_setup, opening, result
from finetune.run.between_steps import between_steps
from finetune.run.examination import Examination
from finetune.run.logbook import Logbook
from finetune.run.preflight import folder_problems, room_problems, weight_files
from finetune.run.resumption import Resumption
from finetune.run.run_result import RunResult
from finetune.run.screen import Screen
from finetune.run.sizes import advice_on_memory, plan_of
from finetune.run.trackers import Trackers
from finetune.seeds import seed_of
from finetune.start_up import is_first_process
from finetune.training import evaluation, router_balance
from finetune.training.embedding_noise import EmbeddingNoise
from finetune.training.loss import LossSum, Objective
from finetune.training.memory_check import check_memory
from finetune.training.meter import Meter
from finetune.training.task_scores import read_tasks


class Session:
    """One run of a recipe."""

    def __init__(
        self,
        cfg: sections.Run,
        launch: distributed.Strategy,
        spec: ModelSpec,
        tokenizer: PreTrainedTokenizerBase,
        batches: Batches | Stream,
        held_out: Rows | None,
        objective: LossSum | Objective,
        *,
        collate: Callable[..., Any] | None = None,
    ) -> None:
        """Writes nothing, and joins no other process.

        Args:
            objective: what is learnt; also held out, and in the memory check.
            collate: makes a micro-batch of the documents of each of its rows, on a device; None for batches.collate.

        Raises:
            InputError: if eval asks for answers that no held-out row has, or compares by a figure that there is not.
        """
        self.cfg, self.launch, self.spec, self.tokenizer = cfg, launch, spec, tokenizer
        self.batches, self.held_out = batches, held_out
        self.examined = Inputs(held_out, flat=batches.flat, paired=batches.paired) if held_out else None
        self.objective = objective if isinstance(objective, Objective) else Objective(objective, figure_names=())
        self.collate: Callable[..., Any] = partial(collate or data_batches.collate, flat=batches.flat)
        self.folder, self.share = Path(cfg.train.output_dir), launch.data_share
        answered = held_out.choose(np.arange(0, len(held_out), 2)) if held_out and batches.paired else held_out
        known = tokenizer, loading.most_positions(spec.text_config)
        self.asked = evaluation.questions(cfg.eval.prompts, answered, *known, compared=cfg.eval.exact_match)
        self.tasks = read_tasks(cfg.eval, cfg.data, *known)
        refuse_if_any(improvement.metric_problems(cfg.eval, self.objective, self.tasks, held_out))
        self.progress, self.step = Progress(), 0

    def __enter__(self) -> "Session":
        """Plan the run, take its folder, join the other processes, and agree with them on what is trained.

        Raises:
            InputError: if the run cannot fit, its folder is taken, or the processes differ in what they would do.
        """
        planned = plan_of(self.cfg, self.launch, self.spec, self.batches)
        files = weight_files(self.spec, self.cfg.adapter)
        with ExitStack() as stack:
            if is_first_process():  # one run at a time works in a folder
                stack.enter_context(checkpoint.hold(self.folder))
                refuse_if_any(folder_problems(self.cfg))  # what it held may have changed while it was waited for
            read = self.cfg, self.tokenizer, self.batches, self.held_out
            fingerprints = opening.fingerprints(*read, self.tasks, self.spec, self.objective)
            known = self.cfg, self.launch, self.spec
            self.accelerator, self.collate, noticed = opening.join(*known, planned.sizes, fingerprints, self.collate)
            is_main, steps = self.accelerator.is_main_process, self.batches.steps
            scores = {task.figure: task.label for task in self.tasks}
            self.screen = Screen(shown=is_main, total_steps=steps, every=self.cfg.log.every, scores=scores)
            for line in noticed:
                self.screen.say(line)
            refuse_if_any(gather_object(weights.not_finite(files, **self.share)))
            sizes = planned.sizes.agreed(gather_object([planned.sizes]))
            self.cfg = self.cfg.model_copy(update={"train": sizes.written_into(self.cfg.train)})
            self.batches.micro_batch_size, self.plan = sizes.micro_batch_size, planned.plan
            known, template = (self.cfg, self.launch, self.spec), self.tokenizer.chat_template
            self.record = opening.new_record(*known, fingerprints, template, self.batches, self.held_out, self.plan)
            for line in opening.introduction(*known, self.batches, self.held_out, planned.lines):
                self.screen.say(line)
            self.resumption = Resumption.find(*known, fingerprints, steps, self.screen.say)
            if self.resumption:
                self.record = self.resumption.marked(self.record)
            self.own = self.resumption.checkpoint if self.resumption and self.resumption.is_same_run else None
            self.trackers = stack.enter_context(Trackers(self.cfg.log, self.folder, self.screen.say, writes=is_main))
            self.trackers.start(self.record, after=self.own.step if self.own else None, inside=False)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._open.__exit__(*error)
        finally:  # no cycle is left that would hold the GPU's memory until garbage is collected, in a notebook
            vars(self).clear()

    def load_model(self) -> Any:
        """The model with its adapter, as the strategy loads it.

        Raises:
            InputError: if it cannot be loaded, is not the checkpoint's, or its checkpoints have no room on the disk.
        """
        train, launched = self.cfg.train, (self.accelerator, self.launch)
        device = distributed.loading_device(*launched, self.spec.quantised_bytes)
        if device != self.accelerator.device:
            self.screen.say("Quantising on the CPU, because the GPU has no room: up to a minute per billion weights")
        model, self.beginning = model_setup.load_model(*launched, self.spec, self.cfg, device)
        generation_settings.stop_at(model, self.tokenizer.eos_token_id, end_of_turn(self.tokenizer))
        self.noise = EmbeddingNoise(model, train.neftune_alpha, train.seed, fillers=1 + self.batches.paired)
        self.trained_shapes = distributed.trained_shapes(model)
        if self.resumption:
            refuse_if_any(resuming.weight_problems(self.resumption.checkpoint, self.trained_shapes))
        self.checkpoint_bytes = resuming.bytes_of(self.trained_shapes, train)
        refuse_if_any(room_problems(self.cfg, self.spec, self.batches.steps, self.trained_shapes, self.own))
        self.flops = training_flops(**loading.shape(model), mean_row_length=self.batches.attended_tokens)
        return model

    def build_optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Over the model's trained parameters."""
        return model_setup.build_optimizer(self.accelerator, self.launch, model, self.cfg)

    def prepare(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        """Model and optimizer as the strategy wraps and shards them, which is proven. Tries the heaviest micro-batch.

        Raises:
            RuntimeError: if the strategy that was asked for is not the one that is active.
            InputError: if the heaviest micro-batch does not fit.
        """
        known, order = (self.accelerator, self.launch, model, optimizer), opening.order_of(self.cfg, self.launch)
        self.model, self.optimizer = distributed.prepare(*known, weights=self.cfg.train.weights, order=order)
        self.objective = evaluation.known_everywhere(self.objective, self.model)
        sharding = distributed.sharding_of(self.launch, self.model, self.optimizer)
        self.record = replace(self.record, strategy=self.record.strategy | {"sharding": sharding.record()})
        self.screen.say(f"{sum(map(math.prod, self.trained_shapes.values())):,} trained weights; {sharding.describe()}")
        self.objective.remember(self.model)
        # what looks out for lost processes is closed first of all, and without an error waits for the others
        self._training = self._open.enter_context(ExitStack())
        self.interruption = self._training.enter_context(distributed.Interruption(self.launch))
        self._check_memory()
        return self.model, self.optimizer

    def begin(self) -> None:
        """Begin the run, or bring it to where it stood.

        All that can be refused has been by now: an earlier run in the folder is replaced, or resumed.
        """
        refuse_if_any(router_balance.problems(self.cfg.train.router_aux_loss_coef, self.objective.figures()))
        self.examination = Examination(
            *(self.accelerator, self.model, self.tokenizer, self.objective, self.examined, self.collate, self.batches),
            *(self.asked, self.tasks, self.cfg.eval.max_new_tokens, self.share),
            as_result=partial(distributed.averaged_weights, self.launch, self.model, self.optimizer),
        )
        self._training.enter_context(self.screen)
        self.saver = checkpoint.Saver(
            self.folder,
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            keep=self.cfg.checkpoint.keep,
            gather=self.interruption.gather,
            expected_bytes=self.checkpoint_bytes,
        )
        self.logbook = Logbook(self.folder, self.screen, self.batches, self.trackers, writes=self.launch.rank == 0)
        if self.resumption:
            known = self.accelerator, self.model, self.optimizer, self.batches, self.screen.say
            self.progress = self.resumption.restore(*known, names=self.examination.names)
        else:
            figures = self.examination.figures()
            improvement.judged(self.cfg.eval, self.progress, figures)  # refuses the name of a figure that is not there
        own_files = None if isinstance(self.cfg.data.eval, float) else self.held_out
        self.logbook.open(self.record, self.own, own_files, overwrite=self.cfg.train.overwrite)
        self.trackers.start(self.record, after=self.own.step if self.own else None, inside=True)
        if self.resumption:
            self._make_up_for_evaluation(self.resumption)
        else:
            self.progress = self.examination.before_training(self.progress, figures, self.screen.say)
        self.interruption.take_signals()
        self.model.train()
        self.finished: list[dict[str, Any]] = []
        """Metrics of the steps that were read with the last one."""
        self.meter = Meter(
            self.accelerator,
            shares=self.launch.shares,
            flops=self.flops,
            peak_flops=distributed.peak_flops_of(self.accelerator),
            max_bad_steps=self.cfg.train.max_bad_steps,
            last_checkpoint=self._last_checkpoint,
            counters=self.progress.counters,
        )

    def _check_memory(self) -> None:
        self.model.train()
        heaviest = self.batches.heaviest()
        check_memory(
            *(self.accelerator, self.model, self.optimizer, self.objective.loss_sum),
            lambda: self.collate(heaviest, self.accelerator.device),
            optimizer_bytes=state_bytes(self.model, self.cfg.train.optimizer, averages=self.cfg.train.averages),
            what=describe_batch(heaviest),
            advice=advice_on_memory(self.cfg, self.launch),
        )

    def _make_up_for_evaluation(self, resumption: Resumption) -> None:
        """The run may have ended between the checkpoint of a step and the evaluation after it."""
        step, metrics = self.progress.step, resumption.known_metrics(self.progress)
        is_lacking = not self.examination.names <= set(metrics)
        is_last = step == self.batches.steps or improvement.has_stopped(self.cfg.eval, self.progress)
        if is_lacking and (is_last or (resumption.is_same_run and self._evaluates_after(step))):
            metrics |= self.examination.figures()
            self.screen.evaluation(metrics)
            self.logbook.complete(step, metrics)
        is_judged = improvement.is_judged(self.cfg.eval, self.progress)
        self.progress = replace(self.progress, metrics=[*self.progress.metrics[:-1], metrics])
        if resumption.is_compared and not is_judged and {self.cfg.eval.metric, *self.examination.names} <= set(metrics):
            self.progress = improvement.judged(self.cfg.eval, self.progress, metrics)

    def steps(self) -> Iterator[int]:
        """The optimizer steps that are left, from 1; before each, random numbers are made a function of it."""
        profiled = self.cfg.log.profile if self.accelerator.is_main_process else 0
        step_is_over = self._training.enter_context(between_steps(profiled, self.folder, self.screen.say))
        for step in range(self.progress.step + 1, self.batches.steps + 1):
            if improvement.has_stopped(self.cfg.eval, self.progress):
                self.screen.say(improvement.describe_stop(self.cfg.eval, self.progress))
                return
            # of dropout, for example: other ones on each process
            torch.manual_seed(seed_of(self.cfg.train.seed, step, self.launch.noise))
            self.step, self.interruption.heartbeat.doing = step, f"step {step}"
            yield step
            step_is_over()

    def micro_batches(self, batch: Batch) -> Iterator[Any]:
        """This process's micro-batches of a step, on its device."""
        for places in micro_batches(batch.places, micro_batch_size=self.batches.micro_batch_size, **self.share):
            documents = [self.batches.documents(place) for place in places]
            self.noise.expect(self.step, list(zip(places, documents)))
            yield self.collate(documents, self.accelerator.device)

    def close_step(
        self, step: int, batch: Batch, losses: list[torch.Tensor], grad_norm: float, learning_rate: float
    ) -> None:
        """Write down a step; save and evaluate where they are due; end the run where a signal asks for it. Collective.

        Args:
            losses: sum of the loss of each of this process's micro-batches.
            grad_norm: before clipping.

        Raises:
            RunInterrupted: after a signal, once a checkpoint is complete.
            RunStopped: if too many steps in a row were not finite.
        """
        finished = self.meter.update(
            step=step,
            rows=batch.sources,
            losses=torch.stack(losses),
            figures=self.objective.figures(),
            divide_by=self.objective.count(rows=batch.rows, tokens=batch.trained_tokens),
            tokens=batch.trained_tokens,
            row_tokens=batch.tokens,
            total_tokens=batch.total_tokens,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            skipped=self.accelerator.optimizer_step_was_skipped,
        )
        signal, save_failed = self.interruption.agree(self.interruption.asked, self.saver.failed)
        evaluates = bool(self.examination.names) and not signal and self._evaluates_after(step)
        is_last = step == self.batches.steps
        saves = signal or (self.cfg.checkpoint.at_end and is_last) or is_due(step, self.cfg.checkpoint.every)
        if evaluates or saves or is_last:  # on a GPU a step is read with the next one, which there may not be
            finished += self.meter.flush()
        compares = evaluates and improvement.is_asked(self.cfg.eval)
        if compares:  # before the step is saved: its checkpoint tells which evaluation was the best
            finished[-1] |= self.examination.figures()
            self.progress = improvement.judged(self.cfg.eval, self.progress, finished[-1])
            saves |= improvement.is_saved(self.cfg.eval, self.progress, at_end=self.cfg.checkpoint.at_end)
        if save_failed:
            self.saver.give_up()
        if saves:  # before the evaluation, which may take long, and which a run that resumes makes up for
            self.logbook.write_rejected()
            finished[-1]["save_stall_seconds"] = self._save(step, finished)
        if evaluates and not compares:
            finished[-1] |= self.examination.figures()
        if evaluates:
            self.meter.restart_clock()
        self.logbook.write(finished)
        self.finished = finished
        ending = self._last_checkpoint() if signal else ""
        for problem in self.saver.problems():
            self.screen.say(problem)
        if signal:
            name = distributed.name_of(signal)
            raise RunInterrupted(f"{name} ended the run after step {step} of {self.batches.steps}; {ending}.")

    def _save(self, step: int, finished: list[dict[str, Any]]) -> float:
        """Begin to write a checkpoint; returns the seconds that training stood still for it."""
        counters, measured = self.meter.counters, self.meter.measured()
        self.progress = replace(self.progress, step=step, metrics=finished, counters=counters, measured=measured)
        stalled = checkpoint.save(
            *(self.saver, self.launch, self.accelerator, self.model, self.optimizer),
            run=self.record.as_dict(),
            progress=self.progress.as_dict(),
            keeps_best=self.cfg.eval.keep_best,
        )
        self.meter.restart_clock()
        return stalled

    def _evaluates_after(self, step: int) -> bool:
        return step == self.batches.steps or is_due(step, self.cfg.eval.every)

    def _last_checkpoint(self) -> str:
        """Where the run can be resumed, in a clause, when it is about to end."""
        self.saver.finish()
        self.interruption.expect_the_end()
        return checkpoint.describe_newest(self.folder)

    def finish(self) -> RunResult:
        """Wait for the last checkpoint, write the result, tell of it and return it, and leave the other processes.

        Raises:
            RunStopped: if no step changed a weight, or the result cannot be written.
        """
        self.saver.close()
        for problem in self.saver.problems():
            self.screen.say(problem)
        self.logbook.close()
        metrics = self.finished[-1] if self.finished else self.progress.metrics[-1]
        if nothing_learnt := self.meter.result_problem(metrics["step"]):
            self.interruption.expect_the_end()
            raise RunStopped(nothing_learnt)
        last = metrics["step"]
        if self.cfg.eval.keep_best:
            known = self.folder, self.launch, self.model, self.optimizer, self.progress, metrics
            metrics = improvement.take_best(*known, averages=self.cfg.train.averages, say=self.screen.say)
        self.record = improvement.recorded(self.record, self.cfg.eval, self.progress, last=last, taken=metrics["step"])
        self.record = result.completed(
            *(self.record, self.progress, self.cfg.eval, self.asked, self.examination.answers()),
            self.tasks,
            metrics,
            # resumed after its last step, it has measured nothing
            measured=(None if self.finished else self.progress.measured) or self.meter.measured(),
            held_bytes=gather_object([distributed.held_bytes(self.model, self.optimizer)]),
        )
        adapter_alone = self.cfg.adapter.type != "none"
        written = self.folder, self.accelerator, self.model, self.tokenizer, self.spec, self.record, metrics
        with self.examination.as_result():
            result.write(*written, adapter_alone=adapter_alone, shapes=self.trained_shapes, beginning=self.beginning)
        self._training.close()
        result.tell(self.screen, self.folder, self.record, self.plan, adapter_alone=adapter_alone)
        if self.cfg.log.report and self.accelerator.is_main_process:
            self.screen.say(pages.of_finished_run(self.folder))
        distributed.finish(self.accelerator, self.launch, opening.offload_folder(self.cfg))
        return RunResult(self.folder)
