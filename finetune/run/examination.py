"""What a model has learnt by now: its mean loss and other figures on held-out rows, and its answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from finetune.data.batches import Inputs
from finetune.training import evaluation
from finetune.training.evaluation import Question
from finetune.training.loss import Objective


@dataclass(frozen=True)
class Examination:
    """Of one model; collective."""

    accelerator: Accelerator
    model: Any
    tokenizer: PreTrainedTokenizerBase
    objective: Objective
    held_out: Inputs | None
    collate: Callable[..., Any]
    micro_batch_size: int
    asked: Sequence[Question]
    max_new_tokens: int

    def figures(self) -> dict[str, float]:
        """``eval_loss``, and ``eval_...`` for each figure of the loss; nothing where no row is held out."""
        if self.held_out is None:
            return {}
        return evaluation.evaluate(
            self.accelerator,
            self.model,
            self.objective,
            self.held_out,
            micro_batch_size=self.micro_batch_size,
            collate=self.collate,
        )

    def answers(self) -> dict[str, str]:
        """Greedy answers by the names of their questions."""
        return evaluation.answers(self.accelerator, self.model, self.tokenizer, self.asked, self.max_new_tokens)
