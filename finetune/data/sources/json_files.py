"""Records from JSON: one object per line, or an array of objects, whatever the file's name says.

Unreadable lines are rejected with their number, and reading continues after them. An array is held in memory as a
whole, and cannot be read past a broken element, since nothing marks where the next one begins.
"""

import codecs
import io
import json
import re
from collections.abc import Iterator
from typing import Any

from finetune.data.columns import with_each_key_once
from finetune.data.sources.byte_stream import BYTE_ORDER_MARK, damaged, escaped, numbered_lines
from finetune.data.sources.record import Record, Rejected
from finetune.errors import BadRow

_BLANK = re.compile(r"[ \t\r\n]*")


def json_file(path: str, stream: io.BufferedReader) -> Iterator[Record | Rejected]:
    try:
        start = stream.peek(2**16).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError as error:
        yield Rejected(f"{path}:1", damaged(path, error), "")
        return
    first, more, _ = start.partition(b"\n")
    is_open = first.count(b"{") > first.count(b"}") and first.rstrip().endswith((b"{", b"[", b",", b":"))
    if start.startswith(b"["):
        yield from _json_array(path, stream)
    elif first.startswith(b"{") and more and is_open:
        yield Rejected(
            f"{path}:1",
            "the file is one JSON object over several lines, not rows; write an array of objects, or one "
            "object per line",
            escaped(first),
        )
    else:
        yield from _json_lines(path, stream)


def _json_lines(path: str, stream: io.BufferedReader) -> Iterator[Record | Rejected]:
    for number, line, fault in numbered_lines(path, stream):
        if fault:
            yield Rejected(f"{path}:{number}", fault, "")
            continue
        value, reason = _json_line(line)
        if reason:
            yield Rejected(f"{path}:{number}", reason, escaped(line))
        elif value is not None:
            yield Record(f"{path}:{number}", value)


def _json_line(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """The object of a line, or the reason why there is none; neither for a blank line."""
    try:
        text = line.decode().removeprefix(BYTE_ORDER_MARK).rstrip()  # on any line: files with a mark are concatenated
        if not text:
            return None, ""
        value = json.loads(text, object_pairs_hook=with_each_key_once)
    except BadRow as error:
        return None, str(error)
    except UnicodeDecodeError as error:
        return None, f"the line is not UTF-8 (byte {error.start + 1})"
    except json.JSONDecodeError as error:
        what = "more text follows it" if error.msg == "Extra data" else error.msg
        return None, f"the line is not one JSON object ({what}, column {error.colno})"
    except RecursionError:
        return None, "the line is nested too deeply"
    except ValueError:  # Python's limit on the digits of an integer
        return None, "the line has a number with too many digits"
    if not isinstance(value, dict):
        return None, "the line is JSON, but not one JSON object"
    return value, ""


def _json_array(path: str, stream: io.BufferedReader) -> Iterator[Record | Rejected]:
    content = b""
    try:
        content = stream.read()
        text = content.decode().removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        yield Rejected(f"{path}:1", damaged(path, error), "")
        return
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield Rejected(
            f"{path}:{line}", "the file is not UTF-8 from here on, and a JSON array cannot be read in part", ""
        )
        return
    decode = json.JSONDecoder(object_pairs_hook=with_each_key_once).raw_decode
    position, line = text.index("[") + 1, 1
    counted = 0

    def skip_blank(position: int) -> int:
        match = _BLANK.match(text, position)
        assert match is not None
        return match.end()

    position = skip_blank(position)
    closed = text.startswith("]", position)
    element = 0
    while not closed:
        before, element = line, element + 1
        line, counted = line + text.count("\n", counted, position), position
        place = f"{path}:{line}" if line > before or element == 1 else f"{path}:{line} (element {element})"
        try:
            value, end = decode(text, position)
            reason = "" if isinstance(value, dict) else "the element is not an object"
        except BadRow as error:
            (value, end), reason = json.JSONDecoder().raw_decode(text, position), str(error)
        except (ValueError, RecursionError) as error:
            what = {
                json.JSONDecodeError: "is broken JSON",
                RecursionError: "is nested too deeply",
            }.get(type(error), "has a number with too many digits")
            reason = f"the element {what}, and the rest of the array cannot be read"
            yield Rejected(place, reason, text[position : position + 1000])
            return
        if not reason:
            yield Record(place, value)
        else:
            yield Rejected(place, reason, text[position : min(end, position + 1000)])
        position = skip_blank(end)
        closed = text.startswith("]", position)
        if not closed and not text.startswith(",", position):
            line += text.count("\n", counted, position)
            reason = "the array has neither a comma nor its end here, and the rest cannot be read"
            yield Rejected(f"{path}:{line}", reason, text[position : position + 1000])
            return
        if not closed:
            position = skip_blank(position + 1)
    rest = skip_blank(position + 1)
    if rest < len(text):
        line += text.count("\n", counted, rest)
        yield Rejected(f"{path}:{line}", "there is text after the end of the array", text[rest : rest + 1000])
