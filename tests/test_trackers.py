"""Trackers get what metrics.jsonl gets, only when they are asked for, and no run ends for one of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scenarios
from accelerate import tracking
from accelerate.tracking import GeneralTracker

from finetune.config import sections
from finetune.errors import InputError
from finetune.run import trackers
from recipes import sft


class Fake(GeneralTracker):
    """In the place of Weights & Biases, which is not installed here."""

    name = "wandb"
    requires_logging_directory = False
    made: list["Fake"]

    def __init__(self, project: str, **settings: Any) -> None:
        super().__init__()
        self.project, self.settings, self.calls = project, settings, list[tuple[Any, ...]]()
        self.fails_at = self.fails_after
        self.made.append(self)

    fails_after = 10**9

    @property
    def tracker(self) -> object:
        return self

    def start(self) -> None:
        if self.fails_at == 0:
            raise RuntimeError("no API key\nlog in")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.configuration = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.calls.append((step, values))
        if len(self.calls) == self.fails_at:
            raise ConnectionError("server gone")

    def finish(self, exit_code: int = 0) -> None:
        self.calls.append(("finished", exit_code) if exit_code else ("finished",))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Fake]]:
    Fake.made = []
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Fake)
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["wandb"])
    yield Fake
    Fake.fails_after = 10**9


def numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "step"}


def test_tensorboard_has_the_lines_of_metrics_of_a_run_and_of_its_resumption(
    model_folder: Path, conversations: Path, held_out: Path, tmp_path: Path
):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    given: dict[str, Any] = {"data__eval": str(held_out), "log__to": "tensorboard", "train__schedule": "constant"}
    for changes in (
        {"train__steps": 3, "eval__every": 2},
        {"train__steps": 5, "train__overwrite": False, "checkpoint__resume": "auto"},
    ):
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **given, **changes))
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = scenarios.read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    written = {key for line in lines for key in numbers(line)}
    assert set(events.Tags()["scalars"]) == written
    for key in written:
        found = {event.step: event.value for event in events.Scalars(key)}
        assert found == pytest.approx({line["step"]: line[key] for line in lines if key in line}, rel=1e-6)
    assert [file.name for file in tmp_path.joinpath("run", "tensorboard").rglob("hparams.yml")] == ["hparams.yml"]


def test_a_tracker_gets_the_configuration_each_step_once_and_the_end_and_the_same_run_when_resumed(
    fake: type[Fake], model_folder: Path, conversations: Path, tmp_path: Path
):
    """Of three steps the third has no checkpoint, and is made again."""
    resumed = {"train__steps": 4, "train__overwrite": False, "checkpoint__resume": "auto"}
    for changes in ({"train__steps": 3, "checkpoint__every": 2, "checkpoint__at_end": False}, resumed):
        sft.main(
            scenarios.configuration(
                model_folder, conversations, tmp_path / "run", log__to=["wandb"], log__project="mine", **changes
            )
        )
    first, second = fake.made
    assert first.project == "mine"
    assert first.settings == second.settings
    assert (first.settings["name"], first.settings["dir"]) == ("run", str(tmp_path / "run"))
    assert first.configuration["train.steps"] == 3
    assert first.configuration["adapter.modules_to_save"] == "[]"
    assert None not in first.configuration.values()
    lines = scenarios.read_metrics(tmp_path / "run")
    assert [step for step, *_ in first.calls] == [1, 2, 3, "finished"]
    assert first.calls[:2] == [(line["step"], numbers(line)) for line in lines[:2]]
    assert second.calls == [(4, numbers(lines[3])), ("finished",)]


def test_a_run_that_does_not_come_to_its_end_is_marked_as_failed(fake: type[Fake], tmp_path: Path):
    told = list[str]()
    opened = trackers.Trackers(sections.Log(to=["wandb"]), tmp_path, told.append, writes=True)
    opened.open["wandb"] = fake("mine")
    opened.__exit__(KeyError, KeyError(), None)
    assert fake.made[0].calls == [("finished", 1)]
    assert not told


def test_a_tracker_that_fails_gets_no_more_and_the_run_goes_on(
    fake: type[Fake],
    model_folder: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    fake.fails_after = 2
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", log__to="wandb", train__steps=4))
    assert [step for step, *_ in fake.made[0].calls] == [1, 2]
    assert len(scenarios.read_metrics(tmp_path / "run")) == 4
    told = capsys.readouterr().out
    assert told.count("log.to: wandb failed (server gone); it gets nothing more, and the run goes on") == 1
    assert (tmp_path / "run" / "final").exists()


def test_a_tracker_that_cannot_start_ends_the_run_before_weights_load_and_an_earlier_one_is_replaced(
    fake: type[Fake], model_folder: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("earlier")
    fake.fails_after = 0
    with pytest.raises(
        InputError, match=r"log\.to: wandb cannot be started \(no API key\); fix that, or leave it out\."
    ):
        sft.main(scenarios.configuration(model_folder, conversations, run, log__to="wandb", train__steps=1))
    assert (run / "metrics.jsonl").read_text() == "earlier"
    assert "trained weights" not in capsys.readouterr().out


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, conversations: Path, tmp_path: Path
):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(InputError) as refused:
        sft.main(
            scenarios.configuration(
                model_folder, conversations, tmp_path / "run", log__to=["mlflow", "tensorboard", "trackio"]
            )
        )
    assert refused.value.problems == [
        f"log.to: {name} is not installed; run `pip install {name}`, or leave it out." for name in ("mlflow", "trackio")
    ]
    assert not (tmp_path / "run").exists()
