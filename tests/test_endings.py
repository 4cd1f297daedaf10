"""The end of a run: nothing is lost whatever its last instant is, and it can go on with more steps."""

import errno
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scenarios
import torch
import yaml
from safetensors.torch import load_file

from finetune.checkpoint import newest
from finetune.checkpoint.resuming import checkpoints_at_once
from finetune.config import sections
from finetune.config.sections import Train
from finetune.data import batches
from finetune.errors import InputError, RunInterrupted, RunStopped
from finetune.export.checkpoint_export import export
from finetune.optim.schedule import learning_rate
from finetune.output import run_files
from finetune.run import session
from finetune.training import evaluation, loss
from finetune.training.meter import Meter
from recipes import sft

STEPS = 4
SETTINGS: dict[str, Any] = {"train__steps": STEPS, "train__overwrite": False, "checkpoint__resume": "auto"}
SETTINGS |= {"train__global_batch_size": 4, "train__micro_batch_size": 4}
CONSTANT = {"train__schedule": "constant", "train__warmup_ratio": 0.0}
TIMELESS = ("step", "loss", "grad_norm", "tokens", "total_tokens", "learning_rate", "eval_loss")


@pytest.fixture(scope="module", autouse=True)
def fp32() -> Iterator[None]:
    """In bf16 a CPU takes several times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        yield


@pytest.fixture
def train(model_folder: Path, conversations: Path, tmp_path: Path) -> Callable[..., Path]:
    """``train(name, section__key=value)``: run the recipe in a folder of this name."""

    def run(name: str = "run", **changes: Any) -> Path:
        settings = SETTINGS | changes
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / name, **settings))
        return tmp_path / name

    return run


@pytest.fixture(scope="module")
def whole(model_folder: Path, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed, which evaluates after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    settings = SETTINGS | {"data__eval": str(held_out), "eval__every": 2}
    sft.main(scenarios.configuration(model_folder, conversations, folder, **settings))
    return folder


def timeless(run: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in TIMELESS if key in line} for line in scenarios.read_metrics(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


def assert_same_result(run: Path, expected: Path) -> None:
    assert timeless(run) == timeless(expected)
    assert weights(run).keys() == weights(expected).keys()
    assert all(torch.equal(weight, weights(expected)[name]) for name, weight in weights(run).items())


# -- more steps ------------------------------------------------------------------------------------------------------


def test_finished_run_goes_on_with_more_steps_as_if_it_had_had_them_from_the_beginning(
    train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    uninterrupted = train("uninterrupted", train__steps=6, **CONSTANT)
    train(train__steps=3, **CONSTANT)
    capsys.readouterr()
    run = train(train__steps=6, **CONSTANT)
    said = capsys.readouterr().out
    assert "resuming after step 3" in said
    assert "the run now has 6 steps, not 3: the learning rate continues as before\n" in said
    assert_same_result(run, uninterrupted)
    assert run_files.finished_steps(run) == 6


def test_run_that_goes_on_under_another_schedule_says_so_with_both_learning_rates(
    train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    all_six = [
        learning_rate(step, 6, Train(output_dir="", learning_rate=1e-3, warmup_ratio=0.1)) for step in range(1, 7)
    ]
    first = [line["learning_rate"] for line in timeless(train(train__steps=3))]
    assert first != all_six[:3]
    rates = [line["learning_rate"] for line in timeless(train(train__steps=6))]
    assert rates == first + all_six[3:]
    assert (
        "the run now has 6 steps, not 3: the learning rate follows the schedule of 6 steps from here on "
        f"({first[2]:.2e} in step 3, {all_six[3]:.2e} in step 4), so the losses differ from those of an uninterrupted "
        "run\n"
    ) in capsys.readouterr().out


def test_run_of_more_epochs_tells_of_the_rows_that_a_short_last_step_leaves_out(
    train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    changes = {
        **CONSTANT,
        "train__steps": None,
        "train__global_batch_size": 32,
        "train__micro_batch_size": 32,
    }  # 80 rows: 32, 32 and 16
    train(**changes, train__epochs=1.0)
    train(**changes, train__epochs=2.0)
    said = capsys.readouterr().out
    assert "the run now has 5 steps, not 3: " in said
    assert "step 3 had fewer rows than it would have now, and the missing ones are skipped" in said


def test_run_without_a_checkpoint_at_its_end_cannot_go_on(train: Callable[..., Path]):
    run = train(train__steps=2, checkpoint__at_end=False)
    assert newest(run) == (None, [])
    with pytest.raises(InputError, match="has a finished run of 2 steps and no checkpoint to resume from"):
        train(train__steps=3)


@pytest.mark.parametrize(("every", "at_end"), list(itertools.product(range(9), [True, False])))
def test_room_is_asked_for_as_many_checkpoints_as_will_lie_there(every: int, at_end: bool):
    for steps, keep in itertools.product(range(1, 10), range(1, 4)):
        saved = [step for step in range(1, steps + 1) if (every and step % every == 0) or (at_end and step == steps)]
        settings = sections.Checkpoint(every=every, at_end=at_end, keep=keep)
        assert checkpoints_at_once(settings, steps) == min(len(saved), keep + 1)


# -- the last instants -----------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process."""


