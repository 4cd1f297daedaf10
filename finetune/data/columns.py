"""Columns of the user's rows under the names that the formats know: ``data.columns``.

Example: with {prompt: question, completion: answer} the row {question: a, answer: b, id: 7} is read as {prompt: a,
completion: b, id: 7}.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

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
MOST_SHOWN = 12


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
        f"data.columns: {looked_at} has a column {column!r}, which is to hold {field}; {_nearest(column, keys)}the "
        f"first row has {has}."
        for field, column in columns
        if column not in found
    ]


def _nearest(name: str, known: Iterable[str]) -> str:
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    return f"did you mean {lower[close[0]]!r}? Otherwise: " if close else ""
