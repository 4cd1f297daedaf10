"""A run as its output folder tells of it, at work or finished, whatever version wrote it."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import InputError
from finetune.output.run_reading import read_metrics, read_run


@dataclass(frozen=True)
class RunRead:
    """What run.yaml and metrics.jsonl hold; older runs lack parts of it."""

    name: str
    """Of its folder; no two runs of a report have the same."""
    record: dict[str, Any]
    """run.yaml; empty where it cannot be read."""
    steps: list[dict[str, Any]]
    """Lines of metrics.jsonl, in the order of their steps."""
    unread: int
    """Lines that cannot be read."""
    has_result: bool
    """final/ is there."""

    def part(self, *names: str) -> dict[str, Any]:
        """A section of run.yaml, by its name and those of the sections around it; empty where there is none."""
        found: Any = self.record
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    def listed(self, name: str) -> list[dict[str, Any]]:
        """A list of run.yaml; empty where there is none."""
        found = self.record.get(name)
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    def course(self, key: str) -> list[tuple[int, float]]:
        """Steps and values of a figure; NaN where it was not finite, nothing where it was not taken."""
        return [(line["step"], _number(line[key])) for line in self.steps if key in line]

    def last(self, key: str) -> float | None:
        """The last value of a figure."""
        values = [value for _, value in self.course(key) if math.isfinite(value)]
        return values[-1] if values else None

    def typical(self, key: str) -> float | None:
        """The median of a figure without the first step, which is a warm-up."""
        values = [value for _, value in self.course(key)[1:] if math.isfinite(value)]
        return statistics.median(values) if values else None

    def total(self, key: str) -> float:
        """The sum of a figure over all steps."""
        return math.fsum(value for _, value in self.course(key) if math.isfinite(value))


def read_runs(folders: list[Path]) -> list[RunRead]:
    """The runs in these folders, each once, in whatever ways its folder is written.

    Raises:
        InputError: naming each folder that holds no run.
    """
    folders = [*{folder.resolve(): folder for folder in folders}.values()]
    empty = [
        folder for folder in folders if not any((folder / name).is_file() for name in ("run.yaml", "metrics.jsonl"))
    ]
    if empty:
        raise InputError(
            [f"{folder} has neither run.yaml nor metrics.jsonl; give the output folder of a run." for folder in empty]
        )
    names = [folder.resolve().name for folder in folders]
    return [_read(folder, name if names.count(name) == 1 else str(folder)) for folder, name in zip(folders, names)]


def _read(folder: Path, name: str) -> RunRead:
    try:
        lines, unread = read_metrics(folder)
        record = read_run(folder)
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read ({error.strerror}); check its permissions.") from error
    return RunRead(name, record, [lines[step] for step in sorted(lines)], unread, (folder / "final").is_dir())


def _number(value: Any) -> float:
    """None stands for what is not finite; so does here what is no number."""
    return float(value) if isinstance(value, int | float) else math.nan
