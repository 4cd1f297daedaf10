"""What a data source gives: records, and what could not be read as one, each with the place it stands at."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """One value read from a source."""

    source: str
    """``path:line``, ``path:row N`` (Parquet) or ``owner/name[split]:row N`` (hub); lines and rows count from 1."""
    value: Any
    """A JSON object; from Parquet and the hub it may hold dates, bytes and decimals, and ``None`` stands for no key."""
    begins: bool = True
    """Whether a text begins here; a long .txt file is several records."""
    ends: bool = True
    """Whether it ends here."""


@dataclass(frozen=True)
class Rejected:
    """A place in a source that gives no record."""

    source: str
    reason: str
    """A clause without its final point."""
    raw: str
    """The text as it stands, undecodable bytes escaped; empty where there is none to show."""
