"""One thing that was looked at."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What was seen, and what to do about it."""

    what: str
    state: Literal["ok", "warning", "error"]
    """error: training cannot start as it is. warning: some of it cannot, or is slower than it could be."""
    seen: str
    do: str = ""
    """Empty where nothing is to be done."""
