"""The output folder of a run: what it may contain at the start, and what is moved aside.

A run writes only the names in ``OWN`` and hidden files. It never touches other files.
"""

import glob
import itertools
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

PROFILE = "profile.json.gz"
REPORT = "report.html"
PICTURE = "report.png"
TENSORBOARD = "tensorboard"
RECORDS = ("run.yaml", "metrics.jsonl", "rejected.jsonl", PROFILE, REPORT, PICTURE)
RESULTS = ("final", "final.tmp", "final.old")
OWN = {*RECORDS, *(f"{name}.tmp" for name in RECORDS), *RESULTS, "checkpoints", "nvme_offload", TENSORBOARD, "wandb"}
LEFT_BEHIND = ".left-behind-"
NOTES = {".log", ".out", ".err", ".txt", ".md", ".sh", ".yaml", ".yml"}
"""Files that people and schedulers keep with a run: logs (often created before it begins), notes, scripts, settings."""
LISTED = 4
"""Names that a sentence lists."""


def problems(folder: Path, *, overwrite: bool, resumes: bool, inputs: Sequence[str] = ()) -> list[str]:
    """Why a run may not write to this folder, as sentences. Creates and removes nothing.

    A folder with a run may also contain other things. A folder without a run, but with other data, models or folders,
    is most likely a mistake.

    Args:
        inputs: data sources and files that the run reads, as in the configuration. They may be in the folder.
    """
    try:
        return _problems(folder, overwrite=overwrite, resumes=resumes, inputs=inputs)
    except OSError as error:  # of a folder above it that may not be entered, or a name that is too long
        return [f"train.output_dir: {folder} cannot be used ({error.strerror or error}); choose another folder."]


def _problems(folder: Path, *, overwrite: bool, resumes: bool, inputs: Sequence[str]) -> list[str]:
    if overwrite and resumes:
        return ["train.overwrite replaces a run, but checkpoint.resume continues it; set only one of them."]
    if folder.exists() and not folder.is_dir():
        return [f"train.output_dir: {folder} is a file; give a folder."]
    if reading := [name for name in inputs if _takes_records(name, folder)]:
        return [
            f"train.output_dir: {folder} is inside the data source {reading[0]}, so the run's own files would "
            "be read as "
            "rows; choose a folder outside it."
        ]
    is_run = any((folder / name).exists() for name in ("run.yaml", "checkpoints"))
    foreign = [] if is_run else _foreign(folder, inputs)
    if foreign:
        return [
            f"train.output_dir: {folder} contains other files but no run ({_listed(foreign)}), so it may not be the "
            f"folder you meant; choose a new one, for example {folder / 'run'}."
        ]
    held = [name for name in (*RECORDS, "checkpoints", "final") if (folder / name).exists()]
    if held and not overwrite and not resumes:
        return [
            f"train.output_dir: {folder} already contains a run ({', '.join(held)}); resume it with "
            "--checkpoint.resume auto, replace it with --train.overwrite true, or choose another folder."
        ]
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        return [f"train.output_dir: {parent} is not writable; choose another folder."]
    return []


def prepare_folder(folder: Path) -> list[str]:
    """Create the folder; remove the records of an earlier run there. Its final/ stays until the new one is complete.

    Returns:
        A line on other contents, if there are any.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in RECORDS:
        (folder / name).unlink(missing_ok=True)
    curves = folder / TENSORBOARD
    if curves.is_dir() and not curves.is_symlink():
        shutil.rmtree(curves)  # they would be drawn into this run's
    others = _others(folder)
    return [f"{folder} also contains {_listed(others)}, which the run does not touch"] if others else []


def leave_links_aside(folder: Path) -> list[str]:
    """Rename links and files with the name of a result, which no run creates.

    Nothing is written through such a link, and nothing is deleted.

    Returns:
        A line on each, for a person to check.
    """
    told = []
    for path in (folder / name for name in RESULTS):
        if path.is_symlink() or path.is_file():
            kind = "link" if path.is_symlink() else "file"
            told.append(f"{path} is a {kind}, not a result; it was renamed to {leave_behind(path).name}")
    return told


def leave_behind(path: Path) -> Path:
    """Rename a file, link or folder so that runs ignore it; returns its new path."""
    names = (path.with_name(f"{path.name}{LEFT_BEHIND}{number}") for number in itertools.count(1))
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def _others(folder: Path) -> list[Path]:
    """Contents of a folder that are neither hidden nor of a run."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(e for e in entries if e.name not in OWN and not e.name.startswith(".") and LEFT_BEHIND not in e.name)


def _foreign(folder: Path, inputs: Iterable[str]) -> list[Path]:
    """Contents of a folder that are neither of a run, nor read by it, nor usually kept with runs."""
    read = {Path(path).resolve() for name in inputs for path in (name, *glob.glob(name, recursive=True))}
    return [e for e in _others(folder) if e.resolve() not in read and not (e.is_file() and e.suffix in NOTES)]


def _takes_records(source: str, folder: Path) -> bool:
    """Whether a data file, glob or folder would also match what a run writes to its output folder."""
    base = source.partition("**")[0] or "." if "**" in source else source
    run = folder.resolve()
    if os.path.isdir(base) and run.is_relative_to(root := Path(base).resolve()):
        return not any(part.startswith(".") for part in run.relative_to(root).parts)  # hidden ones are not read
    return any((run / name).match(os.path.realpath(source)) for name in RECORDS)


def _listed(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name + "/" * path.is_dir() for path in paths[:LISTED])
    return names + (f" and {len(paths) - LISTED} more" if len(paths) > LISTED else "")
