"""The trackers that ``log.to`` names, which get what metrics.jsonl gets. They are Accelerate's; main process only.

A run that is resumed goes on in the same run of wandb, trackio (by its name) and mlflow (by its tag ``RUN_TAG``). Of
TensorBoard it adds a file, which hides what another one tells of later steps.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import gather_object

from finetune.config import sections
from finetune.errors import first_line, refuse_if_any
from finetune.output.output_folder import TENSORBOARD
from finetune.output.run_record import RunRecord

RUN_TAG = "finetune.run"
"""Of a run of mlflow, which chooses the ids of its runs itself."""


def problems(names: list[sections.Tracker]) -> list[str]:
    """Trackers whose package is not installed, as sentences."""
    there = {str(each) for each in get_available_trackers()}
    return [
        f"log.to: {name} is not installed; run `pip install {name}`, or leave it out."
        for name in names
        if name not in there
    ]


class Trackers:
    """A context manager around the steps of a run, which all processes enter together.

    Once training has begun it never stops for a tracker. One that fails is told of, and gets nothing more.
    """

    def __init__(self, log: sections.Log, folder: Path, say: Callable[[str], None], *, writes: bool) -> None:
        self.project, self.folder, self.say = log.project, folder.resolve(), say
        self.names = log.trackers if writes else []
        self.open: dict[str, GeneralTracker] = {}

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in list(self.open):
            self._call(name, self.open[name].finish)
        self.open = {}

    def start(self, record: RunRecord, *, after: int | None) -> None:
        """Open them, with the configuration; collective.

        Args:
            after: the step after which this run goes on; None if it begins.

        Raises:
            InputError: if one cannot be opened.
        """
        found = list[str]()
        for name in self.names:
            try:
                self._start(name, record, after)
            except Exception as error:  # of any type: another library's, on its way to a server
                found.append(f"log.to: {name} cannot be started ({first_line(error)}); fix that, or leave it out.")
        refuse_if_any(gather_object(found))

    def _start(self, name: str, record: RunRecord, after: int | None) -> None:
        files = self.folder / TENSORBOARD
        if name == "tensorboard" and after is None:
            for file in files.rglob("events.out.tfevents.*"):
                file.unlink()  # of an earlier run, whose curves would be drawn into this one's
        goes_on = name == "tensorboard" and after is not None and files.exists()
        project = TENSORBOARD if name == "tensorboard" else self.project
        settings = self._settings(record, after)[name]
        if name == "mlflow" and after is not None and (known := _run_of_mlflow(record.id)):
            settings, goes_on = {"run_id": known}, True
        tracker = LOGGER_TYPE_TO_CLASS[name](project, **settings)
        tracker.start()
        self.open[name] = tracker
        if not goes_on:  # mlflow refuses other values, and TensorBoard would show another run
            tracker.store_init_configuration(dict(_flat(record.config)))

    def _settings(self, record: RunRecord, after: int | None) -> dict[str, dict[str, Any]]:
        name = self.folder.name
        return {
            "tensorboard": {"logging_dir": self.folder, "purge_step": None if after is None else after + 1},
            "wandb": {"name": name, "id": record.id, "resume": "allow", "dir": str(self.folder)},
            "trackio": {"name": f"{name}-{record.id[:8]}", "resume": "allow"},
            "mlflow": {"run_name": name, "tags": {RUN_TAG: record.id}},
        }

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Hand on the numbers of a step, given as its line of metrics.jsonl."""
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float) and key != "step"}
        for name in list(self.open):
            self._call(name, partial(self.open[name].log, numbers, step=metrics["step"]))

    def _call(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # of any type, as above
            self.say(f"log.to: {name} failed ({first_line(error)}); it gets nothing more, and the run goes on")
            del self.open[name]


def _run_of_mlflow(run: str) -> str | None:
    """The id by which mlflow knows a run."""
    import mlflow

    whose = {"filter_string": f"tags.`{RUN_TAG}` = '{run}'", "output_format": "list"}
    found = mlflow.search_runs(search_all_experiments=True, **whose)
    return found[0].info.run_id if found else None


def _flat(config: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Values as trackers take them, by their keys: lists as text, nothing of what is not set."""
    for section, values in config.items():
        for key, value in values.items():
            if value is not None:
                yield f"{section}.{key}", value if isinstance(value, bool | int | float | str) else json.dumps(value)