def wait_for_checkpoint(run: Path) -> None:
    """It is written in the background, by a thread that would end with its process."""
    deadline = time.monotonic() + 20
    while newest(run)[0] is None and time.monotonic() < deadline:
        time.sleep(0.01)


def dies_evaluating(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    evaluate = evaluation.evaluate

    def dying(*args: Any, **kwargs: Any) -> float:
        if list(run.glob(f"checkpoints/step-{STEPS:08d}*")):
            wait_for_checkpoint(run)
            raise Killed
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(evaluation, "evaluate", dying)


def dies_before_the_line_of_the_last_step(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    append = run_files.Journal.append

    def dying(journal: run_files.Journal, lines: Any) -> list[str]:
        added = list(lines)
        if any(json.loads(line).get("step") == STEPS for line in added):
            wait_for_checkpoint(run)
            raise Killed
        return append(journal, added)

    monkeypatch.setattr(run_files.Journal, "append", dying)


def dies_in(function: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    def patch(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
        def dying(*args: Any, **kwargs: Any) -> None:
            raise Killed

        monkeypatch.setattr(run_files, function, dying)

    patch.__name__ = f"dies_in_{function}"
    return patch


def dies_between_the_renames_of_the_result(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    def dying(temporary: Path, final: Path) -> None:
        if final.exists():
            final.rename(final.with_name("final.old"))
        raise Killed

    monkeypatch.setattr(run_files, "replace", dying)


def dies_when_the_result_has_its_name(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    replace = run_files.replace

    def dying(temporary: Path, final: Path) -> None:
        replace(temporary, final)
        raise Killed

    monkeypatch.setattr(run_files, "replace", dying)


INSTANTS = [
    dies_evaluating,
    dies_before_the_line_of_the_last_step,
    dies_in("save_final"),
    dies_in("replace"),
    dies_between_the_renames_of_the_result,
    dies_when_the_result_has_its_name,
]


@pytest.mark.parametrize("dies", INSTANTS, ids=lambda dies: dies.__name__)
def test_run_that_is_killed_in_its_last_phase_loses_nothing(
    dies: Callable[..., None],
    train: Callable[..., Path],
    whole: Path,
    held_out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    settings = {"data__eval": str(held_out), "eval__every": 2, "checkpoint__every": 0}
    with monkeypatch.context() as patch:
        dies(patch, tmp_path / "run")
        with pytest.raises(Killed):
            train(**settings)
    with monkeypatch.context() as patch:
        patch.setattr(sft, "learning_rate", None)  # no step is trained again
        run = train(**settings)
    assert_same_result(run, whole)
    assert "eval_loss" in timeless(run)[-1]
    record, expected = (yaml.safe_load((folder / "run.yaml").read_text()) for folder in (run, whole))
    assert record["eval_loss"] == expected["eval_loss"]
    assert record["measured"]["tokens_per_second"] > 0
    assert "held-out loss" in (run / "final" / "README.md").read_text()
    assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize("step", [2, STEPS])
def test_evaluation_that_a_signal_leaves_out_is_made_up_for_when_the_run_goes_on(
    step: int, train: Callable[..., Path], whole: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = {"data__eval": str(held_out), "eval__every": 2}
    original = batches.Batches.step

    def asked_to_end(work: Any, number: int) -> Any:
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # noted by the thread that looks out for it
        return original(work, number)

    with monkeypatch.context() as patch:
        patch.setattr(batches.Batches, "step", asked_to_end)
        with pytest.raises(RunInterrupted, match=f"SIGTERM ended the run after step {step} of {STEPS}"):
            train(**settings)
    run = train(**settings)
    assert_same_result(run, whole)
    assert [line["step"] for line in timeless(run) if "eval_loss" in line] == [2, STEPS]


def test_evaluation_that_stands_in_the_metrics_is_not_repeated(
    train: Callable[..., Path], held_out: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = {"data__eval": str(held_out), "eval__every": 2, **CONSTANT}
    train(train__steps=2, **settings)
    evaluated = []
    evaluate = evaluation.evaluate

    def counted(*args: Any, **kwargs: Any) -> float:
        evaluated.append(1)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(evaluation, "evaluate", counted)
    run = train(**settings)
    assert [line["step"] for line in timeless(run) if "eval_loss" in line] == [2, STEPS]
    assert len(evaluated) == 1


def test_exported_checkpoint_tells_the_evaluation_that_followed_it(whole: Path, tmp_path: Path):
    export(whole, tmp_path / "exported")
    after = timeless(whole)[-1]["eval_loss"]
    assert f", {after:.4f} after training" in (tmp_path / "exported" / "README.md").read_text()


def test_lines_that_wait_until_the_end_are_tried_again_and_their_loss_is_said(tmp_path: Path):
    journal, path = run_files.Journal(tmp_path / "folder" / "lines.jsonl"), tmp_path / "folder" / "lines.jsonl"
    journal.append(["1", "2"])
    assert "is missing its last 2 lines" in journal.close()[0]
    path.parent.mkdir()
    assert journal.close() == []
    assert path.read_text() == "1\n2\n"


class LateMeter(Meter):
    """As on a GPU, where a step is read with the next one."""

    def update(self, **step: Any) -> list[dict[str, Any]]:
        before = self.flush()
        with mock.patch.object(self, "flush", list):
            super().update(**step)
        return before


@pytest.mark.parametrize("steps", [1, 3])
def test_last_step_is_read_where_nothing_is_saved_or_evaluated_after_it(
    steps: int, train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session, "Meter", LateMeter)
    run = train(train__steps=steps, checkpoint__every=0, checkpoint__at_end=False)
    assert [line["step"] for line in timeless(run)] == list(range(1, steps + 1))
    assert f"optimizer steps: {steps}" in (run / "final" / "README.md").read_text()


def test_line_that_could_not_be_written_is_added_before_the_result(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    add, full = run_files._append, iter([True])

    def full_disk(content: bytes, path: Path) -> None:
        if b'"step": 4' in content and next(full, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        add(content, path)

    monkeypatch.setattr(run_files, "_append", full_disk)
    run = train()
    said = "metrics.jsonl cannot be written (No space left on device); its lines are kept in memory"
    assert said in capsys.readouterr().out
    assert [line["step"] for line in timeless(run)] == [1, 2, 3, 4]


# -- nothing was learnt ----------------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, factors: list[float]) -> None:
    """Multiply the losses, one call after the other; the first is the memory check's."""
    original, left = loss.token_loss_sum, iter(factors)
    monkeypatch.setattr(loss, "token_loss_sum", lambda logits, tokens: original(logits, tokens) * next(left))


NAN = float("nan")


def test_run_of_which_no_step_changed_the_weights_has_no_result(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    spoil(monkeypatch, [1, NAN, NAN])
    with pytest.raises(RunStopped, match=r"None of the 2 steps of this run changed a weight.*no final/ was written"):
        train(train__steps=2, train__max_bad_steps=5)
    monkeypatch.undo()
    with pytest.raises(RunStopped, match="None of the 2 steps"):  # nor when it is started again
        train(train__steps=2, train__max_bad_steps=5)
    run = train(train__steps=3)  # the next step is a good one
    assert run_files.finished_steps(run) == 3


def test_earlier_result_outlives_a_run_without_one(train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    run = train(train__steps=1)
    before = weights(run)
    spoil(monkeypatch, [1, NAN])
    with pytest.raises(RunStopped, match="The only step of this run changed no weight"):
        train(train__steps=1, train__overwrite=True, checkpoint__resume="none", train__seed=1)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(run).items())
    assert run_files.finished_steps(run) == 0


def test_run_of_which_one_step_changed_the_weights_has_a_result(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    spoil(monkeypatch, [1, NAN, 1, NAN])
    assert run_files.finished_steps(train(train__steps=3)) == 3
