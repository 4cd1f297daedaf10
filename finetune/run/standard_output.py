"""Standard output of a run: what nobody reads any more, or a full disk does not take, ends no training."""

import errno
import os
import sys
from typing import Any

from rich.console import Console

NOBODY_READS = (errno.EPIPE, errno.EIO)
"""Of a pipe whose reader has ended, and of a terminal that was closed."""


def console(*, shown: bool) -> Console:
    """A console of plain lines in a file, and of a bar in a terminal.

    A notebook gets plain lines too: processes forked from it can send nothing else, and though it asks for colours
    (FORCE_COLOR) it is no terminal in which a bar could be redrawn.

    Args:
        shown: whether this process prints.
    """
    file: Any = _StandardOutput(sys.stdout)
    return Console(
        file=file,
        quiet=not shown,
        highlight=False,
        soft_wrap=True,
        force_jupyter=False,
        force_terminal=sys.stdout.isatty(),
    )


class _StandardOutput:
    """A text file that refuses nothing. What is printed stands in metrics.jsonl and run.yaml too."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write, with escapes for what the encoding lacks, or keep the text until the disk has room again."""
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        try:
            return int(self._file.write(text))
        except OSError as error:
            self._refused(error)
            return len(text)

    def flush(self) -> None:
        """Bring out what was written, where that can be done."""
        try:
            self._file.flush()
        except OSError as error:
            self._refused(error)

    def _refused(self, error: OSError) -> None:
        if error.errno in NOBODY_READS:  # nor will anybody, and Python would complain at its end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)
