"""Scores of tasks while a model is trained: questions of files, answered or chosen among, and judged."""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from finetune.cache import key_of
from finetune.config import sections
from finetune.data.columns import Columns
from finetune.data.sources import Source
from finetune.scoring.asked_rows import AskedRows, asked_rows
from finetune.scoring.scores import Score, score_of
from finetune.scoring.task_rows import read_task_rows, refuse_unfit
from finetune.training.evaluation import Question, answers, log_probabilities


@dataclass(frozen=True)
class Task:
    """One entry of eval.tasks, read and tokenised."""

    name: str
    score: Score
    asked: AskedRows
    questions: list[Question]
    """Of a score of answers."""
    max_new_tokens: int

    @property
    def figure(self) -> str:
        """Its key in metrics.jsonl."""
        return f"eval_{self.name}"

    @property
    def label(self) -> str:
        """In words."""
        return f"{self.name} ({self.score.name}, {len(self.asked.rows):,} rows)"

    @property
    def fingerprint(self) -> list[Any]:
        """What other processes must have read as well, and a run that goes on must score as it did."""
        choices = [row.tokens.tolist() for row in self.asked.choices]
        answers = [row.expected for row in self.asked.rows]
        return [self.name, key_of([self.score.name, self.asked.prompts, choices, answers])]

    def score_now(
        self, accelerator: Accelerator, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, *, flat: bool
    ) -> float:
        """The mean score of a prepared model; collective, and the same on all processes.

        Args:
            flat: whether rows lie end to end, without padding, as in training.
        """
        if self.score.judge is None:
            found = self.asked.grouped(log_probabilities(accelerator, model, self.asked.choices, flat=flat))
            judged = [row.judged_choices(self.score, own) for row, own in zip(self.asked.rows, found)]
        else:
            said = answers(accelerator, model, tokenizer, self.questions, self.max_new_tokens)
            judged = [
                row.judged(self.score, said[question.name]) for row, question in zip(self.asked.rows, self.questions)
            ]
        return sum(judged) / len(judged)


def read_tasks(
    section: sections.Eval, data: sections.Data, tokenizer: PreTrainedTokenizerBase, positions: int | None
) -> list[Task]:
    """The tasks of a configuration.

    Args:
        data: whose columns rows of tasks may have too.
        positions: of the model; None for one without limit.

    Raises:
        InputError: if their files have rows that cannot be asked, or not be scored.
    """
    columns = tuple(sorted(data.columns.items()))
    return [_read(task, section.max_new_tokens, columns, tokenizer, positions) for task in section.tasks]


def _read(
    section: sections.Task,
    max_new_tokens: int,
    columns: Columns,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None,
) -> Task:
    score, key = score_of(section.score), f"eval.tasks: {section.name}:"
    rows = read_task_rows([Source(section.data)], key, columns=columns, limit=section.limit)
    refuse_unfit(rows, [score])
    asked = asked_rows(rows, tokenizer, positions, plain=False, name="the model")
    questions = [
        Question(str(number), tokens, row.expected, _length(row.expected, tokenizer))
        for number, (row, tokens) in enumerate(zip(asked.rows, asked.prompts))
    ]
    return Task(section.name, score, asked, questions, section.max_new_tokens or max_new_tokens)


def _length(text: str | None, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0
