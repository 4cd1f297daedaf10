"""What a model has learnt by now: its mean loss and other figures on held-out rows, its scores, and its answers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from finetune.data.batches import Batches, Inputs
from finetune.data.streaming import Stream
from finetune.output.run_record import Progress
from finetune.training import evaluation
from finetune.training.evaluation import Question
from finetune.training.loss import Objective
from finetune.training.task_scores import Task


@dataclass(frozen=True)
class Examination:
    """Of one model; collective."""

    accelerator: Accelerator
    model: Any
    tokenizer: PreTrainedTokenizerBase
    objective: Objective
    held_out: Inputs | None
    collate: Callable[..., Any]
    batches: Batches | Stream
    """Of training: micro-batches of held-out rows are as large."""
    asked: Sequence[Question]
    tasks: Sequence[Task]
    max_new_tokens: int
    share: dict[str, int]
    """Of the held-out rows, that of this process, as a rank and the number of shares."""
    as_result: Callable[[], AbstractContextManager[None]]
    """Within it the model has the weights that are its result; without averages they are those that are trained."""

    @property
    def names(self) -> set[str]:
        """Figures that an evaluation finds whatever the loss is."""
        return {task.figure for task in self.tasks} | ({"eval_loss"} if self.held_out else set())

    def figures(self) -> dict[str, float]:
        """``eval_loss`` and ``eval_...`` for each figure of the loss, where rows are held out; ``eval_...`` for the
        score of each task."""
        with self.as_result():
            return self._figures()

    def _figures(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.held_out is not None:
            found = evaluation.evaluate(
                self.accelerator,
                self.model,
                self.objective,
                self.held_out,
                micro_batch_size=self.batches.micro_batch_size,
                collate=self.collate,
                share=self.share,
            )
        for task in self.tasks:
            found[task.figure] = task.score_now(self.accelerator, self.model, self.tokenizer, flat=self.batches.flat)
        return found

    def before_training(self, progress: Progress, found: dict[str, float], say: Callable[[str], None]) -> Progress:
        """Progress with what is known before the first step: held-out loss, scores and answers.

        Args:
            found: figures.
        """
        if "eval_loss" in found:
            say(f"held-out loss before training: {found['eval_loss']:.4f}")
        for task in self.tasks:
            say(f"{task.label} before training: {found[task.figure]:.1%}")
        scores = {task.name: found[task.figure] for task in self.tasks}
        return replace(progress, eval_loss=found.get("eval_loss"), scores=scores, answers=self.answers())

    def answers(self) -> dict[str, str]:
        """Greedy answers by the names of their questions."""
        with self.as_result():
            return evaluation.answers(self.accelerator, self.model, self.tokenizer, self.asked, self.max_new_tokens)
