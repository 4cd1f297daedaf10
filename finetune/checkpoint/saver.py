"""Checkpoints written in the background.

Each process copies its share of the state to host memory; training waits only for that. A thread then writes the copy.
One checkpoint is in flight at a time. If one cannot be written, it leaves nothing behind, earlier ones stay, and the
next one is tried as usual.

In a recipe, with ``failed_anywhere`` from whatever the processes exchange in a step anyway::

    saver = Saver(folder, rank=..., world_size=..., keep=..., gather=lambda x: gather_object([x]), expected_bytes=...)
    for step in ...:
        ...
        if step % every == 0:
            seconds = saver.save(step, pieces, contents, own, strategy.name)
        if failed_anywhere:  # saver.failed of any process
            saver.give_up()
        for problem in saver.problems():
            screen.say(problem)
    saver.finish()
"""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.checkpoint import folder
from finetune.checkpoint.host_copy import HostCopy
from finetune.checkpoint.manifest import plain
from finetune.checkpoint.writing import Task, Write, Writing, reason, write_file
from finetune.units import GIB

if TYPE_CHECKING:
    from finetune.distributed import Piece

SIGHT_SECONDS = 5.0
"""How long a new folder may take to appear on another machine."""


class Saver:
    """Writes the checkpoints of a run. Methods that are collective are called by all processes, in the same order."""

    def __init__(
        self,
        run: Path,
        *,
        rank: int,
        world_size: int,
        keep: int,
        gather: Callable[[str | None], list[str | None]],
        expected_bytes: int,
        write: Write = write_file,
    ) -> None:
        """Creates nothing.

        Args:
            run: output folder of the run.
            keep: complete checkpoints that stay; older ones are removed when a newer one is complete.
            gather: collective; a value of each process, given to all.
            expected_bytes: of a checkpoint, over all processes; with less free disk space none is started.
            write: writes one file.
        """
        self.folder = folder.checkpoints_of(run)
        self.rank, self.world_size, self.keep = rank, world_size, keep
        self.expected_bytes = expected_bytes
        self._gather, self._write = gather, write
        self._copy = HostCopy()
        self._writing: Writing | None = None
        self._problems: list[str] = []
        self._bests: frozenset[int] = frozenset()

    @property
    def failed(self) -> bool:
        """Whether this process could not write its part of the checkpoint in flight."""
        return self._writing is not None and self._writing.problem is not None

    def problems(self) -> list[str]:
        """Sentences about failures of any process since the last call; the first process has them all."""
        told, self._problems = self._problems, []
        return told

    def save(
        self,
        step: int,
        pieces: "Iterator[Piece]",
        contents: dict[str, Any],
        own: dict[str, Any],
        strategy: str,
        *,
        best: int | None = None,
    ) -> float:
        """Copy the state and start to write it. Collective; waits for the previous checkpoint.

        Args:
            pieces: all that this process holds, an iterator: after an error it is followed to its end.
            contents: metadata of the checkpoint, the same on all processes; JSON.
            own: this process's part of the metadata. Dictionaries are merged, other values must agree.
            strategy: to show in lists of checkpoints.
            best: step of a checkpoint that stays, whatever its age. An earlier one stays until it is complete.

        Returns:
            Seconds that training was blocked.
        """
        start = time.perf_counter()
        self.finish()
        final = self.folder / folder.name_of(step)
        self._bests |= set() if best is None else {best}
        known = self.rank, self.world_size, self.keep, self._bests
        task = Task(final, step, strategy, plain(contents), plain(own), *known)
        if self._has_begun(final):
            writing = Writing(task, self._copy, self._write)
            try:
                self._copy.take(pieces)
            except MemoryError as error:
                writing.problem = reason(error)
                for _ in pieces:  # other processes may need what this one has of them
                    pass
            writing.start()
            self._writing = writing
        return time.perf_counter() - start

    def finish(self) -> None:
        """Wait until the checkpoint in flight is complete, or has failed and is removed. Collective."""
        if self._writing is None:
            return
        self._writing.wait_for_own_part()
        if any(self._gather(self._writing.problem)):
            self._writing.stop()
        else:
            self._writing.complete()
        self._end(self._writing)

    def close(self) -> None:
        """Finish, and remove what killed starts of the run left half-written or half-removed. Collective."""
        self.finish()
        if self.rank == 0:
            try:
                folder.clear(self.folder)
            except OSError as error:
                self._problems.append(
                    f"Leftovers of checkpoints could not be removed ({reason(error)}); do it by hand."
                )

    def give_up(self) -> None:
        """Stop writing the checkpoint in flight and remove it, after a failure on any process. Collective."""
        if self._writing is not None:
            self._writing.stop()
            self._end(self._writing)

    def _end(self, writing: Writing) -> None:
        final = writing.task.final
        self._tell(final, self._gather(writing.problem))
        if self.rank == 0:  # no thread writes any more; what stays all the same is removed before the next checkpoint
            shutil.rmtree(writing.temporary, ignore_errors=True)
        if writing.left_over:
            self._problems.append(
                f"The checkpoint {final} is complete, but older ones could not be removed ({writing.left_over}); "
                "remove them by hand."
            )
        self._writing = None

    def _has_begun(self, final: Path) -> bool:
        """Create the folder to write to and wait until every process sees it; record why if that fails."""
        temporary = folder.temporary_of(final)
        problem = self._make(temporary) if self.rank == 0 else None
        if self._tell(final, self._gather(problem)):
            return False
        unseen = None
        deadline = time.monotonic() + SIGHT_SECONDS
        while not temporary.is_dir():
            if time.monotonic() > deadline:
                unseen = f"{temporary} is not visible there; put train.output_dir on a disk shared by all machines"
                break
            time.sleep(0.05)
        return not self._tell(final, self._gather(unseen))

    def _make(self, temporary: Path) -> str | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            folder.clear(self.folder)
            free = shutil.disk_usage(self.folder).free
            if free < self.expected_bytes:
                return (
                    f"it needs {self.expected_bytes / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free; free some space"
                )
            temporary.mkdir()
        except OSError as error:
            return reason(error)
        return None

    def _tell(self, final: Path, problems: list[str | None]) -> bool:
        """Record failures of any process as a sentence; returns whether there were any."""
        found = [f"process {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
        if found:
            more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
            self._problems.append(
                f"The checkpoint {final} was not written ({'; '.join(found[:3])}{more}). Earlier checkpoints stay, and "
                "training continues."
            )
        return bool(found)
