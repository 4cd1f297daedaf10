"""What a model says, as a terminal may be given it."""

import sys
import unicodedata


def say(text: str) -> None:
    """Print a piece of an answer at once: as it is to a file or a pipe, without control characters to a terminal."""
    print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)


def harmless(text: str) -> str:
    """Without control characters but tabs and ends of lines: in a terminal they move the cursor, and run commands.

    ``"a\\x1b[2Jb\\n"`` becomes ``"a[2Jb\\n"``.
    """
    return "".join(each for each in text if each in "\t\n" or unicodedata.category(each) != "Cc")
