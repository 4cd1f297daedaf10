"""Rows of a task as a model takes them: tokens of the questions, and of each choice behind its question."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding import Row
from finetune.data.prompt_texts import as_text, room_problems, texts_of, tokens_of
from finetune.data.template_process import TemplateProcess
from finetune.errors import BadRow, refuse_if_any
from finetune.scoring.task_rows import TaskRow, shortened


@dataclass(frozen=True)
class AskedRows:
    """Make some with ``asked_rows``."""

    rows: list[TaskRow]
    prompts: list[list[int]]
    """Tokens of each question, up to where its answer begins."""
    choices: list[Row]
    """Each choice of each row, one behind the other, after its question; the choice alone is what counts."""

    def grouped(self, values: Sequence[float]) -> list[list[float]]:
        """What was found of each choice, by rows."""
        ends = np.cumsum([len(row.choices) for row in self.rows])[:-1]
        return [part.tolist() for part in np.split(np.asarray(values, float), ends)]


def asked_rows(
    rows: Sequence[TaskRow], tokenizer: PreTrainedTokenizerBase, positions: int | None, *, plain: bool, name: str
) -> AskedRows:
    """Rows rendered and tokenised; without a chat template where the tokenizer has none.

    Args:
        positions: of the model; None for one without limit.
        plain: ask texts as they stand, without a chat template.
        name: of the model, for the sentences that refuse rows.

    Raises:
        InputError: if a row cannot be rendered, or has no room for an answer.
    """
    if plain or tokenizer.chat_template is None:
        rows = _plain(rows)
    prompts = [row.prompt for row in rows]
    texts = texts_of(prompts, TemplateProcess(tokenizer))
    tokens = [tokens_of(tokenizer, prompt, text) for prompt, text in zip(prompts, texts)]
    choices = [each for row, text, ids in zip(rows, texts, tokens) for each in _choices(row, text, ids, tokenizer)]
    wrong = room_problems(
        [row.source for row in choices], [row.tokens[1:].tolist() for row in choices], positions, name
    )
    wrong = wrong or room_problems([prompt.source for prompt in prompts], tokens, positions, name)
    refuse_if_any(shortened(wrong, "asked"))
    return AskedRows(list(rows), tokens, choices)


def _choices(row: TaskRow, text: str, prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[Row]:
    """Question and choice as one text; the choice's tokens are those behind as many as the question alone has.

    Of a plain question, white space at its end goes with the choice, for many tokens begin with a space: of "it is "
    and "red" the choice is " red".
    """
    begin, gap = text, ""
    if row.prompt.is_text:
        begin = text.rstrip()
        gap, prompt = text[len(begin) :] or " ", tokens_of(tokenizer, row.prompt, begin)
    for choice in row.choices:
        tokens = tokens_of(tokenizer, row.prompt, begin + gap + choice)
        first = max(1, min(len(prompt), len(tokens) - 1))
        yield Row(np.array(tokens, np.int32), [(first, len(tokens))], row.prompt.source)


def _plain(rows: Sequence[TaskRow]) -> list[TaskRow]:
    found: list[TaskRow] = []
    wrong = []
    for row in rows:
        try:
            found.append(replace(row, prompt=as_text(row.prompt)))
        except BadRow as reason:
            wrong.append(f"{row.prompt.source}: {reason}; leave it out, or give a chat template.")
    refuse_if_any(shortened(wrong, "asked"))
    return found
