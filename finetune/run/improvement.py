"""Which evaluation was the best, whether training goes on, and the weights of the best one as the result."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from finetune import checkpoint, distributed
from finetune.checkpoint import folder as folders
from finetune.config import sections
from finetune.data.rows import Rows
from finetune.errors import InputError, refuse_if_any
from finetune.output.run_record import Progress, RunRecord
from finetune.training.loss import Objective
from finetune.training.task_scores import Task

LOWER_IS_BETTER = ("eval_loss", "eval_bits_per_byte")
"""These, and those of a single source (``eval_loss/mine``); of all other figures more is better."""


def metric_problems(
    section: sections.Eval, objective: Objective, tasks: Sequence[Task], held_out: Rows | None
) -> list[str]:
    """Why evaluations cannot be compared by eval.metric, where their figures are known before the first one."""
    if not is_asked(section) or objective.figure_names is None:
        return []
    of_rows = ["eval_loss", *(f"eval_{name}" for name in objective.figure_names)] if held_out else []
    return _problems(section, of_rows + [task.figure for task in tasks])


def is_asked(section: sections.Eval) -> bool:
    """Whether evaluations are compared with one another."""
    return section.keep_best or section.early_stopping > 0


def judged(section: sections.Eval, progress: Progress, metrics: Mapping[str, Any]) -> Progress:
    """Where a run stands after an evaluation, if they are compared; the first process decides for all. Collective.

    Args:
        metrics: of the step, with the figures of the evaluation.

    Raises:
        InputError: if the evaluation has no such figure.
    """
    if not is_asked(section):
        return progress
    value = gather_object([figure_of(section, metrics)])[0]
    best = math.nan if progress.best is None else progress.best[section.metric]
    if not math.isnan(value) and (math.isnan(best) or is_better(section.metric, value, best)):
        return replace(progress, best=dict(metrics), evaluations_since_best=0)
    return replace(progress, evaluations_since_best=progress.evaluations_since_best + 1)


def figure_of(section: sections.Eval, metrics: Mapping[str, Any]) -> float:
    """The figure that evaluations are compared by.

    Raises:
        InputError: if there is none of this name.
    """
    refuse_if_any(_problems(section, [name for name in metrics if name.startswith("eval_")]))
    value = metrics[section.metric]
    return math.nan if value is None else float(value)  # as metrics.jsonl has what is not finite


def _problems(section: sections.Eval, names: Collection[str]) -> list[str]:
    known = f"set it to one of {', '.join(names)}" if names else "set data.eval"
    said = f"eval.metric: an evaluation of this run has no {section.metric}; {known}."
    return [said] * (section.metric not in names)


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a figure improves on another."""
    return value < than if metric.partition("/")[0] in LOWER_IS_BETTER else value > than


def is_saved(section: sections.Eval, progress: Progress, *, at_end: bool) -> bool:
    """Whether the step of an evaluation is saved for it: the best one, and where training stops.

    Args:
        at_end: as ``checkpoint.at_end``.
    """
    return (section.keep_best and progress.evaluations_since_best == 0) or (at_end and has_stopped(section, progress))


def has_stopped(section: sections.Eval, progress: Progress) -> bool:
    """Whether training ends early."""
    return 0 < section.early_stopping <= progress.evaluations_since_best


def describe_stop(section: sections.Eval, progress: Progress) -> str:
    """Why training ends early, as a line."""
    best = "never a number" if progress.best is None else f"best after step {progress.best['step']}"
    evaluations = f"{(count := progress.evaluations_since_best)} evaluation{'s' if count > 1 else ''}"
    return f"early stopping: {section.metric} was {best}, and has not improved in {evaluations}"


def still_stops(section: sections.Eval, record: Mapping[str, Any]) -> bool:
    """Whether training would end early where the run of a record did."""
    evaluations = record.get("stopped", {}).get("evaluations", 0)
    return 0 < section.early_stopping <= evaluations and record["config"]["eval"]["metric"] == section.metric


def known_in(
    run: Path, section: sections.Eval, progress: Progress, *, was_by: str | None, names: Collection[str]
) -> Progress:
    """A resumed run's. Its evaluations are compared from scratch where the best one is of no use. Collective.

    That is so if the best one was chosen by another figure, lacks one that an evaluation has now, or has no checkpoint
    in this folder, although its weights are asked for.

    Args:
        was_by: the figure that evaluations were compared by, see ``Resumption.compared_by``.
        names: of the figures that an evaluation has now.
    """
    best = progress.best
    if was_by == section.metric and (
        best is None
        or (
            {section.metric, *names} <= best.keys()
            and (not section.keep_best or gather_object([_is_there(run, best["step"])])[0])
        )
    ):
        return progress
    return replace(progress, best=None, evaluations_since_best=0)


def is_judged(section: sections.Eval, progress: Progress) -> bool:
    """Whether the last evaluation of a resumed run was compared before its checkpoint was written."""
    has_compared = progress.best is not None or progress.evaluations_since_best > 0
    return has_compared and section.metric in progress.metrics[-1]


def take_best(
    run: Path,
    launch: distributed.Strategy,
    model: Any,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    metrics: dict[str, Any],
    *,
    averages: bool = False,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Give a model the weights of the best evaluation, unless it has them. Collective.

    Args:
        metrics: of the last step.
        averages: the run keeps averages of its weights, and the best evaluation was theirs.

    Returns:
        The metrics of the step whose weights the model has: the last one's, if no evaluation gave a number, or if the
        checkpoint of the best one is missing or damaged, which is said.
    """
    if progress.best is None or progress.best["step"] == metrics["step"]:
        return metrics
    step = progress.best["step"]
    path = _path(run, step)
    try:
        if not gather_object([_is_there(run, step)])[0]:
            raise InputError(f"{path} is missing or incomplete.")
        found = checkpoint.chosen(str(path), run, launch, say=say)
    except InputError as error:
        say(
            f"The weights of the best evaluation, after step {step}, cannot be read: {error} final/ gets those of the "
            f"last step, {metrics['step']}, instead."
        )
        return metrics
    assert found is not None
    checkpoint.restore_weights(found, launch, model, optimizer, averages=averages)
    return progress.best


def recorded(record: RunRecord, section: sections.Eval, progress: Progress, *, last: int, taken: int) -> RunRecord:
    """The record of a finished run, with where training ended early, and which evaluation was the best.

    Args:
        last: step of training.
        taken: step whose weights are the result.
    """
    if last < record.steps:
        record = replace(record, stopped={"after_step": last, "evaluations": progress.evaluations_since_best})
    best = progress.best
    if section.keep_best and best is not None and best["step"] == taken:
        record = replace(record, best={each: best[each] for each in ("step", section.metric)})
    return record


def _is_there(run: Path, step: int) -> bool:
    return folders.is_complete(_path(run, step))


def _path(run: Path, step: int) -> Path:
    return folders.checkpoints_of(run) / folders.name_of(step)
