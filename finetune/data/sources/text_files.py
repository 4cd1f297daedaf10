"""Records from comma- and tab-separated tables and from plain text.

Unreadable rows are rejected with their line number, and reading continues after them.
"""

import codecs
import csv
import io
from collections.abc import Iterator

from finetune.data.sources.byte_stream import BYTE_ORDER_MARK, LONGEST_LINE, escaped, numbered_lines
from finetune.data.sources.record import Record, Rejected

TEXT_BLOCK = 64_000
"""Characters from which on a block of plain text ends at the next line end."""


class _TableLines:
    """The decoded lines of a table for the csv module, and what it took and what was wrong since the last row."""

    def __init__(self, path: str, stream: io.BufferedReader) -> None:
        self._lines = numbered_lines(path, stream)
        self.taken: list[bytes] = []
        self.first = self.last = 0
        self.fault = ""

    @property
    def raw(self) -> str:
        """The row as it stands."""
        return escaped(b"".join(self.taken))

    def begin_row(self) -> None:
        self.taken, self.first, self.fault = [], 0, ""

    def __iter__(self) -> "_TableLines":
        return self

    def __next__(self) -> str:
        number, line, fault = next(self._lines)
        self.first, self.last = self.first or number, number
        if not fault and b"\0" in line:
            fault = "the row holds a NUL character"
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            fault, text = f"the row is not UTF-8 (line {number}, byte {error.start + 1})", ""
        self.fault = self.fault or fault
        self.taken.append(line)
        if fault:
            return "\n"
        return text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text


def table(path: str, stream: io.BufferedReader, delimiter: str) -> Iterator[Record | Rejected]:
    """Rows under a header, each an object of strings. Raises the csv module's limit on a field, which is global."""
    csv.field_size_limit(LONGEST_LINE)
    lines = _TableLines(path, stream)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        lines.begin_row()
        row, reason = [], ""
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            reason = f"the row is not CSV ({str(error).partition(' - ')[0]})"  # what follows is for programmers
        reason = lines.fault or reason
        source = f"{path}:{lines.first}"
        if not reason and (not row or (not header and not "".join(row).strip())):
            continue  # a blank line
        if not header:
            header = row
            if reason := reason or _header_problem(header, delimiter):
                yield Rejected(source, f"the file has no usable header, so it is not read: {reason}", lines.raw)
                return
        elif reason or len(row) != len(header):
            reason = reason or f"the row has {len(row)} fields, but the header names {len(header)}"
            if lines.last > lines.first:
                reason += f"; it continues to line {lines.last}"
            yield Rejected(source, reason, lines.raw)
        else:
            yield Record(source, dict(zip(header, row)))


def _header_problem(header: list[str], delimiter: str) -> str:
    """What is wrong with the names of columns, a clause; empty if nothing is."""
    if len(header) == 1:
        names = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
        found = [name for separator, name in names.items() if separator != delimiter and separator in header[0]]
        wanted = names[delimiter]
        return f"its columns seem to be separated by {found[0]}; save it with {wanted}, or as JSONL" if found else ""
    if not header[0] and all(header[1:]):
        return "its first column has no name, as pandas writes an index; save it with index=False"
    return "a column has no name or a duplicate name" if len(set(header)) < len(header) or not all(header) else ""


def text_blocks(path: str, stream: io.BufferedReader) -> Iterator[Record | Rejected]:
    """A text in blocks, each ``{"text": block}``, line ends as ``\\n``; the first begins it, and the last ends it.

    The blocks together are the text, but for what is rejected; a blank file gives none.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    held: Record | None = None  # until it is known whether it is the last
    block: list[str] = []
    size, first, number, whole, beginning = 0, 1, 1, True, True
    for number, piece, fault in numbered_lines(path, stream, longest=TEXT_BLOCK, cut=True):
        if fault:
            whole = False
            yield Rejected(f"{path}:{number}", fault, "")
            continue
        try:
            text = decoder.decode(piece, final=piece.endswith(b"\n"))
        except UnicodeDecodeError as error:
            decoder.reset()
            yield Rejected(f"{path}:{number}", f"the line is not UTF-8 ({error.reason})", escaped(piece))
            continue
        if beginning and text:
            text, beginning = text.removeprefix(BYTE_ORDER_MARK), False
        block, first = (block, first) if block else ([], number)
        block.append(text)
        size += len(text)
        if size >= TEXT_BLOCK and not text.endswith("\r"):  # the line end \r\n is not cut
            size, joined = 0, "".join(block)
            if joined.strip():
                if held:
                    yield held
                held, block = _block(path, first, joined, begins=held is None, ends=False), []
    try:
        block.append(decoder.decode(b"", final=True))
    except UnicodeDecodeError as error:
        yield Rejected(f"{path}:{number}", f"the line is not UTF-8 ({error.reason})", escaped(decoder.getstate()[0]))
    joined = "".join(block)
    if joined.strip():
        if held:
            yield held
        yield _block(path, first, joined, begins=held is None, ends=whole)
    elif held:
        text = held.value["text"] + joined.replace("\r\n", "\n")
        yield Record(held.source, {"text": text}, begins=held.begins, ends=whole)


def _block(path: str, line: int, text: str, *, begins: bool, ends: bool) -> Record:
    return Record(f"{path}:{line}", {"text": text.replace("\r\n", "\n")}, begins, ends)
