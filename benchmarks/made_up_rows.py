"""Conversations for measurements: made up from syllables, or given ones repeated with other names and numbers."""

import json
import random
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

SEED = 0
_SYLLABLES = [first + vowel for first in (*"bdfghklmnprstvwz", "ch", "st", "tr") for vowel in "aeiou"]
_NUMBER = re.compile(r"\d+")
_NAME = re.compile(r"\b[A-Z][a-z]{2,}\b")

Conversation = list[dict[str, str]]


def made_up_conversations(count: int, *, words_question: int, words_answer: int) -> Iterator[Conversation]:
    """Questions and answers of made-up words, frequent and rare as those of a language, with numbers in between."""
    draw = random.Random(SEED)
    words = ["".join(draw.choices(_SYLLABLES, k=draw.choice((1, 2, 2, 3)))) for _ in range(5000)]
    weights = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))

    def text(mean_words: int) -> str:
        chosen = draw.choices(words, cum_weights=weights, k=max(2, round(draw.gauss(mean_words, mean_words / 3))))
        chosen[::5] = [str(draw.randrange(1000)) for _ in chosen[::5]]
        return " ".join(chosen) + "."

    for _ in range(count):
        question = f"{made_up_name(draw)} {text(words_question)}"
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": text(words_answer)}]


def made_up_name(draw: random.Random) -> str:
    return "".join(draw.choices(_SYLLABLES, k=4)).capitalize()


def repeated(conversations: list[Conversation], count: int) -> Iterator[Conversation]:
    """Real conversations over and over, each with numbers of its own and a name that no other has.

    A tokenizer remembers the words that it has seen: without new ones, repetitions would be faster than rows.
    """
    draw = random.Random(SEED)
    for i in range(count):
        times, place = divmod(i, len(conversations))
        found = _NAME.search(" ".join(message["content"] for message in conversations[place]))
        name = made_up_name(draw)
        yield [
            {**message, "content": varied(message["content"], old=found and found[0], new=name, add=times)}
            for message in conversations[place]
        ]


def varied(text: str, *, old: str | None, new: str, add: int) -> str:
    """The text with another name in place of one, and larger numbers."""
    text = text.replace(old, new) if old else text
    return _NUMBER.sub(lambda number: str(int(number[0]) + add), text)


def write_rows(file: Path, conversations: Iterator[Conversation]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        for messages in conversations:
            lines.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
