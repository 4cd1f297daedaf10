"""The manual's tables of compatibility, written from the rules by which the recipe refuses a combination."""

import re

from finetune.config.compatibility import ADAPTERS, BITS, OPTIMIZERS, Cell, cells, refusal
from finetune.config.strategy_names import STRATEGIES

NAMES = {"none": "full", "lora": "LoRA", "dora": "DoRA"}


def table() -> str:
    """Two tables in Markdown, strategies by methods and by optimizers, and the sentences that their numbers stand for.

    Raises:
        AssertionError: if the rules no longer fall into these two.
    """
    methods = [(bits, adapter) for adapter in ADAPTERS for bits in BITS if bits is None or adapter != "none"]
    by_method = {(s, m): refusal(Cell(s, *m, "adamw")) for s in STRATEGIES for m in methods}
    by_optimizer = {(s, o): refusal(Cell(s, None, "none", o)) for s in STRATEGIES for o in OPTIMIZERS}
    for cell in cells():
        if (method := (cell.bits, cell.adapter)) in methods:
            parts = by_method[cell.strategy, method], by_optimizer[cell.strategy, cell.optimizer]
            assert (refusal(cell) is None) == (parts == (None, None)), cell
    notes: list[str] = []

    def mark(sentence: str | None, strategy: str) -> str:
        if sentence is None:
            return "yes"
        note = re.sub(rf"\b{strategy}\b", "this strategy", sentence)
        note = note[0].upper() + note[1:]
        if note not in notes:
            notes.append(note)
        return f"({notes.index(note) + 1})"

    titles = [NAMES[adapter] + (f", {bits} bits" if bits else "") for bits, adapter in methods]
    lines = _head(titles)
    for s in STRATEGIES:
        lines.append(_row(s, [mark(by_method[s, m], s) for m in methods]))
    lines += ["", *_head([f"`{o}`" for o in OPTIMIZERS])]
    for s in STRATEGIES:
        lines.append(_row(s, [mark(by_optimizer[s, o], s) for o in OPTIMIZERS]))
    return "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))]) + "\n"


def _head(titles: list[str]) -> list[str]:
    return [f"| strategy | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]


def _row(strategy: str, marks: list[str]) -> str:
    return f"| `{strategy}` | {' | '.join(marks)} |"
