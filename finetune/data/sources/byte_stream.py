"""A data file as bytes: decompressed if its name ends in .gz or .zst, and split into lines of bounded length."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pyarrow as pa

from finetune.errors import InputError, first_line
from finetune.units import MIB

BYTE_ORDER_MARK = "\ufeff"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
LONGEST_LINE = 64 * MIB
"""Maximum bytes of a line: memory stays bounded even for a file without line ends."""
_BUFFER = 2**16
WIDE = "the file is UTF-16 or UTF-32, not UTF-8; save it as UTF-8, for example with `iconv -f UTF-16 -t UTF-8`"


@contextmanager
def opened(path: str) -> Iterator[io.BufferedReader]:
    """Open a file for reading, decompressed.

    Raises:
        InputError: if the file cannot be opened.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; only its opening is to be caught
    except OSError as error:
        raise InputError(
            f"{path}: the file cannot be opened ({error.strerror}); check its name and permissions."
        ) from None
    with file:
        compression = COMPRESSIONS.get(os.path.splitext(path.lower())[1])
        if compression:
            unpacked = pa.CompressedInputStream(pa.PythonFile(file, "r"), compression)
            stream: io.BufferedReader = io.BufferedReader(cast(io.RawIOBase, unpacked), _BUFFER)
            with stream:
                yield stream
        else:
            yield file


def escaped(line: bytes) -> str:
    """A line to show: undecodable bytes escaped, without its end."""
    return line.decode(errors="backslashreplace").rstrip("\r\n")


def damaged(path: str, error: Exception) -> str:
    """The reason why the rest of a file cannot be read.

    Raises:
        InputError: if the disk or the network is at fault: nothing from such a read may be cached.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise InputError(f"{path}: reading failed ({error.strerror}); check the disk or network, and start again.")
    return f"the file is damaged or truncated, so the rest of it is lost ({first_line(error)})"


def numbered_lines(
    path: str, stream: io.BufferedReader, *, longest: int = LONGEST_LINE, cut: bool = False
) -> Iterator[tuple[int, bytes, str]]:
    """The lines of a stream: number from 1, bytes with their line end, and what is wrong with the line, or "".

    Args:
        longest: bytes of a line, above which it is a fault.
        cut: give a longer line in pieces of that many bytes, all under its number, instead.
    """
    number = 1
    try:
        if _is_wide(stream.peek(64)):
            yield number, b"", WIDE
            return
        while line := stream.readline(longest):
            if cut or len(line) < longest or line.endswith(b"\n"):
                yield number, line, ""
                number += line.endswith(b"\n") or len(line) < longest
                continue
            while line and not line.endswith(b"\n"):
                line = stream.readline(longest)
            yield number, b"", f"the line is longer than {longest // MIB} MiB"
            number += 1
    except OSError as error:
        yield number, b"", damaged(path, error)


def _is_wide(head: bytes) -> bool:
    """Whether the beginning of a file is UTF-16 or UTF-32: by its byte order mark, or by NUL in every other byte."""
    even, odd = head[0:64:2], head[1:64:2]
    by_zeros = len(odd) > 1 and ((all(even) and not any(odd)) or (all(odd) and not any(even)))
    return head.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")) or by_zeros
