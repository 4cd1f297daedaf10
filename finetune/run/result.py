"""The result of a run: its record completed, final/ written, and a summary printed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from finetune import distributed
from finetune.config import sections
from finetune.models.spec import ModelSpec
from finetune.output import run_files
from finetune.output.run_record import Progress, RunRecord
from finetune.planner import RunPlan
from finetune.run.screen import Screen
from finetune.training import evaluation
from finetune.training.task_scores import Task


def completed(
    record: RunRecord,
    progress: Progress,
    section: sections.Eval,
    asked: list[evaluation.Question],
    answers: dict[str, str],
    tasks: Sequence[Task],
    metrics: dict[str, Any],
    *,
    measured: dict[str, float | None],
    held_bytes: list[dict[str, int]],
) -> RunRecord:
    """The record with what was measured.

    Args:
        progress: as it was before training, where it tells of that.
        answers: after training.
        metrics: of the last step, which was evaluated.
        held_bytes: of each process.
    """
    before, shown = progress.answers, evaluation.shown(asked, answers, section.prompts)
    told = [
        {"prompt": name, **({"before": before[name]} if name in before else {}), "after": after}
        for name, after in shown.items()
    ]
    record = replace(record, measured=measured, answers=told or None, held_bytes=held_bytes)
    eval_loss = metrics.get("eval_loss")
    if eval_loss is not None and progress.eval_loss is not None:
        record = replace(record, eval_loss={"before": progress.eval_loss, "after": eval_loss})
    if section.exact_match:
        found = {
            "rows": sum(question.expected is not None for question in asked),
            "before": evaluation.exact_match(asked, progress.answers),
            "after": evaluation.exact_match(asked, answers),
        }
        record = replace(record, exact_match=found)
    if tasks:
        scored = {
            task.name: {
                "score": task.score.name,
                "rows": len(task.asked.rows),
                "before": progress.scores.get(task.name),
                "after": metrics[task.figure],
            }
            for task in tasks
        }
        record = replace(record, tasks=scored)
    return record


def write(
    folder: Path,
    accelerator: Accelerator,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    spec: ModelSpec,
    record: RunRecord,
    metrics: dict[str, Any],
    *,
    adapter_alone: bool,
    shapes: dict[str, tuple[int, ...]],
    beginning: dict[str, torch.Tensor],
) -> None:
    """Write run.yaml and final/; collective.

    Args:
        metrics: of the last step.
        shapes: of each trained parameter.
        beginning: what the main process got from ``adapter_start.start``.

    Raises:
        RunStopped: if what was written is not what was trained, or nothing could be written.
    """
    written, is_main = record.as_dict(), accelerator.is_main_process
    with distributed.long_wait(), distributed.trained_everywhere(model):
        run_files.save_final(
            folder,
            accelerator.unwrap_model(model),
            tokenizer,
            distributed.full_parameters(accelerator, model, with_frozen=not adapter_alone),
            distributed.working_parameters(accelerator, model),
            adapter_alone=adapter_alone,
            shapes=shapes,
            beginning=beginning,
            dtype=spec.stored_dtype,
            dtypes=spec.saved_dtypes,
            card=run_files.model_card(spec.section.path, written, metrics) if is_main else None,
            record=written,
        )


def tell(screen: Screen, folder: Path, record: RunRecord, plan: RunPlan | None, *, adapter_alone: bool) -> None:
    """Print what came of the run."""
    if record.eval_loss:
        first, last = record.eval_loss["before"], record.eval_loss["after"]
        screen.say(f"held-out loss: {first:.4f} before, {last:.4f} after training")
    if record.best:
        step, figures = record.best["step"], [f"{name} {value:.4f}" for name, value in record.best.items()][1:]
        screen.say(f"final/ has the weights of step {step}, the best by {' '.join(figures)}")
    if record.exact_match:
        screen.say(run_files.describe_exact_match(record.exact_match))
    for line in run_files.describe_tasks(record.tasks or {}):
        screen.say(line)
    for line in plan.compare(**record.measured) if plan and record.measured else []:
        screen.say(line)
    if record.answers:
        screen.answers(record.answers)
    if adapter_alone:
        merge = f"finetune merge {folder} --output DIR"
        screen.say(f"The adapter is in {folder / 'final'}; to make a standalone model: {merge}")
    else:
        screen.say(f"The fine-tuned model is in {folder / 'final'}")
