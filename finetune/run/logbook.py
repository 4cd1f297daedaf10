"""The lines that a run writes as it goes: metrics.jsonl, rejected.jsonl, trackers, and the screen."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from finetune.checkpoint import describe_newest, resuming
from finetune.checkpoint.reader import Checkpoint
from finetune.data import dataset
from finetune.data.batches import Batches
from finetune.data.rows import Rows
from finetune.data.streaming import Stream
from finetune.errors import RunStopped
from finetune.output import run_files
from finetune.output.run_reading import line_of
from finetune.output.run_record import RunRecord
from finetune.run.screen import Screen
from finetune.run.trackers import Trackers


class Logbook:
    """Written by the main process; the others call the same methods, which do nothing there."""

    def __init__(
        self, folder: Path, screen: Screen, batches: Batches | Stream, trackers: Trackers, *, writes: bool
    ) -> None:
        self.folder, self.screen, self.batches, self.trackers, self.writes = folder, screen, batches, trackers, writes
        self.metrics_file = run_files.Journal(folder / "metrics.jsonl")
        self.rejected_file = run_files.Journal(folder / "rejected.jsonl")

    def open(self, record: RunRecord, resumed: Checkpoint | None, held_out: Rows | None, *, overwrite: bool) -> None:
        """Replace an earlier run in the folder, or bring its records back to where a checkpoint stands.

        Args:
            resumed: this run's own checkpoint, to resume from.
            held_out: rows of files of their own, of which some may have been rejected.
        """
        if not self.writes:
            return
        reads_on = resumed is None or resumed.step < self.batches.steps
        with self._told():
            self._say(resuming.prepare_folder(self.folder, resumed, overwrite=overwrite, reads_on=reads_on))
            run_files.write_run(self.folder, record.as_dict())
        rejected = chain(self.batches.newly_rejected(), dataset.rejected_lines(held_out))
        if reads_on:  # else the file tells of all of them
            self._say(self.rejected_file.append(rejected))

    def write(self, finished: list[dict[str, Any]]) -> None:
        """Add the metrics of steps, and what was rejected meanwhile."""
        told = self.metrics_file.append(map(line_of, finished)) if self.writes else []
        for metrics in finished:
            self.screen.step(metrics)
        self._say(told)
        self.write_rejected()
        for metrics in finished:
            self.trackers.log(metrics)

    def write_rejected(self) -> None:
        """Add what was rejected meanwhile.

        Before a checkpoint too: a run that resumes from its last one reads no more rows.
        """
        rejected = self.batches.newly_rejected()
        if self.writes:
            self._say(self.rejected_file.append(rejected))

    def complete(self, step: int, metrics: dict[str, Any]) -> None:
        """Add figures to the line of a step that was written before."""
        if self.writes:
            with self._told():
                run_files.complete_metrics(self.folder, step, [metrics])
            self.trackers.complete({key: metrics[key] for key in metrics if key == "step" or key.startswith("eval_")})

    @contextmanager
    def _told(self) -> Iterator[None]:
        """
        Raises:
            RunStopped: in place of an OSError.
        """
        try:
            yield
        except OSError as error:
            raise RunStopped(
                f"The records of the run in {self.folder} could not be written ({error.strerror or error}); free some "
                f"space; {describe_newest(self.folder)}."
            ) from error

    def close(self) -> None:
        """Write what still waits for a disk that was full."""
        self._say(self.metrics_file.close() + self.rejected_file.close())

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.screen.say(line)
