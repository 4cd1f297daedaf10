"""The user's rows by their keys: columns under the names that the formats know (``data.columns``), and what they hold.

Example: with {prompt: question, completion: answer} the row {question: a, answer: b, id: 7} is read as {prompt: a,
completion: b, id: 7}.
"""

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from finetune.errors import BadRow

Columns = tuple[tuple[str, str], ...]
"""Pairs of a field and the column that holds it."""
BEGINNINGS = ("messages", "conversations", "instruction", "prompt", "text")
"""Fields of which a row has one: it decides the format."""
FIELDS = (
    *BEGINNINGS,
    *("completion", "input", "output", "history", "system", "tools", "chosen", "rejected", "label"),
)
OPTIONAL = ("input", "history", "system", "tools")
"""Fields that a row of its format may lack."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
MOST_SHOWN = 12
_MARKS = 0xF0000  # from here on code points are private, and taken as marks where contents are found in a rendering
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_REFUSED = re.compile(f"[\0\ud800-\udfff{chr(_MARKS)}-\U0010ffff]")
_DEEPEST = 64  # levels of an argument or a tool definition


def problems(columns: Mapping[str, str]) -> list[str]:
    """Fields that no format has, as sentences."""
    return [
        f"data.columns: no format has a field {field!r}; {_nearest(field, FIELDS)}the fields are {', '.join(FIELDS)}."
        for field in columns
        if field not in FIELDS
    ]


def renamed(row: Any, columns: Columns) -> Any:
    """The row with its columns under the names of the fields that they hold.

    A column wins over one that is called as its field already. Where it is one of ``BEGINNINGS``, the row's other
    beginnings do not count, so that the format is the one that was meant. A row without a named column, or with null
    in it, keeps its own; a value that is not an object stays as it is.
    """
    if not isinstance(row, dict):
        return row
    found = {field: row[column] for field, column in columns if row.get(column) is not None}
    if not found:
        return row
    hidden = {column for _, column in columns}
    if not found.keys().isdisjoint(BEGINNINGS):
        hidden |= set(BEGINNINGS)
    return {key: value for key, value in row.items() if key not in hidden} | found


def lacking(row: Mapping[str, Any], columns: Columns) -> str:
    """What a row that cannot be used lacks of the named columns, as the end of a sentence; empty for nothing."""
    names = [repr(column) for _, column in columns if column not in row]
    return f"; of data.columns it lacks {' and '.join(names)}" if names else ""


def unknown_problems(
    columns: Columns, found: Iterable[str], keys: Iterable[str], looked_at: str = "no row"
) -> list[str]:
    """Columns that no row has, as sentences.

    Args:
        found: the named columns that some row has.
        keys: of the first row; none where there is no row.
        looked_at: none of which rows has them.
    """
    keys, found = list(keys), set(found)
    if not keys:
        return []
    has = ", ".join(repr(key)[:40] for key in keys[:MOST_SHOWN]) + (", ..." if len(keys) > MOST_SHOWN else "")
    return [
        f"data.columns takes {field} from the column {column!r}, but {looked_at} has it; {_nearest(column, keys)}the "
        f"first row has {has}."
        for field, column in columns
        if column not in found
    ]


def _nearest(name: str, known: Iterable[str]) -> str:
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    return f"did you mean {lower[close[0]]!r}? Otherwise: " if close else ""


def seen(value: dict[str, Any]) -> str:
    """The keys of a row, in words."""
    names = [repr(key)[:40] + (" (null)" if item is None else "") for key, item in value.items()]
    further = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"the keys {', '.join(names[:12])}{further}" if names else "no keys"


def require(value: dict[str, Any], format: str, keys: Iterable[str]) -> None:
    """Refuse a row that lacks one of the keys of its format."""
    for key in keys:
        if value.get(key) is None:
            raise BadRow(f"the key `{key}`, required by the format {format}, is missing; the row has {seen(value)}")


def text_of(value: dict[str, Any], key: str) -> str:
    """A text that must be there."""
    text = value[key]
    if not isinstance(text, str) or not text.strip():
        raise BadRow(f"the key `{key}` has no text{not_a_text(text)}")
    return text


def not_a_text(value: Any) -> str:
    """What stands in the place of a text, as the end of a sentence; nothing of a blank one."""
    return "" if value is None or isinstance(value, str) else f", but a value of type {type(value).__name__}"


def optional_text(value: dict[str, Any], key: str) -> str:
    """A text that may be absent; a blank one, as in tables, counts as absent."""
    text = "" if value.get(key) is None else value[key]
    if not isinstance(text, str):
        raise BadRow(f"the key `{key}` has no text{not_a_text(text)}")
    return text if text.strip() else ""


def is_given(item: Any) -> bool:
    """Whether a key holds something: not null, false or 0, nor an empty text, list or object, or one as JSON text."""
    if isinstance(item, str):
        return item.strip() not in ("", "[]", "{}", "null")
    return any(map(is_given, item)) if isinstance(item, list) else bool(item)


def check_row(value: Any, *, is_text: bool = False) -> None:
    """Refuse what is not an object, and a row with pictures, films or sound; a text may have some beside it."""
    if not isinstance(value, dict):
        raise BadRow("the row is not an object")
    for key in () if is_text else MEDIA:
        if is_given(value.get(key)):
            raise BadRow(
                f"the row has the key `{key}`, and only texts can be trained on; leave out the row, or remove the key "
                "if the texts do not need it"
            )


def parsed(text: str) -> Any:
    """The value of a JSON text; the text itself if it is not JSON, so that it is refused as text.

    Raises:
        BadRow: if an object in it has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=with_each_key_once)
    except BadRow:
        raise
    except (ValueError, RecursionError):
        return text


def with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for ``object_pairs_hook``.

    Raises:
        BadRow: if it has a key twice, of which readers of JSON keep one or the other.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise BadRow(f"it has the key {twice[:40]!r} twice in one object")
    return found


def check_characters(text: str, where: str, *, is_plain: bool = False) -> None:
    """Refuse characters that no text should contain: NUL, and unpaired surrogates.

    In conversations also supplementary private-use characters, which stand for special tokens and mark turns there.

    Args:
        is_plain: the text is no part of a conversation.

    Raises:
        BadRow: beginning with ``where``.
    """
    if text.isascii() and "\0" not in text:  # the common case, without a search
        return
    if found := (_NO_TEXT if is_plain else _REFUSED).search(text):
        number = ord(found[0])
        what = "a NUL character" if number == 0 else f"the character U+{number:04X}"
        kind = ", an unpaired surrogate" if 0xD800 <= number < 0xE000 else ", for private use" if number else ""
        raise BadRow(f"{where} contains {what}{kind}, at position {found.start() + 1:,}; remove it")


def check_value(value: Any, where: str) -> None:
    """Refuse characters as ``check_characters``, what JSON does not know, and what is too deep to be rendered."""
    level = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                check_characters(item, where)
            elif isinstance(item, list):
                below += item
            elif isinstance(item, dict):
                below += [*item.keys(), *item.values()]
            elif item is not None and not isinstance(item, int | float):
                raise BadRow(f"{where} contains a value of type {type(item).__name__}, which JSON does not support")
            elif isinstance(item, float) and not math.isfinite(item):
                raise BadRow(f"{where} contains the number {item}, which JSON does not support")
        level = below
        if not level:
            return
    raise BadRow(f"{where} contains a value that is nested too deeply")
