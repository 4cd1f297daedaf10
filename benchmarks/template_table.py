"""The manual's tables of chat templates: what becomes of conversations with those of twenty families."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))  # the tests' templates, tokenizers and conversations

from chat_templates import turns_of  # noqa: E402
from template_families import (  # noqa: E402
    FAMILIES,
    LEFT_OUT,
    OWN_ROWS,
    REFUSED,
    TRAINED,
    outcome,
    rows_of,
    talk_for,
    tokenizer_of,
)

from finetune.data.template_process import shared_child  # noqa: E402
from finetune.errors import BadRow  # noqa: E402

COLUMNS = {
    "turns": ("single turn", "several turns", "Japanese and emoji", "white space at both ends", "50 turns"),
    "system": ("system",),
    "later system": ("system in the middle",),
    "developer": ("developer",),
    "tools": ("tools without a call",),
    "calls": ("a call", "calls over several turns"),
    "words + call": ("words beside a call",),
    "inline reasoning": ("reasoning in the content",),
    "reasoning": ("reasoning", "reasoning in several turns", "reasoning before a call"),
}
"""The conversations of the tests, by the columns that tell of them."""


def table() -> str:
    """In Markdown: what becomes of each kind of conversation, and what is trained of an answer."""
    held = shared_child()  # the process that renders, which is otherwise started for each conversation
    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, family in FAMILIES.items():
        lines.append(f"| {family.title} | {' | '.join(_cell(name, talks) for talks in COLUMNS.values())} |")
    answers = {family.title: _stretch(name, "single turn") for name, family in FAMILIES.items()}
    answers |= {f"{family.title}, reasoning": _stretch(name, "reasoning") for name, family in FAMILIES.items()}
    del held
    width = max(map(len, answers))
    shown = [f"{title:{width}} {text}" for title, text in sorted(answers.items(), key=_place) if text]
    return "\n".join([*lines, "", "What is trained of an answer:", "", "```text", *shown, "```"]) + "\n"


def _place(answer: tuple[str, str]) -> int:
    """The family's place among the others; that of an answer with reasoning is behind that of one without."""
    return [family.title for family in FAMILIES.values()].index(answer[0].partition(", ")[0])


def _cell(name: str, talks: tuple[str, ...]) -> str:
    """What becomes of some conversations; several words where it differs."""
    found = {outcome(name, talk) for talk in talks}
    if OWN_ROWS in found:  # the others have one answer alone, or the same text for all
        found.discard(TRAINED)
    return " / ".join(word for word in (TRAINED, OWN_ROWS, LEFT_OUT, REFUSED) if word in found)


def _stretch(name: str, talk: str) -> str:
    """The last trained stretch of a conversation, in one line; empty if the conversation is refused."""
    try:
        _, trained = turns_of(rows_of(name, talk_for(name, talk)))[-1]
    except BadRow:
        return ""
    return re.sub(r"(?:answer|thought)\d\.?", "…", str(tokenizer_of(name).decode(trained))).replace("\n", "\\n")
