"""A new folder, complete or absent: written beside its place, and on the disk before it takes its name."""

import os
from pathlib import Path

from finetune.cache import flush, flush_all

OF_A_RUN = ("final", "final.tmp", "final.old", "checkpoints")
"""Names in the output folder of a run that are its own: what lies in final/ with its id stands for a finished run."""


def problems(folder: Path) -> list[str]:
    """Why this folder cannot be written, as sentences."""
    if place := _cannot_be_replaced(folder):
        inside = f", for example {folder / 'model'}" if folder.is_dir() else ""
        return [
            f"--output {folder} is {place}, and the finished folder, which is written beside it, cannot take its "
            f"place; give a new folder{inside}."
        ]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return [f"--output {folder} already exists and is not an empty folder; choose another one."]
    if folder.absolute().name in OF_A_RUN and (folder.absolute().parent / "run.yaml").is_file():
        return [
            f"--output {folder} is where the run in {folder.absolute().parent} has its own files, so that it would be "
            f"taken for finished; choose another one, for example {folder.with_name('exported')}."
        ]
    if temporary_of(folder).exists():
        return [
            f"{temporary_of(folder)} already exists, from a command that was killed or is still running; remove it, or "
            "choose another --output."
        ]
    parent = existing_parent(folder)
    if not os.access(parent, os.W_OK) or not parent.is_dir():
        return [f"--output: {parent} is not writable; choose another folder."]
    return []


def _cannot_be_replaced(folder: Path) -> str | None:
    """What a folder is that no other one can be renamed to, in words."""
    if folder.is_symlink():
        return "a link"
    if folder.absolute().name == "..":
        return "a way back to another folder"
    if folder.resolve() == Path.cwd():
        return "the current folder"
    return "a mount point" if os.path.ismount(folder) else None


def temporary_of(folder: Path) -> Path:
    """Where it is written before it gets its final name."""
    return folder.absolute().with_name(folder.absolute().name + ".tmp")


def existing_parent(folder: Path) -> Path:
    """The nearest folder above that is there, on whose disk it will lie."""
    return next(parent for parent in folder.absolute().parents if parent.exists())


def put_in_place(folder: Path) -> None:
    """Have the disk hold all that was written, and give it its name."""
    temporary = temporary_of(folder)
    flush_all(temporary)
    temporary.rename(folder)
    flush(folder.absolute().parent)
