"""A cache folder that one process fills while the others wait, and that later runs find complete.

Processes wait on a lock file, not in a collective: hours of preparation never hit a collective's timeout, and the
kernel releases the lock of a killed process.
"""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock, Timeout

from finetune.errors import InputError


def cache_folder() -> Path:
    """Cache folder of this toolkit: ``$XDG_CACHE_HOME/finetune``, or ``~/.cache/finetune``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune"


def data_cache_folder() -> Path:
    """Folder of prepared rows: ``$FINETUNE_DATA_CACHE`` (for example on a fast disk), or ``data`` in
    ``cache_folder``."""
    return Path(os.environ.get("FINETUNE_DATA_CACHE") or cache_folder() / "data")


def key_of(contents: Any) -> str:
    """Name for what was made from these JSON-able ``contents``."""
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:32]


def filled_once(
    folder: Path, fill: Callable[[Path], None], *, on_start: Callable[[], None], on_wait: Callable[[], None]
) -> Path:
    """The folder, filled by this process, by another one meanwhile, or by an earlier run: complete or absent.

    Args:
        fill: writes into the (temporary) folder it is given; called by one process at a time, once if it succeeds.
        on_start: called before filling.
        on_wait: called before waiting for another process.

    Raises:
        InputError: if the folder cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(folder.name + ".lock"), mode=0o666)  # other users wait for it too
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_wait()
            lock.acquire(poll_interval=0.1)
    except OSError as error:
        raise InputError(_not_writable(folder.parent, error)) from error
    try:
        if not folder.is_dir():
            on_start()
            _fill(folder, fill)
    finally:
        lock.release()
    return folder


def _fill(folder: Path, fill: Callable[[Path], None]) -> None:
    machine = f"{folder.name}.{platform.node()}"  # not every shared file system locks for all machines
    for left_behind in folder.parent.glob(f"{machine}.*.tmp"):  # we hold the lock: whoever wrote it was killed
        shutil.rmtree(left_behind)
    work = folder.with_name(f"{machine}.{os.getpid()}.tmp")
    try:
        work.mkdir()
        fill(work)
        flush_all(work)
        if not folder.is_dir():  # or else another machine was faster
            work.rename(folder)
    except OSError as error:
        raise InputError(_not_writable(folder.parent, error)) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


CHECKSUMS = "checksums.json"


def write_checksums(folder: Path) -> None:
    """Note the contents of all files of a folder, for ``refuse_if_damaged``."""
    (folder / CHECKSUMS).write_text(json.dumps(checksums(folder)), encoding="utf-8")


def refuse_if_damaged(folder: Path) -> None:
    """Nothing, unless a file of the folder is not as it was written: a disk or a copy may fail without a word.

    What others put there, such as an editor's file beside the rows that it shows, does no harm.

    Raises:
        InputError: naming the files.
    """
    try:
        written = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        found = checksums(folder)
        wrong = sorted(name for name, checksum in written.items() if found.get(name) != checksum)
    except (OSError, ValueError, AttributeError):
        wrong = [CHECKSUMS]
    if wrong:
        raise InputError(
            f"{folder}: the prepared rows are damaged ({', '.join(wrong)} changed since they were written); delete the "
            "folder, and they are prepared again."
        )


def checksums(folder: Path, pattern: str = "*") -> dict[str, str]:
    """XXH3 of each file whose name fits a pattern, by its name."""
    found = {}
    for path in sorted(folder.glob(pattern)):
        if path.name != CHECKSUMS and path.is_file():
            with path.open("rb") as file:
                digest = xxhash.xxh3_128()
                while block := file.read(2**20):
                    digest.update(block)
            found[path.name] = digest.hexdigest()
    return found


def flush(path: Path) -> None:
    """Have the disk hold what was written, so that a rename never stands for less than all of it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """``flush`` all that is in a folder, and the folder."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def _not_writable(folder: Path, error: OSError) -> str:
    return (
        f"Prepared data could not be written to {error.filename or folder} ({error.strerror or error}); free some "
        "space, or set the environment variable FINETUNE_DATA_CACHE to another folder."
    )
