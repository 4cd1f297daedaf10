"""Checkpoint folders, created and removed atomically: each is complete or absent at any instant.

``OUTPUT_DIR/checkpoints/step-00000100`` is a checkpoint. A name that ends in ``.tmp`` is being written or removed; the
next checkpoint deletes leftovers. Only one run at a time works in an output folder (``hold``).

Example: step 200 with two kept. The run writes ``step-00000200.tmp``, renames it to ``step-00000200``, then renames
``step-00000050`` to ``step-00000050.removed.tmp`` and removes that; 100 and 200 stay. Killed before the first rename it
leaves ``step-00000200.tmp``, which the next run puts in place if it is complete.
"""

import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from finetune.cache import flush
from finetune.checkpoint import manifest
from finetune.errors import InputError
from finetune.output.output_folder import leave_behind

STEP = re.compile(r"step-([0-9]{8,})")
PATIENCE_SECONDS = 10.0
"""How long to wait for a stopping run to release its folder."""
UNFINISHED = re.compile(r"step-[0-9]{8,}(\.removed)?\.tmp")


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints."""
    return run / "checkpoints"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def temporary_of(final: Path) -> Path:
    """Where a checkpoint is written before it gets its final name."""
    return final.with_name(final.name + ".tmp")


def in_place(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, newest first; links are ignored."""
    found = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = STEP.fullmatch(entry.name)
        if match and entry.name == name_of(int(match[1])) and entry.is_dir() and not entry.is_symlink():
            found[int(match[1])] = entry
    return [found[step] for step in sorted(found, reverse=True)]


def linked(folder: Path) -> list[Path]:
    """Links with the name of a checkpoint, oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(e for e in entries if STEP.fullmatch(e.name) and e.is_symlink())


def unfinished(folder: Path) -> list[Path]:
    """Folders being written or removed, or left over from a killed run."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(e for e in entries if UNFINISHED.fullmatch(e.name) and e.is_dir() and not e.is_symlink())


def is_complete(path: Path) -> bool:
    """Whether a checkpoint has its manifest and all files with their sizes."""
    try:
        manifest.read(path)
    except InputError:
        return False
    return True


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a complete checkpoint its final name, replacing an earlier one of the same step.

    If the run is killed between the two renames, the next run's ``hold`` finishes it.
    """
    flush(temporary)
    earlier = _set_aside(final) if final.exists() else None
    temporary.rename(final)
    flush(final.parent)
    if earlier:
        shutil.rmtree(earlier)


def remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed before its first file is deleted."""
    shutil.rmtree(_set_aside(path))


def _set_aside(path: Path) -> Path:
    doomed = path.with_name(path.name + ".removed.tmp")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    return doomed


def remove_older(folder: Path, keep: int, *, bests: Collection[int] = ()) -> None:
    """Remove complete checkpoints beyond the newest ``keep``; incomplete ones stay for a person to inspect.

    Args:
        bests: steps that each were the best when they were saved. The newest complete checkpoint of them stays,
            whatever its age: that of the last one may not have been written.
    """
    complete = [path for path in in_place(folder) if is_complete(path)]
    best = next((path for path in complete if path.name in map(name_of, bests)), None)
    for path in complete[keep:]:
        if path != best:
            remove(path)


def up_to(folder: Path, step: int) -> list[Path]:
    """The checkpoints of a step and before it, newest first."""
    return [path for path in in_place(folder) if int(path.name.removeprefix("step-")) <= step]


def leave_later_behind(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints after the step that a run resumes from, so they are no longer used or counted.

    Returns:
        Their new paths, for a person to remove.
    """
    earlier = up_to(folder, step)
    return [leave_behind(path) for path in in_place(folder) if path not in earlier]


def remove_all(run: Path) -> None:
    """Remove the checkpoints of a replaced run."""
    for path in (*in_place(checkpoints_of(run)), *unfinished(checkpoints_of(run))):
        shutil.rmtree(path)


def clear(folder: Path) -> None:
    """Remove half-written and half-removed checkpoints of killed or failed runs."""
    for path in unfinished(folder):
        shutil.rmtree(path)


def unnamed(folder: Path) -> list[tuple[Path, Path]]:
    """Complete checkpoints that do not have their final name yet, with that name: their run was killed before."""
    found = [(path, path.with_suffix("")) for path in unfinished(folder)]
    return [(path, to) for path, to in found if STEP.fullmatch(to.name) and not to.exists() and is_complete(path)]


@contextmanager
def hold(run: Path, *, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Lock an output folder against other runs; the first process does this for all, for the whole run.

    The kernel releases the lock when the process is killed. A checkpoint that was complete by then, but did not yet
    have its final name, gets it now.

    Args:
        patience_seconds: to wait for the run that holds the lock.

    Raises:
        InputError: if another run holds the lock, or the folder cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run / ".lock")
        lock.acquire(timeout=patience_seconds)
    except Timeout as error:
        raise InputError(
            f"train.output_dir: another run is using {run}; wait until it ends, or choose another folder. If none runs "
            f"on any machine, its disk has no locks that end with a process: remove {run / '.lock'}."
        ) from error
    except OSError as error:
        raise InputError(
            f"train.output_dir: {run} is not writable ({error.strerror or error}); choose another folder."
        ) from error
    try:
        for temporary, final in unnamed(checkpoints_of(run)):
            put_in_place(temporary, final)
        yield
    finally:
        lock.release()
