"""Rows that a model is scored on: a question, and the expected answer or choices, in any format that training reads.

Beside these formats, ``prompt`` or ``question`` with ``answer`` is a row. With ``choices`` (texts) the answer is the
number of the right one, from 0, or its text, or a letter from A to Z. An answer without text is none.
"""

import string
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from finetune.data import sources
from finetune.data.columns import Columns, renamed
from finetune.data.formats import convert, convert_prompt, detect
from finetune.data.prompt_texts import Prompt
from finetune.data.sources import Record, Source
from finetune.errors import BadRow, InputError, refuse_if_any
from finetune.scoring.scores import Score, chosen, json_object

MOST_SHOWN = 5
"""Rows that cannot be used, of which the reason is said."""


@dataclass(frozen=True)
class TaskRow:
    """One question, and what is right."""

    prompt: Prompt
    expected: str | None = None
    """The right answer, or the right choice."""
    choices: tuple[str, ...] = ()

    def judged(self, score: Score, answer: str) -> float:
        """The score of an answer, from 0 to 1."""
        assert score.judge is not None
        return score.judge(answer, self.expected or "")

    def judged_choices(self, score: Score, log_probabilities: Sequence[float]) -> float:
        """1 if the right choice is the one that a model takes."""
        taken = chosen(log_probabilities, self.choices, by_length=score.by_length)
        return float(self.choices[taken] == self.expected)


def read_task_rows(
    named: Sequence[Source],
    key: str,
    *,
    columns: Columns = (),
    limit: int | None = None,
    only: Container[str] | None = None,
) -> list[TaskRow]:
    """The rows of some sources, in their order.

    Args:
        key: what named them, for the sentences that refuse them.
        columns: names that formats know, by the names in the rows, as of data.columns; rows without them are read by
            the names that they have.
        limit: take this many at most, from the beginning.
        only: take those of these names, as ``file:line``; None for all.

    Raises:
        InputError: with file and line of the first rows that cannot be used; there is no such file, or nothing in it.
    """
    refuse_if_any([f"{key} {problem}" for problem in sources.problems(named)])
    found: list[TaskRow] = []
    wrong: list[str] = []
    records = (record for source in named for record in sources.read(source))
    for each in islice((each for each in records if only is None or each.source in only), limit):
        try:
            if not isinstance(each, Record):
                raise BadRow(each.reason)
            found.append(task_row(each, columns))
        except BadRow as reason:
            wrong.append(f"{each.source}: {reason}; correct the row, or leave it out.")
    refuse_if_any(shortened(wrong, "used"))
    if not found:
        raise InputError(f"{key} {', '.join(source.path for source in named)}: there are no rows in it.")
    return found


def shortened(wrong: Sequence[str], what: str) -> list[str]:
    """The first sentences about rows, and how many more cannot be used, or asked."""
    more = [f"{len(wrong) - MOST_SHOWN:,} more rows cannot be {what}."] if len(wrong) > MOST_SHOWN else []
    return [*wrong[:MOST_SHOWN], *more]


def task_row(record: Record, columns: Columns = ()) -> TaskRow:
    """A record as a row of a task.

    Raises:
        BadRow: with the reason, if it asks nothing, or its choices or its answer are not as they should be.
    """
    if not isinstance(record.value, dict):
        raise BadRow("the row is not an object")
    value = renamed(record.value, columns)
    if detect(value) in (None, "text") and value.get("prompt") is None and isinstance(value.get("question"), str):
        value = value | {"prompt": value["question"]}
    answer = value.get("answer")
    has_own = answer is not None or value.get("choices") is not None
    prompt = Prompt(record.source, convert_prompt(value, to_last_answer=not has_own), record.value)
    if value.get("choices") is not None:
        choices = _choices(value["choices"])
        return TaskRow(prompt, _right_choice(choices, answer), choices)
    if answer is None:
        return TaskRow(prompt, _with_text(_last_answer(value)))
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise BadRow("the key `answer` is neither a text nor a number")
    return TaskRow(prompt, _with_text(str(answer)))


def _with_text(answer: str | None) -> str | None:
    """None for an empty answer too: it would be a part of every answer."""
    return answer if answer and answer.strip() else None


def _last_answer(value: dict[str, Any]) -> str | None:
    """The last answer of a row that training reads; None where it has none."""
    try:
        example = convert(value, "auto")
    except BadRow:  # a question alone, of which ``convert_prompt`` has found nothing wrong
        return None
    if example.messages is None:
        return example.completion if example.prompt else None
    return next((each["content"] for each in reversed(example.messages) if each["role"] == "assistant"), None)


def _choices(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list):
        raise BadRow("the key `choices` is not a list of texts")
    choices = tuple(given)
    if len(choices) < 2 or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise BadRow("the key `choices` needs two texts or more, none of them empty")
    if len(set(choices)) < len(choices):
        raise BadRow("two of the choices are the same")
    return choices


def _right_choice(choices: tuple[str, ...], answer: Any) -> str:
    if isinstance(answer, str) and answer in choices:
        return answer
    number = answer if isinstance(answer, int) and not isinstance(answer, bool) else None
    if isinstance(answer, str) and len(answer.strip()) == 1:
        sign = answer.strip()
        if sign.isdecimal():
            number = int(sign)
        elif sign in string.ascii_letters:  # others may become one, or two, in upper case
            number = string.ascii_uppercase.index(sign.upper())
    if number is None or not 0 <= number < len(choices):
        raise BadRow(
            f"the key `answer` is {repr(answer)[:40]}; give the number of the right choice, from 0, or its text"
        )
    return choices[number]


def refuse_unfit(rows: Sequence[TaskRow], scores: Sequence[Score]) -> None:
    """
    Raises:
        InputError: with the first rows that a score cannot be taken of.
    """
    wrong = [
        f"{row.prompt.source}: {reason}; give it, or choose another score."
        for row in rows
        for score in scores
        if (reason := _unfit(row, score))
    ]
    refuse_if_any(shortened(wrong, "scored"))


def _unfit(row: TaskRow, score: Score) -> str:
    if score.judge is None and not row.choices:
        return f"it has no choices, which the score {score.name} needs in the keys `choices` and `answer`"
    if score.judge is not None and score.needs_answer and row.expected is None:
        return f"it has no answer to compare with, which the score {score.name} needs"
    if score.needs_fields is None:
        return ""
    expected = json_object(row.expected or "")
    if expected is None:
        return f"its answer is not a JSON object, which the score {score.name} needs"
    lacking = [repr(name) for name in score.needs_fields if name not in expected]
    return f"its answer has no field {' and '.join(lacking)}, which the score {score.name} compares" if lacking else ""
