"""Files to rows, and rows to batches.

Every process reads the same files before the process group exists, so that no collective waits for a
tokenizer; ``fingerprint`` lets the run check that they read the same.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .chat import BadRow, Encoder, Row
from .errors import InputError
from .loss import IGNORED
from .row_order import EMPTY

SHOWN = 10
"""Bad rows that an error names."""


@dataclass(frozen=True)
class Rows:
    """The rows of one purpose (training or held out), and what became of the others."""

    rows: list[Row]
    messages: list[list[dict[str, str]]]
    """The conversation of each row."""
    truncated: int
    """Rows that were cut at ``max_length`` tokens."""
    dropped: list[str]
    """``file:line`` of rows that kept no trained token."""

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row.tokens) for row in self.rows]

    @cached_property
    def trained_tokens(self) -> list[int]:
        """Trained tokens of each row."""
        return [row.trained_tokens for row in self.rows]

    @property
    def fingerprint(self) -> str:
        """Hash of tokens and masks, in order."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(json.dumps([row.tokens, row.trained]).encode())
        return digest.hexdigest()

    def describe(self, purpose: str) -> str:
        """One line for the run's output."""
        text = f"{len(self)} {purpose} rows, {sum(self.lengths):,} tokens, {sum(self.trained_tokens):,} of them trained"
        if self.truncated:
            text += f"; {self.truncated} row{'s' if self.truncated > 1 else ''} cut at max_length"
        if self.dropped:
            text += f"; {len(self.dropped)} dropped, no trained token left ({', '.join(self.dropped[:3])}"
            text += ", ...)" if len(self.dropped) > 3 else ")"
        return text


def vocabulary_problems(sources: Sequence[Rows | None], vocabulary: int) -> list[str]:
    """Tokens that the model has no embedding for."""
    largest = max(max(row.tokens) for rows in sources if rows is not None for row in rows.rows)
    if largest < vocabulary:
        return []
    return [
        f"The tokenizer gives token {largest}, but the model knows {vocabulary} tokens only; set model.tokenizer to "
        "the model's own."
    ]


def missing_files(paths: Sequence[str]) -> list[str]:
    """Sentences on the files that cannot be read, before anything is loaded."""
    return [
        f"{path}: there is no such data file; check data.train and data.eval."
        for path in paths
        if not Path(path).is_file()
    ]


def read_rows(paths: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Rows:
    """Read JSONL files of ``{"messages": [...]}``, tokenise and mask them.

    Raises:
        InputError: if a row cannot be used, naming the first ten as ``file:line: reason``; if no row is left.
    """
    encoder = Encoder(tokenizer)
    rows, conversations, truncated, dropped, bad = [], [], 0, [], []
    for source, line in _lines(paths):
        try:
            messages = _messages(line)
            row = encoder.encode(messages, source)
        except BadRow as reason:
            bad.append(f"{source}: {reason}.")
            continue
        if len(row.tokens) > max_length:
            truncated += 1
            row = Row(row.tokens[:max_length], row.trained[:max_length], source)
        if row.trained_tokens == 0:
            dropped.append(source)
            continue
        rows.append(row)
        conversations.append(messages)
    if bad:
        rest = f"... and {len(bad) - SHOWN} more." if len(bad) > SHOWN else ""
        count = f"{len(bad)} row{'s' if len(bad) > 1 else ''} cannot be used; mend or remove them, nothing was trained."
        raise InputError([*bad[:SHOWN], *([rest] if rest else []), count])
    if not rows:
        why = (
            f"all {len(dropped)} rows lost their trained tokens at data.max_length {max_length}"
            if dropped
            else "no row"
        )
        raise InputError(f"{', '.join(paths)}: {why}; give a file with conversations, or raise data.max_length.")
    return Rows(rows, conversations, truncated, dropped)


def _lines(paths: Sequence[str]) -> Iterator[tuple[str, str | bytes]]:
    for path in paths:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line  # byte order mark
                if line.strip():
                    yield f"{path}:{number}", line


def _messages(line: str | bytes) -> list[dict[str, str]]:
    try:
        value: Any = json.loads(line)
    except UnicodeDecodeError as error:
        raise BadRow(f"the line is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise BadRow(f"the line is not one JSON object ({error.msg}, column {error.colno})") from None
    except RecursionError:
        raise BadRow("the line is nested too deeply to be a conversation") from None
    if not isinstance(value, dict) or "messages" not in value:
        raise BadRow('the line is no object with the key "messages"')
    if value.get("tools"):
        raise BadRow("the line names tools, which this recipe does not render")
    return value["messages"]


def without_last_answer(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation up to its last assistant turn: the question that this turn answers."""
    return messages[: max(i for i, message in enumerate(messages) if message["role"] == "assistant")]


def collate(rows: Sequence[Row], indices: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
    """One micro-batch on its device, padded on the right to its longest row.

    There is no attention mask: with causal attention nothing looks at what stands to its right, and no loss
    is taken at padded positions; so attention keeps its fastest path.

    Returns:
        ``input_ids`` and ``next_tokens`` (labels, shifted already), each of shape (rows, positions), int64.
        An index ``EMPTY`` gives a row without trained tokens.
    """
    chosen = [rows[i] if i != EMPTY else Row([0], [False], "") for i in indices]
    positions = max(len(row.tokens) for row in chosen)
    input_ids = torch.zeros(len(chosen), positions, dtype=torch.int64)
    next_tokens = torch.full_like(input_ids, IGNORED)
    for i, row in enumerate(chosen):
        tokens, trained = torch.tensor(row.tokens), torch.tensor(row.trained)
        input_ids[i, : len(tokens)] = tokens
        next_tokens[i, : len(tokens) - 1] = torch.where(trained[1:], tokens[1:], IGNORED)
    return {"input_ids": input_ids.to(device), "next_tokens": next_tokens.to(device)}
