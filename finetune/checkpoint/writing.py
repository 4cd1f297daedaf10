"""Writes one checkpoint to disk, in a thread of every process, without collectives.

Each process writes its file and then a short note about it. The first process waits for all notes, writes the manifest
and renames the checkpoint. A failure here loses the checkpoint, but never stops training.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import xxhash

from finetune.cache import flush
from finetune.checkpoint import folder, manifest
from finetune.checkpoint.host_copy import HostCopy
from finetune.checkpoint.manifest import Part, StoredFile

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 120.0
"""How long a file written by another machine may take to appear on this one."""


class Stopped(Exception):
    """The checkpoint was given up while it was written."""


def write_file(path: Path, chunks: Iterable[memoryview]) -> StoredFile:
    """Write a file and flush it to disk.

    Returns:
        Its size and the checksum of the data in memory, which later reads are compared with.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
        for chunk in chunks:
            digested = beside.submit(digest.update, chunk)
            file.write(chunk)
            digested.result()
            size += len(chunk)
    flush(path)
    return StoredFile(bytes=size, xxh3_128=digest.hexdigest())


Write = Callable[[Path, Iterable[memoryview]], StoredFile]


@dataclass(frozen=True)
class Task:
    """What one process has to write."""

    final: Path
    step: int
    strategy: str
    contents: dict[str, Any]
    """The same on all processes."""
    own: dict[str, Any]
    """This process's part of them."""
    rank: int
    world_size: int
    keep: int
    bests: frozenset[int]
    """Steps of which a checkpoint stays beside those, see ``folder.remove_older``."""


class Writing:
    """A thread that writes one process's part, and on the first process completes the checkpoint."""

    def __init__(self, task: Task, copy: HostCopy, write: Write) -> None:
        self.task, self.copy, self.write = task, copy, write
        self.temporary = folder.temporary_of(task.final)
        self.problem: str | None = None
        """Why there will be no checkpoint, as a clause; if it is set before the start, nothing is written."""
        self.left_over: str | None = None
        """Why older checkpoints could not be removed, though this one is complete."""
        self._own_part_ended, self._stop, self._all_written = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_for_own_part(self) -> None:
        """Until this process's file is on disk, or could not be written."""
        self._own_part_ended.wait()

    def complete(self) -> None:
        """Wait for the end, when every process has written its part."""
        self._all_written.set()
        self._thread.join()

    def stop(self) -> None:
        """Stop without a checkpoint, unless it is already complete."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self.problem is None:
                self._write_own_part()
                self._own_part_ended.set()
                if self.task.rank == 0:
                    self._make_complete()
        except Stopped:
            pass
        except Exception as error:  # a full disk, a folder that is gone, anything: training goes on
            self.problem = reason(error)
        finally:
            self._own_part_ended.set()

    def _write_own_part(self) -> None:
        name = manifest.file_name(self.task.rank, self.task.world_size)
        path = self.temporary / name
        try:
            file = self.write(path, self._until_stopped(self.copy.chunks()))
            part = Part.model_construct(name=name, file=file, tensors=self.copy.stretches, own=self.task.own)
            note = self._note(self.task.rank)
            note.with_suffix(".tmp").write_text(part.model_dump_json(), encoding="utf-8")
            note.with_suffix(".tmp").rename(note)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _until_stopped(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            if self._stop.is_set():
                raise Stopped
            yield chunk

    def _note(self, rank: int) -> Path:
        return self.temporary / f"rank-{rank:05d}.json"

    def _make_complete(self) -> None:
        notes = [self._note(rank) for rank in range(self.task.world_size)]
        self._wait_for(notes)
        whole = manifest.merged(
            (Part.model_validate_json(note.read_text(encoding="utf-8")) for note in notes),
            step=self.task.step,
            strategy=self.task.strategy,
            processes=self.task.world_size,
            written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            contents=self.task.contents,
        )
        for note in notes:
            note.unlink()
        draft = self.temporary / "manifest.tmp"
        draft.write_text(whole.text(), encoding="utf-8")
        flush(draft)
        draft.rename(self.temporary / manifest.NAME)
        folder.put_in_place(self.temporary, self.task.final)
        try:
            folder.remove_older(self.task.final.parent, self.task.keep, bests=self.task.bests)
        except OSError as error:
            self.left_over = reason(error)

    def _wait_for(self, notes: list[Path]) -> None:
        deadline = None
        missing = notes
        while missing := [note for note in missing if not note.exists()]:
            if self._stop.wait(POLL_SECONDS):
                raise Stopped
            if not self.temporary.is_dir():
                raise FileNotFoundError(f"{self.temporary} was removed while it was written")
            if self._all_written.is_set():
                deadline = deadline or time.monotonic() + PATIENCE_SECONDS
                if time.monotonic() > deadline:
                    raise FileNotFoundError(f"the first process does not see the files of the others: {missing[0]}")


def reason(error: BaseException) -> str:
    """An error as a clause; for errors of the operating system, with the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__
