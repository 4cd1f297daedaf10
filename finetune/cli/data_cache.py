"""``finetune data --cache``: what is in the cache of prepared rows, and what is removed from it."""

import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table

from finetune.cache import data_cache_folder
from finetune.errors import InputError
from finetune.units import size_text, spoken

_DAY = 24 * 60 * 60
_NAME = re.compile(r"[0-9a-f]{32}(\..+\.tmp)?")
"""Of a folder in the cache: the key of what it holds, and whose work it is while it is filled or removed."""


@dataclass(frozen=True)
class Entry:
    """The prepared rows of one run's sources, with one tokenizer and one set of settings."""

    folder: Path
    size_bytes: int
    idle_seconds: float
    """Since a run or a report last opened it."""
    rows: int | None
    """None where its summary cannot be read."""
    sources: tuple[str, ...]


def entries(cache: Path) -> list[Entry]:
    """The entries of a cache folder, the one that was used last first; none where there is no such folder.

    What a killed preparation left is one as well; other files and folders are not ours.
    """
    found = (_entry(path) for path in cache.glob("*") if _NAME.fullmatch(path.name) and not path.is_symlink())
    return sorted((entry for entry in found if entry is not None), key=lambda entry: entry.idle_seconds)


def _entry(folder: Path) -> Entry | None:
    """None if another process removes it just now."""
    try:
        size = sum(path.stat().st_size for path in folder.iterdir())
        idle = max(0.0, time.time() - folder.stat().st_mtime)
    except OSError:
        return None
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # damaged, which is for whoever opens it to say
        summary = None
    if not isinstance(summary, dict):
        summary = {}
    return Entry(folder, size, idle, summary.get("rows"), tuple(summary.get("sources", ())))


def _remove(entry: Entry) -> tuple[str, bool] | None:
    """Remove an entry, unless a process prepares it; a sentence if it stays, and whether it should not."""
    key = entry.folder.name.partition(".")[0]
    try:
        with FileLock(entry.folder.with_name(f"{key}.lock"), timeout=0):  # whose file stays: others may wait for it
            doomed = entry.folder.with_name(f"{key}.removed.{os.getpid()}.tmp")
            entry.folder.rename(doomed)  # half of an entry would be taken for a damaged one
            shutil.rmtree(doomed)
    except Timeout:
        return f"{entry.folder} is being prepared, and stays.", False
    except OSError as error:
        return f"{entry.folder} could not be removed ({error.strerror or error}).", True
    return None


def show_cache(*, remove_older_than: float | None, as_json: bool) -> int:
    """List the cache, or remove what was not used for some days. Returns the exit code.

    Args:
        remove_older_than: days; 0 removes everything; None removes nothing.

    Raises:
        InputError: for a negative number of days.
    """
    if remove_older_than is not None and remove_older_than < 0:
        raise InputError(f"--remove-older-than {remove_older_than:g}: must be 0 days or more; change it.")
    cache = data_cache_folder()
    found = entries(cache)
    if remove_older_than is not None:
        old = [entry for entry in found if entry.idle_seconds >= remove_older_than * _DAY]
        left = {entry.folder: problem for entry in old if (problem := _remove(entry))}
        freed = sum(entry.size_bytes for entry in old if entry.folder not in left)
        if as_json:
            told = {"removed": len(old) - len(left), "kept": len(found) - len(old) + len(left), "freed_bytes": freed}
            print(json.dumps(told | {"problems": [sentence for sentence, _ in left.values()]}, indent=2))
        else:
            print(f"Removed {len(old) - len(left)} of {len(found)} entries from {cache}, {size_text(freed)}.")
            for sentence, _ in left.values():
                print(sentence)
        return 1 if any(is_failure for _, is_failure in left.values()) else 0
    if as_json:
        print(json.dumps([{**vars(entry), "folder": str(entry.folder)} for entry in found], indent=2))
    elif not found:
        print(f"{cache} has no prepared rows.")
    else:
        _print_table(found)
        total = size_text(sum(entry.size_bytes for entry in found))
        print(f"{len(found)} entries, {total}, in {cache}; remove old ones with --remove-older-than DAYS.")
    return 0


def _print_table(found: list[Entry]) -> None:
    table = Table()
    table.add_column("entry", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("not used for", justify="right", no_wrap=True)
    table.add_column("sources", overflow="fold")
    for entry in found:
        rows = "unfinished" if entry.folder.suffix == ".tmp" else "damaged"
        rows = rows if entry.rows is None else f"{entry.rows:,}"
        idle = spoken(entry.idle_seconds)
        table.add_row(entry.folder.name[:8], rows, size_text(entry.size_bytes), idle, ", ".join(entry.sources))
    Console(highlight=False, emoji=False, markup=False).print(table)
