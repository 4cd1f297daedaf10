"""Scores of one answer, each from 0 to 1: a text and what was expected, or the log-probabilities of given choices.

A score is written as its name, with what it needs behind a colon: ``regex:#### (-?[0-9.,]+)``.
"""

import difflib
import json
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from finetune.errors import InputError

Judge = Callable[[str, str], float]
"""An answer and the expected one, to a number from 0 to 1."""

_IN_THOUSANDS = re.compile(r"(?!0)\d{1,3}([, \u00a0\u202f])\d{3}(?:\1\d{3})*(?:\.\d+)?")
_BEFORE_DIGITS = re.compile(r"\s*\$?\s*([-+]?)\s*\$?\s*")
_AFTER_DIGITS = string.whitespace + "$.,"


@dataclass(frozen=True)
class Score:
    """What is asked of each answer; the score of a task is the mean. Make one with ``score_of``."""

    name: str
    """As it was written."""
    judge: Judge | None
    """None for a score of choices."""
    is_share: bool = True
    """Each answer is right or wrong, so that the mean is a share of right ones."""
    by_length: bool = False
    """Of choices: log-probabilities are divided by the characters of the choice."""
    needs_answer: bool = True
    """Rows must say which answer is expected."""
    needs_fields: tuple[str, ...] | None = None
    """The expected answer must be a JSON object with these; None where it may be any text."""


def score_of(written: str) -> Score:
    """The score that a text names.

    Raises:
        InputError: if there is none of that name, or what stands behind the colon is not what it needs.
    """
    name, colon, given = written.partition(":")
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {close[0]}? Otherwise " if close else ""
        raise InputError(f"score {written}: there is no score {name!r}; {hint}choose one of {', '.join(NAMES)}.")
    if name in ("regex", "regex_last"):
        return Score(written, _by_pattern(written, given, last=name == "regex_last"))
    if name == "json_fields":
        fields = [field.strip() for field in given.split(",")] if colon else None
        if fields is not None and not all(fields):
            raise InputError(f"score {written}: give names of fields behind the colon, as in json_fields:do,room.")
        return Score(
            written,
            lambda answer, expected: json_fields(answer, expected, fields),
            is_share=False,
            needs_fields=tuple(fields or ()),
        )
    if colon:
        raise InputError(f"score {written}: {name} takes nothing behind a colon; write {name}.")
    if name == "json":
        return Score(written, lambda answer, expected: float(is_json(answer)), needs_answer=False)
    if name in ("choice", "choice_norm"):
        return Score(written, None, by_length=name == "choice_norm")
    return Score(written, {"exact_match": exact_match, "contains": contains}[name])


NAMES = {
    "exact_match": "the answer is the expected one, word for word",
    "contains": "the expected answer stands somewhere in the answer",
    "regex": "what a pattern finds first in the answer is what it finds in the expected one: regex:#### (-?[0-9.,]+)",
    "regex_last": "the same with what it finds last",
    "json": "the answer is a JSON object or array, alone or as a block of code",
    "json_fields": "share of the expected object's fields that the answer has with the same value; json_fields:a,b "
    "for some of them",
    "choice": "of given choices the expected one has the highest log-probability",
    "choice_norm": "the same per character of the choice",
}
"""Each score, and when an answer is right."""


def exact_match(answer: str, expected: str) -> float:
    """1 if both are the same but for white space around them."""
    return float(answer.strip() == expected.strip())


def contains(answer: str, expected: str) -> float:
    """1 if the expected answer is a part of the answer."""
    return float(expected.strip() in answer)


def extracted(pattern: re.Pattern[str], text: str, *, last: bool = False) -> str | None:
    """What a pattern finds in a text: its first group that took part, or all of it where it has none; None for nothing.

    For example, ``#### (-?[0-9.,]+)`` finds ``1,200.`` in ``so that is\n#### 1,200.``.
    """
    found = list(pattern.finditer(text)) if last else [match for match in [pattern.search(text)] if match]
    if not found:
        return None
    groups = [group for group in found[-1].groups() if group is not None]
    return (groups[0] if groups else found[-1].group()).strip()


def equal_values(one: str, other: str) -> bool:
    """Whether two texts are the same, or the same number: dollar signs, commas or spaces between thousands, and a full
    stop or comma at the end say nothing, so that ``$1,200.`` is ``1200.0``. Other commas make no number: ``1,23``."""
    if one == other:
        return True
    numbers = _number(one), _number(other)
    return numbers[0] is not None and numbers[0] == numbers[1]


def _number(text: str) -> Decimal | None:
    before = _BEFORE_DIGITS.match(text)
    assert before is not None  # of anything, perhaps nothing
    digits = text[before.end() :].rstrip(_AFTER_DIGITS)
    if _IN_THOUSANDS.fullmatch(digits):
        digits = re.sub(r"[^\d.]", "", digits)
    try:
        found = Decimal(before[1] + digits)
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def _by_pattern(written: str, given: str, *, last: bool) -> Judge:
    if not given:
        raise InputError(f"score {written}: give a pattern behind the colon, as in regex:#### (-?[0-9.,]+).")
    try:
        pattern = re.compile(given)
    except re.error as error:
        raise InputError(f"score {written}: not a regular expression of Python ({error}); correct it.") from error

    def judge(answer: str, expected: str) -> float:
        found, right = extracted(pattern, answer, last=last), extracted(pattern, expected, last=last)
        wanted = expected.strip() if right is None else right
        return float(found is not None and equal_values(found, wanted))

    return judge


def json_fields(answer: str, expected: str, fields: Sequence[str] | None = None) -> float:
    """Share of the expected object's fields that the answer has with the same value; 0 for an answer without JSON.

    Args:
        fields: those that count; None for all.
    """
    found, wanted = json_object(answer), json_object(expected)
    if found is None or wanted is None:
        return 0.0
    names = list(wanted) if fields is None else fields
    right = sum(name in found and name in wanted and _same(found[name], wanted[name]) for name in names)
    return right / len(names) if names else 1.0


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0 and not true, at any depth."""
    pairs = [(one, other)]  # no calls of itself: JSON may be as deep as Python lets calls be
    while pairs:
        one, other = pairs.pop()
        if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            pairs += zip(one, other)
        elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            pairs += [(value, other[key]) for key, value in one.items()]
        elif isinstance(one, bool) != isinstance(other, bool) or one != other:
            return False
    return True


def is_json(text: str) -> bool:
    """Whether a text is a JSON object or array, which may stand in a fenced block of Markdown."""
    return isinstance(_parsed(text), dict | list)


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, which may stand in a fenced block of Markdown; None for another text."""
    found = _parsed(text)
    return found if isinstance(found, dict) else None


def _parsed(text: str) -> Any:
    inner = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        return json.loads(inner[1] if inner else text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(constant: str) -> None:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{constant} is not JSON")


def chosen(log_probabilities: Sequence[float], choices: Sequence[str], *, by_length: bool) -> int:
    """Which of some choices a model takes: that of the highest log-probability, the first of equal ones.

    Args:
        log_probabilities: of each choice, summed over its tokens.
        by_length: divide each by the characters of the choice, so that longer ones are not at a disadvantage.
    """
    lengths = [len(choice) if by_length else 1 for choice in choices]
    values = [each / length for each, length in zip(log_probabilities, lengths, strict=True)]
    return values.index(max(values))
