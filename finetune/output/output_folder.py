"""The output folder of a run: what may lie there when it begins, and what is left aside.

A run writes the names in ``OWN`` and hidden ones, and nothing else; what other names hold is never touched.
"""

import glob
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

RECORDS = ("run.yaml", "metrics.jsonl", "rejected.jsonl")
RESULTS = ("final", "final.tmp", "final.old")
OWN = {*RECORDS, *(f"{name}.tmp" for name in RECORDS), *RESULTS, "checkpoints", "nvme_offload"}
LEFT_BEHIND = ".left-behind-"
NOTES = {".log", ".out", ".err", ".txt", ".md", ".sh", ".yaml", ".yml"}
"""Files that people and schedulers keep beside a run: logs (often there before it begins), notes, scripts, settings."""
LISTED = 4
"""Names that a sentence lists."""


def problems(folder: Path, *, overwrite: bool, resumes: bool, inputs: Sequence[str] = ()) -> list[str]:
    """Why a run may not write into this folder, as sentences. Creates and removes nothing.

    A folder that holds a run may hold other things as well. One that holds none, but other data, models or folders, is
    most likely not the folder that was meant.

    Args:
        inputs: data sources and files that the run reads, as the configuration names them. They may lie in the folder.
    """
    if overwrite and resumes:
        return ["train.overwrite replaces a run and checkpoint.resume goes on with it; set one of them."]
    if folder.exists() and not folder.is_dir():
        return [f"train.output_dir: {folder} is a file; name a folder."]
    if reading := [name for name in inputs if _takes_records(name, folder)]:
        return [
            f"train.output_dir: {folder} lies in the data source {reading[0]}, which would read the run's own files as "
            "rows; name a folder outside."
        ]
    is_run = any((folder / name).exists() for name in ("run.yaml", "checkpoints"))
    foreign = [] if is_run else _foreign(folder, inputs)
    if foreign:
        return [
            f"train.output_dir: {folder} holds no run but other things ({_listed(foreign)}), so it may not be the "
            f"folder you meant; name a new one, for example {folder / 'run'}."
        ]
    held = [name for name in (*RECORDS, "checkpoints", "final") if (folder / name).exists()]
    if held and not overwrite and not resumes:
        return [
            f"train.output_dir: {folder} holds a run already ({', '.join(held)}); go on with it with "
            "--checkpoint.resume auto, replace it with --train.overwrite true, or name another folder."
        ]
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        return [f"train.output_dir: {parent} cannot be written to; name another folder."]
    return []


def prepare_folder(folder: Path) -> list[str]:
    """Create the folder; remove the records of an earlier run there. Its final/ stays until the new one is complete.

    Returns:
        A line about what else lies there, if anything does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in RECORDS:
        (folder / name).unlink(missing_ok=True)
    others = _others(folder)
    return [f"{folder} also holds {_listed(others)}, which the run leaves as it is"] if others else []


def leave_links_aside(folder: Path) -> list[str]:
    """Rename what bears the name of a result but is a link or a file, which no run makes.

    Nothing is written through such a link, and nothing is deleted.

    Returns:
        A line about each, for a person to look at it.
    """
    told = []
    for path in (folder / name for name in RESULTS):
        if path.is_symlink() or path.is_file():
            kind = "link" if path.is_symlink() else "file"
            told.append(f"{path} is a {kind}, not a result; it was left aside as {leave_behind(path).name}")
    return told


def leave_behind(path: Path) -> Path:
    """Rename a file, link or folder so that no run takes it for its own any more; returns where it lies now."""
    names = (path.with_name(f"{path.name}{LEFT_BEHIND}{number}") for number in itertools.count(1))
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def _others(folder: Path) -> list[Path]:
    """What lies in a folder, neither hidden nor of a run."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(e for e in entries if e.name not in OWN and not e.name.startswith(".") and LEFT_BEHIND not in e.name)


def _foreign(folder: Path, inputs: Iterable[str]) -> list[Path]:
    """What lies in a folder, and is neither of a run, nor read by it, nor kept beside runs."""
    read = {Path(path).resolve() for name in inputs for path in (name, *glob.glob(name, recursive=True))}
    return [e for e in _others(folder) if e.resolve() not in read and not (e.is_file() and e.suffix in NOTES)]


def _takes_records(source: str, folder: Path) -> bool:
    """Whether a file, glob or folder with data stands for what a run writes into its output folder, too."""
    base = source.partition("**")[0] or "." if "**" in source else source
    run = folder.resolve()
    if os.path.isdir(base) and run.is_relative_to(root := Path(base).resolve()):
        return not any(part.startswith(".") for part in run.relative_to(root).parts)  # hidden ones are not read
    return any((run / name).match(os.path.realpath(source)) for name in RECORDS)


def _listed(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name + "/" * path.is_dir() for path in paths[:LISTED])
    return names + (f" and {len(paths) - LISTED} more" if len(paths) > LISTED else "")
