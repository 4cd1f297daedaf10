"""What a run resumes from: found, held against the configuration, and restored."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from finetune import checkpoint, distributed
from finetune.checkpoint import resuming
from finetune.config import sections
from finetune.data.batches import Batches
from finetune.data.streaming import Stream
from finetune.errors import InputError, refuse_if_any
from finetune.models import frequencies
from finetune.models.spec import ModelSpec
from finetune.output import run_files
from finetune.output.run_reading import read_metrics
from finetune.output.run_record import Progress, RunRecord
from finetune.run import improvement
from finetune.start_up import is_first_process


@dataclass(frozen=True)
class Resumption:
    """A checkpoint and what it is to this run. Make one with ``find``."""

    cfg: sections.Run
    launch: distributed.Strategy
    checkpoint: checkpoint.Checkpoint
    weights_only: bool
    """The optimizer starts from scratch."""
    is_same_run: bool
    """The checkpoint is this output folder's own, so that its records go on."""
    same_tasks: bool = True
    """The rows of eval.tasks, and how they are scored, are those of the run before."""

    @classmethod
    def find(
        cls,
        cfg: sections.Run,
        launch: distributed.Strategy,
        spec: ModelSpec,
        fingerprints: dict[str, str | None],
        steps: int,
        say: Callable[[str], None],
    ) -> "Resumption | None":
        """The checkpoint that the configuration asks for, all of whose bytes are read once; None to begin. Collective.

        Args:
            fingerprints: of what the run reads.
            steps: of the whole run.

        Raises:
            InputError: if there is none that can be used, or if it belongs to another run.
        """
        folder = Path(cfg.train.output_dir)
        found = checkpoint.chosen(cfg.checkpoint.resume, folder, launch, say=say)
        refuse_if_any(resuming.step_problems(folder, found, steps) if cfg.checkpoint.resume != "none" else [])
        if found is None:
            return None
        weights_only = resuming.restarts_optimizer(found, cfg.checkpoint, cfg.train)
        tasks = found.contents["run"]["data"].get("tasks"), fingerprints.get("tasks")
        resumption = cls(cfg, launch, found, weights_only, checkpoint.is_own(found, folder), tasks[0] == tasks[1])
        now = resumption._now
        refuse_if_any(resuming.config_problems(found, **now) + resuming.input_problems(found, fingerprints, now["now"]))
        differ = partial(frequencies.differ, spec.config)
        refuse_if_any(resuming.length_problems(found, cfg.data.max_length, differ))
        return resumption

    @property
    def _now(self) -> dict[str, Any]:
        precision = self.launch.mixed_precision
        return {"now": self.cfg.model_dump(), "precision": precision, "weights_only": self.weights_only}

    def restore(
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        batches: Batches | Stream,
        say: Callable[[str], None],
        *,
        names: Collection[str],
    ) -> Progress:
        """Bring a prepared model and its optimizer to where the checkpoint stands; collective.

        Args:
            names: of the figures that every evaluation has now.
        """
        checkpoint.restore(self.checkpoint, self.launch, accelerator, model, optimizer, weights_only=self.weights_only)
        at, before = self.checkpoint.step, self.checkpoint.contents["run"]["steps"]
        tokens = None
        if at < batches.steps or before != batches.steps:
            with distributed.long_wait():  # a stream is read up to there, while nobody waits in a step's collective
                tokens = batches.step(at).trained_tokens
        for line in resuming.describe(self.checkpoint, **self._now, steps=batches.steps, tokens=tokens):
            say(line)
        progress = Progress.read(self.checkpoint.contents["progress"])
        folder, section = Path(self.cfg.train.output_dir), self.cfg.eval
        return improvement.known_in(folder, section, progress, was_by=self.compared_by, names=names)

    def marked(self, record: RunRecord) -> RunRecord:
        """The record of the run that goes on: where it did, and with its id if it is the same run."""
        before, launch = self.checkpoint.contents["run"], record.strategy
        here = {"after_step": self.checkpoint.step, "strategy": launch["name"], "processes": launch["processes"]}
        if self.is_same_run:
            return replace(record, id=before["id"], resumed=[*before.get("resumed", []), here])
        return replace(record, resumed=[here | {"from": str(self.checkpoint.path)}])

    @property
    def is_compared(self) -> bool:
        """Whether evaluations of the run before count among those that the best is chosen from."""
        return self.is_same_run and not resuming.switches_averages(self.checkpoint, self.cfg.train.ema_decay)

    @property
    def compared_by(self) -> str | None:
        """The figure that evaluations were compared by; None where those of before do not count."""
        by: str | None = self.checkpoint.contents["run"]["config"]["eval"].get("metric")  # older runs have none
        return by if self.is_compared and self.same_tasks else None

    def known_metrics(self, progress: Progress) -> dict[str, Any]:
        """The metrics of the step after which the run resumes, as its checkpoint and metrics.jsonl tell. Collective."""
        folder = Path(self.cfg.train.output_dir)
        written = read_metrics(folder)[0].get(progress.step, {}) if self.is_same_run else {}
        return progress.metrics[-1] | gather_object([written])[0]


def is_finished(cfg: sections.Run, batches: Batches | Stream) -> bool:
    """Whether a run that is to be resumed has no step left, or would stop early again; the first process says so, and
    which settings are others now.

    Raises:
        InputError: if it was trained on other rows.
    """
    if cfg.checkpoint.resume != "auto":
        return False
    folder, steps = Path(cfg.train.output_dir), batches.steps
    run = run_files.finished_run(folder)
    done = run_files.steps_of(run)
    stops = done < steps and improvement.still_stops(cfg.eval, run)
    if not (done == steps or stops):
        return False
    if run["data"]["train"] != batches.fingerprint:
        raise InputError(
            f"The run in {folder} is finished, but the training rows changed since; choose another folder, or replace "
            "that run with --train.overwrite true and --checkpoint.resume none."
        )
    if is_first_process():
        why = f"early stopping ended it after step {done:,}" if stops else f"its {steps:,} steps are done"
        print(f"The run in {folder} is finished: {why}.")
        for line in resuming.changes(run["config"], cfg.model_dump()):
            print(f"{line}, which nothing was trained with")
    return True
