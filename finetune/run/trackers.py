"""The trackers that ``log.to`` names, which get what metrics.jsonl gets. They are Accelerate's; main process only.

A run that is resumed goes on in the same run of wandb, trackio (by its name) and mlflow (by its tag ``RUN_TAG``). These
cannot replace what they have of a step, so that steps which are made again are not sent again. Of TensorBoard it adds a
file, which hides what another one tells of later steps.
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
from finetune.output.run_reading import read_metrics
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
    """A context manager around a run, which all processes enter together.

    Once training has begun it never stops for a tracker. One that fails is told of, and gets nothing more.
    """

    def __init__(self, log: sections.Log, folder: Path, say: Callable[[str], None], *, writes: bool) -> None:
        self.project, self.folder, self.say = log.project, folder.resolve(), say
        self.names = log.trackers if writes else []
        self.open: dict[str, GeneralTracker] = {}
        self.known_steps = 0

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in list(self.open):
            self._call(
                name,
                partial(_close, name, self.open[name], failed=error is not None),
                then="its record may lack the end",
            )
        self.open = {}

    def start(self, record: RunRecord, *, after: int | None, inside: bool) -> None:
        """Open those that write files inside the run's folder, or else the others; collective.

        The others are on their way to a server, and are opened before weights load. What is written inside the folder
        waits until an earlier run there is replaced.

        Args:
            after: the step after which this run goes on; None if it begins.

        Raises:
            InputError: if one cannot be opened.
        """
        found = list[str]()
        for name in self.names:
            if (name == "tensorboard") != inside:
                continue
            try:
                self._start(name, record, after)
            except Exception as error:  # of any type: another library's, on its way to a server
                found.append(f"log.to: {name} cannot be started ({first_line(error)}); fix that, or leave it out.")
        refuse_if_any(gather_object(found))

    def _start(self, name: str, record: RunRecord, after: int | None) -> None:
        if name == "tensorboard":
            project, goes_on = TENSORBOARD, after is not None and (self.folder / TENSORBOARD).exists()
        else:
            project, goes_on = self.project, False
            self.known_steps = 0 if after is None else max(read_metrics(self.folder)[0], default=0)
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
        for name in list(self.open):
            if name == "tensorboard" or metrics["step"] > self.known_steps:
                self._send(name, metrics)

    def complete(self, metrics: Mapping[str, Any]) -> None:
        """Hand on more figures of a step that was handed on before. Steps of wandb only grow, so it gets none."""
        for name in set(self.open) - {"wandb"}:
            self._send(name, metrics)

    def _send(self, name: str, metrics: Mapping[str, Any]) -> None:
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float) and key != "step"}
        self._call(name, partial(self.open[name].log, numbers, step=metrics["step"]))

    def _call(
        self, name: str, call: Callable[[], object], *, then: str = "it gets nothing more, and the run goes on"
    ) -> None:
        try:
            call()
        except Exception as error:  # of any type, as above
            self.say(f"log.to: {name} failed ({first_line(error)}); {then}")
            del self.open[name]


def _close(name: str, tracker: Any, *, failed: bool) -> None:
    """End it, and mark a run that did not come to its end, where the tracker can."""
    if failed and name == "wandb":
        tracker.tracker.finish(exit_code=1)
    elif failed and name == "mlflow":
        import mlflow

        mlflow.end_run("FAILED")
    else:
        tracker.finish()


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
