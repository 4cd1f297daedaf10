"""``finetune checkpoint``: list, verify and export the checkpoints of a run."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.checkpoint import folder, manifest
from finetune.checkpoint.reader import Checkpoint, checkpoints_in, open_all
from finetune.errors import InputError

THREADS = 4
"""Files that are read at the same time."""


def ls(run: Path, *, as_json: bool) -> int:
    """Show every checkpoint of a run, including incomplete ones. Returns the exit code.

    Raises:
        InputError: if there is no such folder, or no checkpoint in it.
    """
    if not run.is_dir():
        raise InputError(f"There is no folder {run}; give the output folder of a run.")
    checkpoints = checkpoints_in(run)
    entries = [_entry(path) for path in folder.in_place(checkpoints)]
    entries += [
        {"name": path.name, "state": "being removed" if ".removed." in path.name else "being written, or left behind"}
        for path in folder.unfinished(checkpoints)
    ]
    if not entries:
        raise InputError(f"{run} has no checkpoint; give the output folder of a run that saved one.")
    if as_json:
        print(json.dumps(entries, indent=2))
    else:
        _print_table(entries)
    return 0


def _entry(path: Path) -> dict[str, Any]:
    try:
        found = manifest.read(path)
    except InputError as error:
        return {"name": path.name, "state": "not complete", "problem": str(error)}
    return {
        "name": path.name,
        "state": "complete",
        "step": found.step,
        "bytes": found.bytes,
        "strategy": found.strategy,
        "processes": found.processes,
        "written": found.written,
    }


def _print_table(entries: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, soft_wrap=True, force_terminal=sys.stdout.isatty())
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="", width=min(80, console.width))
    for head, justify in (("checkpoint", "left"), ("size", "right"), ("written by", "left"), ("at (UTC)", "left")):
        table.add_column(head, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("state", overflow="fold", ratio=1)
    for entry in entries:
        written_by = f"{entry['strategy']} x {entry['processes']}" if "strategy" in entry else ""
        at = entry["written"][:16].replace("T", " ") if "written" in entry else ""
        size = readable(entry["bytes"]) if "bytes" in entry else ""
        table.add_row(*map(Text, (entry["name"], size, written_by, at, entry["state"])))
    console.print(table)
    for entry in entries:
        if "problem" in entry:
            console.print(Text(entry["problem"]))


def readable(size: int) -> str:
    """Bytes in the largest unit with a value of at least 1."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def verify(path: Path, *, as_json: bool) -> int:
    """Read every file of a checkpoint, or of all checkpoints of a run, and compare its checksum with the manifest.

    Returns:
        The exit code: 0 if all are intact, 1 if not.

    Raises:
        InputError: if there is no checkpoint.
    """
    checkpoints, not_complete = open_all(path)
    results = [_verified(checkpoint) for checkpoint in checkpoints]
    intact = not not_complete and all(not result["damaged"] for result in results)
    if as_json:
        print(json.dumps({"intact": intact, "not_complete": not_complete, "checkpoints": results}, indent=2))
    else:
        for sentence in not_complete:
            print(sentence)
        for result in results:
            state = "damaged" if result["damaged"] else f"intact, {result['files']} files, {readable(result['bytes'])}"
            print(f"{result['name']}: {state}")
            for sentence in result["damaged"]:
                print(f"  {sentence}")
            for name in result["foreign"]:
                print(f"  {name!r} does not belong to it, and was not opened")
    return 0 if intact else 1


def _verified(checkpoint: Checkpoint) -> dict[str, Any]:
    files = len(checkpoint.manifest.files)
    with ThreadPoolExecutor(THREADS) as threads:
        damaged = threads.map(lambda i: checkpoint.damaged(i, files), range(files))
    return {
        "name": checkpoint.path.resolve().name,
        "files": files,
        "bytes": checkpoint.manifest.bytes,
        "damaged": [sentence for sentences in damaged for sentence in sentences],
        "foreign": manifest.foreign(checkpoint.path, checkpoint.manifest),
    }
