"""Which evaluation was the best, whether training goes on, and the weights of the best one as the result."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from finetune import checkpoint, distributed
from finetune.checkpoint import folder as folders
from finetune.config import sections
from finetune.errors import InputError, RunStopped
from finetune.output.run_record import Progress

LOWER_IS_BETTER = ("eval_loss", "eval_bits_per_byte")
"""How the names of such figures begin; of all others more is better."""


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
    if section.metric not in metrics:
        known = ", ".join(name for name in metrics if name.startswith("eval_"))
        raise InputError(f"eval.metric: an evaluation of this run has no {section.metric}; set it to one of {known}.")
    return float(metrics[section.metric])


def is_better(metric: str, value: float, than: float) -> bool:
    """Whether a figure improves on another."""
    return value < than if metric.startswith(LOWER_IS_BETTER) else value > than


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
    return (
        f"early stopping: {section.metric} was {best}, and has not improved in {progress.evaluations_since_best} "
        "evaluations"
    )


def known_in(run: Path, section: sections.Eval, progress: Progress) -> Progress:
    """A resumed run's, without a best evaluation whose checkpoint is gone or in another folder. Collective."""
    if progress.best is None or not section.keep_best or gather_object([_is_there(run, progress)])[0]:
        return progress
    return replace(progress, best=None)


def take_best(
    run: Path,
    launch: distributed.Strategy,
    accelerator: Accelerator,
    model: Any,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    metrics: dict[str, Any],
    *,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Give a model the weights of the best evaluation, unless it has them. Collective.

    Args:
        metrics: of the last step.

    Returns:
        The metrics of the step whose weights the model has: the last one's, if no evaluation gave a number.

    Raises:
        RunStopped: if its checkpoint cannot be read.
    """
    if progress.best is None or progress.best["step"] == metrics["step"]:
        return metrics
    path = _path(run, progress)
    try:
        if not gather_object([_is_there(run, progress)])[0]:
            raise InputError(f"{path} is not there, or incomplete.")
        found = checkpoint.chosen(str(path), run, launch, say=say)
        assert found is not None
        checkpoint.restore(found, launch, accelerator, model, optimizer, weights_only=True)
    except InputError as error:
        raise RunStopped(
            f"The weights of the best evaluation, after step {progress.best['step']}, cannot be read: {error} No "
            "final/ was written; for the weights of the last step, run the same command with --checkpoint.resume auto "
            "--eval.keep_best false."
        ) from error
    return progress.best


def _is_there(run: Path, progress: Progress) -> bool:
    return folders.is_complete(_path(run, progress))


def _path(run: Path, progress: Progress) -> Path:
    """The checkpoint of the best evaluation."""
    assert progress.best is not None
    return folders.checkpoints_of(run) / folders.name_of(progress.best["step"])
