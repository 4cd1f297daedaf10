"""Rows of tokens as readable text: decoded span by span, shortened, and without invisible characters.

Tokens of one kind are decoded together, since a single token may be part of a character.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding import Row

_BIDIRECTIONAL = {*"\u061c\u200e\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
"""Characters that change the writing direction, so that a text can look like another one."""


@dataclass(frozen=True)
class TextSpan:
    """Text of consecutive tokens of the same kind."""

    text: str
    trained: bool
    special: bool
    """Whether they are special tokens, not just text that looks like them."""
    is_note: bool = False
    """Whether the text is not from the row, but says what was omitted."""


@dataclass(frozen=True)
class ShownRow:
    """A row as the model sees it."""

    source: str
    """``file:line``."""
    tokens: int
    uncut_tokens: int
    trained_tokens: int
    stretches: list[TextSpan]
    side: str = ""
    """Of a pair: chosen or rejected."""


def spread(lengths: np.ndarray, origins: np.ndarray, count: int) -> list[int]:
    """Rows worth showing: equally many of each source, from its shortest to its longest.

    Args:
        lengths: tokens of each row, shape (rows,).
        origins: source number of each row, shape (rows,).
    """
    by_source = [np.flatnonzero(origins == origin) for origin in np.unique(origins)]
    shares = [0] * len(by_source)
    while sum(shares) < min(count, len(lengths)):
        for i, rows in enumerate(by_source):
            if shares[i] < len(rows) and sum(shares) < count:
                shares[i] += 1
    chosen: list[int] = []
    for rows, share in zip(by_source, shares):
        in_order = rows[np.argsort(lengths[rows], kind="stable")]
        at = [len(rows) // 2] if share == 1 else np.linspace(0, len(rows) - 1, share).round().astype(int)
        chosen += in_order[at].tolist()
    return chosen


def shown_row(row: Row, tokenizer: PreTrainedTokenizerBase, side: str = "") -> ShownRow:
    """One row as text; it may be a side of a pair."""
    texts = stretches(row, tokenizer)
    return ShownRow(row.source, len(row.tokens), row.uncut_tokens, row.trained_tokens, texts, side)


def stretches(row: Row, tokenizer: PreTrainedTokenizerBase) -> list[TextSpan]:
    """All text of a row. The trained spans together are the text of the trained tokens."""
    tokens = np.asarray(row.tokens).tolist()
    kinds = np.isin(tokens, [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]) * 2
    for first, end in row.spans:
        kinds[first:end] += 1
    edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(tokens)]
    return [
        TextSpan(_decode(tokens, first, end, tokenizer), bool(kinds[first] & 1), bool(kinds[first] & 2))
        for first, end in pairwise(edges)
    ]


def _decode(tokens: list[int], first: int, end: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text that these tokens add to the one before them: some tokenizers drop the leading space of tokens alone."""

    def decode(first: int, end: int) -> str:
        return str(tokenizer.decode(tokens[first:end], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    context = max(first - 1, 0)
    before, whole = decode(context, first), decode(context, end)
    return whole[len(before) :] if whole.startswith(before) else decode(first, end)


def shorten(row: Sequence[TextSpan], *, trained: int, untrained: int, most: int) -> list[TextSpan]:
    """A row without its middle spans, if there are many, and without the middle of long ones.

    Args:
        trained, untrained: most characters of a span; notes on omissions come on top.
        most: most spans.
    """
    shown = list(row)
    if left_out := max(0, len(row) - most):
        first = (most + 1) // 2
        shown[first : first + left_out] = [_note(f"\n[... {left_out:,} spans ...]\n", trained=False)]
    return [piece for stretch in shown for piece in _shorten(stretch, trained if stretch.trained else untrained)]


def _shorten(stretch: TextSpan, most: int) -> list[TextSpan]:
    left_out, first = len(stretch.text) - most, (most + 1) // 2
    if left_out <= 0 or stretch.is_note:
        return [stretch]
    note = _note(f"[... {left_out:,} characters ...]", stretch.trained)
    head, tail = stretch.text[:first], stretch.text[first + left_out :]
    return [replace(stretch, text=head), note, replace(stretch, text=tail)]


def _note(text: str, trained: bool) -> TextSpan:
    return TextSpan(text, trained, special=False, is_note=True)


def visible(text: str) -> str:
    """The text with a symbol in place of each control character and each character that cannot be printed."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or character.isprintable():
        return character
    if code < 0x20:
        return chr(0x2400 + code)  # the pictures of control characters
    category = unicodedata.category(character)
    if category in ("Cc", "Cs", "Zl", "Zp") or character in _BIDIRECTIONAL:
        return f"\\u{code:04x}"
    return character
