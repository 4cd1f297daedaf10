"""What a run goes on from, and what it refuses to go on from: by name, with what to do, before weights load."""

import contextlib
import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
from safetensors.torch import load_file, save_file

from finetune import checkpoint, distributed
from finetune.checkpoint import resuming
from finetune.data import batches
from finetune.errors import InputError, RunStopped
from finetune.models import loading
from finetune.models.weight_files import local_files
from finetune.output import run_files
from finetune.output.run_files import finished_steps
from finetune.run import preflight, result, session, sizes
from finetune.training import loss
from recipes import sft

EVERY = {"checkpoint__every": 2, "checkpoint__keep": 3, "train__steps": 6, "train__overwrite": False}
EVERY |= {"train__micro_batch_size": 8}  # all rows of a step: nothing here is about accumulation
AUTO = {**EVERY, "checkpoint__resume": "auto"}


@pytest.fixture(scope="module")
def finished(model_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter, its checkpoints after steps 2, 4 and 6, and its result."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    sft.main(scenarios.configuration(model_folder, conversations, folder, adapter__type="lora", **EVERY))
    return folder


@pytest.fixture
def killed(finished: Path, tmp_path: Path) -> Path:
    """The same, killed in step 5."""
    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])  # the last one was cut short
    return folder


@pytest.fixture
def resume(model_folder: Path, conversations: Path, killed: Path):
    def run(**changes: Any) -> list[dict[str, Any]]:
        changes = {**AUTO, "adapter__type": "lora", **changes}
        sft.main(scenarios.configuration(model_folder, changes.pop("data", conversations), killed, **changes))
        return scenarios.read_metrics(killed)

    return run


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights is an error."""
    monkeypatch.setattr(loading, "load_model", None)


def test_each_step_stands_in_the_metrics_once_with_the_figures_of_the_run_that_was_not_killed(resume, finished: Path):
    timeless = ("step", "loss", "grad_norm", "tokens", "total_tokens", "learning_rate")
    figures, expected = (
        [[line[key] for key in timeless] for line in lines] for lines in (resume(), scenarios.read_metrics(finished))
    )
    assert figures == expected


def test_lines_that_were_lost_with_the_machine_come_back_from_the_checkpoint(resume, killed: Path):
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(lines[:3]))
    assert [line["step"] for line in resume()] == [1, 2, 3, 4, 5, 6]


def test_steps_that_save_report_how_long_they_stood_still(finished: Path):
    lines = scenarios.read_metrics(finished)
    assert [line["step"] for line in lines if "save_stall_seconds" in line] == [2, 4, 6]
    assert all(0 < line["save_stall_seconds"] < 60 for line in lines if "save_stall_seconds" in line)


def test_finished_run_is_left_as_it_is(
    finished: Path, model_folder: Path, conversations: Path, no_weights: None, capsys: pytest.CaptureFixture[str]
):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    sft.main(scenarios.configuration(model_folder, conversations, finished, adapter__type="lora", **AUTO))
    assert "is finished: its 6 steps are done" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_finished_run_says_which_settings_are_others_now_and_refuses_other_rows(
    finished: Path,
    model_folder: Path,
    conversations: Path,
    tmp_path: Path,
    no_weights: None,
    capsys: pytest.CaptureFixture[str],
):
    def again(rows: Path, **changes: Any) -> None:
        sft.main(scenarios.configuration(model_folder, rows, finished, adapter__type="lora", **AUTO, **changes))

    again(conversations, train__learning_rate=5e-5)
    assert "train.learning_rate 0.001 -> 5e-05, which nothing was trained with" in capsys.readouterr().out
    others = tiny.write_conversations(tmp_path / "others.jsonl", rows=80, seed=9)
    with pytest.raises(InputError, match="is finished, but the training rows changed since; choose another folder"):
        again(others)


def test_run_with_more_steps_goes_on_from_the_finished_one(
    finished: Path, model_folder: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(finished, tmp_path / "run")
    changes = {**AUTO, "adapter__type": "lora", "train__steps": 8, "train__learning_rate": 5e-4}
    sft.main(scenarios.configuration(model_folder, conversations, folder, **changes))
    assert [line["step"] for line in scenarios.read_metrics(folder)] == list(range(1, 9))
    assert finished_steps(folder) == 8
    said = capsys.readouterr().out
    assert "resuming after step 6" in said
    assert "changed since then: train.learning_rate 0.001 -> 0.0005" in said


def test_resume_auto_begins_where_there_is_no_run(model_folder: Path, conversations: Path, tmp_path: Path):
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "new", **{**AUTO, "train__steps": 2}))
    assert [line["step"] for line in scenarios.read_metrics(tmp_path / "new")] == [1, 2]


def test_run_killed_before_its_first_checkpoint_begins_anew(resume, killed: Path):
    shutil.rmtree(killed / "checkpoints")
    assert [line["step"] for line in resume()] == [1, 2, 3, 4, 5, 6]


def test_damaged_checkpoint_is_passed_over_by_name_and_the_one_before_it_taken(
    resume, killed: Path, capsys: pytest.CaptureFixture[str]
):
    flip_a_byte(killed / "checkpoints" / "step-00000004")
    assert [line["step"] for line in resume()] == [1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().out
    assert "step-00000004/rank-00000-of-00001.safetensors is damaged" in said
    assert "resuming after step 2" in said


def test_incomplete_checkpoint_is_passed_over_by_name(resume, killed: Path, capsys: pytest.CaptureFixture[str]):
    (killed / "checkpoints" / "step-00000004" / "manifest.json").unlink()
    resume()
    said = capsys.readouterr().out
    assert "step-00000004 is not a complete checkpoint" in said
    assert "resuming after step 2" in said


def test_nothing_is_lost_where_no_checkpoint_can_be_used(resume, killed: Path, no_weights: None):
    for step in (2, 4):
        flip_a_byte(killed / "checkpoints" / f"step-0000000{step}")
    kept = {path.name for path in killed.rglob("*")}
    with pytest.raises(InputError, match=r"No checkpoint in .* can be used") as error:
        resume()
    assert sum("is damaged" in problem for problem in error.value.problems) == 2
    for step in (2, 4):
        (killed / "checkpoints" / f"step-0000000{step}" / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"No checkpoint in .* can be used"):
        resume()
    assert {path.name for path in killed.rglob("*")} == kept - {"manifest.json"}


def test_damaged_checkpoint_that_was_named_is_refused(resume, killed: Path, no_weights: None):
    path = killed / "checkpoints" / "step-00000004"
    flip_a_byte(path)
    with pytest.raises(InputError, match="is damaged"):
        resume(checkpoint__resume=str(path))


def flip_a_byte(path: Path) -> None:
    file = path / "rank-00000-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train__seed": 1}, "train.seed was 0 in .* is 1 now: the row order would differ"),
        (
            {"train__global_batch_size": 4, "train__micro_batch_size": 4},
            "train.global_batch_size was 8 in .*its steps have other rows",
        ),
        ({"adapter__rank": 8}, "adapter.rank was 16 in .*finetune checkpoint export"),
        ({"adapter__targets": ["q_proj"]}, "adapter.targets was 'all-linear' in"),
        ({"data__packing": True}, "data.packing was False in"),
        (
            {"data__max_length": 32},
            r"rows changed since .*-00000004 was written \(data.max_length 64 -> 32: set it back",
        ),
        ({"train__optimizer": "sgd"}, r"cannot be converted; .*--checkpoint\.resume_weights_only true"),
        ({"train__steps": 3}, r"is at step 4, but the run has only 3 steps; raise train\.steps"),
        ({"train__overwrite": True}, r"train\.overwrite replaces a run, but checkpoint\.resume continues it"),
        ({"checkpoint__resume": "nowhere"}, "already contains a run"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_run_that_would_be_another_one_is_refused(resume, changes: dict[str, Any], told: str, no_weights: None):
    with pytest.raises(InputError, match=told):
        resume(**changes)


def test_other_rows_are_refused(resume, conversations: Path, tmp_path: Path, no_weights: None):
    lines = conversations.read_text().splitlines()
    lines[7] = lines[8]
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=r"data\.train: the training rows changed"):
        resume(data=other)


def test_another_tokenizer_or_base_is_refused(
    resume, killed: Path, model_folder: Path, tmp_path: Path, no_weights: None
):
    tokenizer = shutil.copytree(model_folder, tmp_path / "tokenizer")
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "NFC"}  # the same tokens for these rows, others for some
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="the tokenizer or its chat template changed"):
        resume(model__tokenizer=str(tokenizer))
    other = tiny.build_model_folder(tmp_path / "other", intermediate_size=96)
    with pytest.raises(InputError, match="the model changed since"):
        resume(model__path=str(other))


def test_weights_alone_go_on_with_another_optimizer_and_the_same_rows(resume, finished: Path):
    metrics = resume(train__optimizer="sgd", checkpoint__resume_weights_only=True)
    whole = scenarios.read_metrics(finished)
    assert [line["tokens"] for line in metrics] == [line["tokens"] for line in whole]
    assert metrics[4]["loss"] == whole[4]["loss"]  # the same weights
    assert metrics[5]["loss"] != whole[5]["loss"]


@pytest.mark.parametrize("optimizers", [("adamw", "adamw"), ("sgd", "adamw")])
def test_optimizer_is_reset_again_in_another_folder_and_for_another_optimizer(
    optimizers: tuple[str, str],
    model_folder: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """Though the run before was asked to reset its own."""
    before, after = optimizers
    again = {**AUTO, "checkpoint__resume_weights_only": True, "checkpoint__every": 1}
    first = again | {"train__steps": 2, "train__optimizer": before}
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "a", **first))
    again |= {"train__steps": 3, "train__optimizer": after}
    folder = tmp_path / "a" if before != after else tmp_path / "b"
    again |= {"checkpoint__resume": str(tmp_path / "a")} if before == after else {}
    sft.main(scenarios.configuration(model_folder, conversations, folder, **again))
    assert "the optimizer is reset, because" in capsys.readouterr().out


def test_checkpoint_of_another_folder_begins_records_of_its_own(
    finished: Path, model_folder: Path, conversations: Path, tmp_path: Path
):
    path = finished / "checkpoints" / "step-00000004"
    changes = {**AUTO, "adapter__type": "lora", "checkpoint__resume": str(path)}
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "branch", **changes))
    assert [line["step"] for line in scenarios.read_metrics(tmp_path / "branch")] == [5, 6]


def test_second_run_in_a_folder_is_refused_while_the_first_is_at_work(
    model_folder: Path, conversations: Path, tmp_path: Path, no_weights: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoint, "hold", functools.partial(checkpoint.hold, patience_seconds=0.1))
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run")
    with checkpoint.hold(tmp_path / "run"), pytest.raises(InputError, match=r"another run is using"):
        sft.main(config)


def test_disk_without_room_for_the_checkpoints_is_told_before_training(
    model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(checkpoint.looking.shutil, "disk_usage", lambda path: usage)
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **EVERY)
    with pytest.raises(InputError, match=r"3 checkpoints of 0\.00 GiB must fit in .*lower checkpoint\.keep"):
        sft.main(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    few = {**EVERY, "checkpoint__every": 0}
    with pytest.raises(InputError, match=r"1 checkpoint of 0\.00 GiB must fit in .*--checkpoint\.at_end false"):
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **few))
    few["checkpoint__at_end"] = False
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **few))


def steps_saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_going_on_from_an_older_checkpoint_leaves_the_later_ones_behind_and_keeps_its_own(
    finished: Path, model_folder: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = shutil.copytree(finished, tmp_path / "run")
    older = str(folder / "checkpoints" / "step-00000002")
    changes = {**AUTO, "adapter__type": "lora", "checkpoint__resume": older, "checkpoint__every": 1}
    changes |= {"checkpoint__keep": 1, "train__learning_rate": 5e-4}
    sft.main(scenarios.configuration(model_folder, conversations, folder, **changes))
    assert steps_saved(folder) == ["step-00000004.left-behind-1", "step-00000006", "step-00000006.left-behind-1"]
    assert "step-00000004.left-behind-1 is from a later step" in capsys.readouterr().out
    assert checkpoint.newest(folder)[0].contents["run"]["config"]["train"]["learning_rate"] == 5e-4
    assert [line["step"] for line in scenarios.read_metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_result_of_the_run_that_was_replaced_does_not_finish_the_new_one(
    finished: Path, model_folder: Path, conversations: Path, tmp_path: Path
):
    folder = shutil.copytree(finished, tmp_path / "run")
    settings = {"adapter__type": "lora", **EVERY, "train__seed": 7}
    config = scenarios.configuration(model_folder, conversations, folder, **settings, train__max_bad_steps=1)
    config = config.model_copy(update={"train": config.train.model_copy(update={"overwrite": True})})
    original, calls = loss.token_loss_sum, iter(range(1000))
    loss.token_loss_sum = lambda logits, tokens: original(logits, tokens) * (1 if next(calls) < 4 else float("nan"))
    try:
        with pytest.raises(RunStopped, match=r"to resume after step 2"):
            sft.main(config)
    finally:
        loss.token_loss_sum = original
    assert steps_saved(folder) == ["step-00000002"]
    assert finished_steps(folder) == 0
    sft.main(scenarios.configuration(model_folder, conversations, folder, **{**AUTO, **settings}))
    assert finished_steps(folder) == 6
    assert [line["step"] for line in scenarios.read_metrics(folder)] == [1, 2, 3, 4, 5, 6]


def test_checkpoint_of_another_folder_does_not_replace_a_run(resume, finished: Path, killed: Path, no_weights: None):
    before = {path: path.stat().st_mtime_ns for path in killed.rglob("*")}
    with pytest.raises(InputError, match="already contains a run"):
        resume(checkpoint__resume=str(finished / "checkpoints" / "step-00000002"))
    assert {path: path.stat().st_mtime_ns for path in killed.rglob("*")} == before


def test_checkpoints_on_another_disk_behind_a_link_are_the_runs_own(resume, killed: Path, tmp_path: Path):
    (killed / "checkpoints").rename(tmp_path / "large-disk")
    (killed / "checkpoints").symlink_to(tmp_path / "large-disk")
    assert [line["step"] for line in resume()] == [1, 2, 3, 4, 5, 6]
    assert steps_saved(killed)[-1] == "step-00000006"


def test_checkpoints_that_are_links_each_are_refused_and_stay(resume, killed: Path, tmp_path: Path, no_weights: None):
    newest = killed / "checkpoints" / "step-00000004"
    newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="step-00000004 is a link, and a run writes and removes"):
        resume()
    assert newest.is_symlink()
    assert len((killed / "metrics.jsonl").read_text().splitlines()) == 6


def test_checkpoint_that_was_renamed_is_not_deleted(resume, killed: Path):
    shutil.rmtree(killed / "checkpoints" / "step-00000002")
    (killed / "checkpoints" / "step-00000004").rename(killed / "checkpoints" / "step-00000004-good")
    assert [line["step"] for line in resume()] == [1, 2, 3, 4, 5, 6]
    assert "step-00000004-good" in steps_saved(killed)


def test_checkpoint_before_the_first_optimizer_step_can_be_resumed(
    model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    changes = {**EVERY, "checkpoint__every": 1, "train__max_bad_steps": 2, "train__micro_batch_size": 8}
    original = loss.token_loss_sum

    def spoil(factors: list[float]) -> None:
        left = iter(factors)
        monkeypatch.setattr(loss, "token_loss_sum", lambda logits, tokens: original(logits, tokens) * next(left))

    spoil([1, float("nan"), float("nan")])
    with pytest.raises(RunStopped, match="to resume after step 1"):
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes))
    spoil([1, 1, 1, 1, 1, 1])
    changes["checkpoint__resume"] = "auto"
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes))
    assert [line.get("bad_steps") for line in scenarios.read_metrics(tmp_path / "run")] == [1, *[None] * 5]


def test_weights_alone_are_taken_once_and_later_restarts_go_on_with_the_optimizer(
    resume, killed: Path, capsys: pytest.CaptureFixture[str]
):
    new = {"train__optimizer": "adafactor", "checkpoint__resume_weights_only": True}
    resume(**new)
    assert "the optimizer is reset" in capsys.readouterr().out
    expected = scenarios.read_metrics(killed)
    shutil.rmtree(killed / "final")
    metrics = resume(**new, train__steps=8)
    assert "the optimizer is reset" not in capsys.readouterr().out
    assert metrics[:6] == expected


def test_other_packs_of_the_same_rows_are_refused(model_folder: Path, conversations: Path, tmp_path: Path):
    packed = {**EVERY, "data__packing": True, "data__max_length": 128, "train__global_batch_size": 2}
    packed["train__micro_batch_size"] = 2
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **packed))
    shutil.rmtree(tmp_path / "run" / "final")
    longer = {**packed, "checkpoint__resume": "auto", "data__max_length": 256}
    with pytest.raises(InputError, match=r"data\.train: the training rows changed"):
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **longer))


def test_streamed_rows_with_other_masks_are_refused(model_folder: Path, conversations: Path, tmp_path: Path):
    streamed = {**EVERY, "data__streaming": True}
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **streamed))
    shutil.rmtree(tmp_path / "run" / "final")
    others = {**streamed, "checkpoint__resume": "auto", "data__train_on": "all"}
    with pytest.raises(InputError, match=r"data\.train: the training rows changed"):
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **others))


def test_base_with_other_weights_or_another_configuration_is_another_model(weights_folder: Path, tmp_path: Path):
    def identity(folder: Path, *, weights: bool = True) -> str:
        return loading.identity(str(folder), revision=None, weights=weights)

    same = shutil.copytree(weights_folder, tmp_path / "same")
    assert identity(same) == identity(weights_folder)
    other = shutil.copytree(weights_folder, tmp_path / "other")
    weights = {name: tensor * 1.5 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert (other / "model.safetensors").stat().st_size == (same / "model.safetensors").stat().st_size
    assert identity(other) != identity(same)
    assert identity(other, weights=False) == identity(same, weights=False)
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert identity(same, weights=False) != identity(other, weights=False)


def test_adapter_is_not_resumed_in_another_precision(resume, monkeypatch: pytest.MonkeyPatch, no_weights: None):
    before = distributed.Strategy.from_environment().mixed_precision
    after = "no" if before == "bf16" else "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", after)
    with pytest.raises(InputError, match=f"mixed precision {before}.* launch with --mixed_precision {before}"):
        resume()


def test_records_that_a_power_loss_has_damaged_are_mended(killed: Path, resume, capsys: pytest.CaptureFixture[str]):
    lines = (killed / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    others = b'12\nnull\n["a"]\n{"loss": 1}\n{"step": "3"}\n{"step": true}\n' + b"[" * 10**5 + b"\n"
    damage = b"\0" * 40 + b"\n" + b"\0" * 41 + b"\n" + b"1\0\0\0\n" + others + b"\xff{}\n"
    (killed / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + damage + lines[3])
    (killed / "run.yaml").write_bytes(b"\0" * 512)
    assert [line["step"] for line in resume()] == [1, 2, 4, 5, 6]
    said = capsys.readouterr().out
    assert "metrics.jsonl: 11 lines could not be read and were dropped" in said
    assert "run.yaml could not be read and is rewritten" in said
    assert finished_steps(killed) == 6


def test_link_in_the_place_of_an_earlier_result_is_left_aside(
    killed: Path, tmp_path: Path, resume, capsys: pytest.CaptureFixture[str]
):
    (killed / "final").mkdir()
    (tmp_path / "mine").mkdir()
    (killed / "final.old").symlink_to(tmp_path / "mine")
    resume()
    assert "final.old is a link, not a result; it was renamed to final.old.left-behind-1" in capsys.readouterr().out
    assert finished_steps(killed) == 6


def test_lines_wait_while_their_folder_is_gone(tmp_path: Path):
    journal, path = run_files.Journal(tmp_path / "folder" / "lines.jsonl"), tmp_path / "folder" / "lines.jsonl"
    (problem,) = journal.append(["1"])
    assert "cannot be written (No such file or directory); its lines are kept in memory" in problem
    assert journal.append(["2"]) == []
    path.parent.mkdir()
    assert journal.append(["3"]) == []
    assert path.read_text() == "1\n2\n3\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def test_lines_are_added_whole_or_wait_while_a_disk_is_full(small_disk: Path):
    journal, path = run_files.Journal(small_disk / "lines.jsonl"), small_disk / "lines.jsonl"
    assert journal.append(["0" * 100]) == []
    fill(small_disk)
    (problem,) = journal.append(["1" * 20_000])
    assert "No space left on device" in problem
    assert path.read_text() == "0" * 100 + "\n"
    (small_disk / "filler").unlink()
    assert journal.append(["2"]) == []
    assert path.read_text().split() == ["0" * 100, "1" * 20_000, "2"]


def test_disk_that_is_full_for_a_while_costs_a_checkpoint_and_neither_the_run_nor_a_line(
    small_disk: Path,
    model_folder: Path,
    conversations: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    original = batches.Batches.step

    def step(work: Any, number: int) -> Any:
        if number == 3:
            fill(small_disk)
        if number == 6:
            (small_disk / "filler").unlink()
        return original(work, number)

    monkeypatch.setattr(batches.Batches, "step", step)
    run = small_disk / "run"
    sft.main(scenarios.configuration(model_folder, conversations, run, **{**EVERY, "train__steps": 8}))
    said = capsys.readouterr().out
    assert "step-00000004 was not written" in said
    assert "Earlier checkpoints stay, and training continues" in said
    assert steps_saved(run)[-2:] == ["step-00000006", "step-00000008"]
    assert "step-00000004" not in steps_saved(run)
    assert [line["step"] for line in scenarios.read_metrics(run)] == list(range(1, 9))
    assert finished_steps(run) == 8


def test_result_that_cannot_be_written_is_said_with_where_to_go_on(
    small_disk: Path, model_folder: Path, conversations: Path, monkeypatch: pytest.MonkeyPatch
):
    original = result.write

    def save(*arguments: Any, **manner: Any) -> None:
        fill(small_disk)
        original(*arguments, **manner)

    monkeypatch.setattr(result, "write", save)
    settings = {**EVERY, "train__steps": 2}
    with pytest.raises(RunStopped, match=r"final could not be written .*--checkpoint\.resume auto"):
        sft.main(scenarios.configuration(model_folder, conversations, small_disk / "run", **settings))
    (small_disk / "filler").unlink()
    monkeypatch.setattr(result, "write", original)
    settings["checkpoint__resume"] = "auto"
    sft.main(scenarios.configuration(model_folder, conversations, small_disk / "run", **settings))
    assert finished_steps(small_disk / "run") == 2
    assert not (small_disk / "run" / "final.tmp").exists()


def test_checkpoint_on_another_disk_behind_a_link_can_be_named(resume, killed: Path, tmp_path: Path):
    (killed / "checkpoints").rename(tmp_path / "large-disk")
    (killed / "checkpoints").symlink_to(tmp_path / "large-disk")
    lines = resume(checkpoint__resume=str(killed / "checkpoints" / "step-00000002"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_checkpoints_that_are_left_behind_are_no_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("step-00000002", "step-00000004", "step-00000003.left-behind-1", "step-00000005.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "file").write_bytes(bytes(100))
    usage = shutil.disk_usage(tmp_path)._replace(free=50)
    monkeypatch.setattr(checkpoint.looking.shutil, "disk_usage", lambda path: usage)

    def has_room(size: int, **how: Any) -> bool:
        return checkpoint.room_problems(tmp_path, size, at_once=1, **how) == []

    (tmp_path / "final.tmp").mkdir()  # of an end whose disk was full, and written anew
    (tmp_path / "final.tmp" / "file").write_bytes(bytes(100))
    assert has_room(450)
    assert not has_room(451)
    (tmp_path / "final.tmp").rename(tmp_path / "final.old")  # there until the new one is complete
    assert has_room(350)
    assert not has_room(351)
    assert has_room(250, resumed_step=3)
    assert not has_room(251, resumed_step=3)
    assert has_room(200, resumed_step=2, result_bytes=50)
    assert not has_room(200, resumed_step=2, result_bytes=51)
    (told,) = checkpoint.room_problems(tmp_path, 2**40, at_once=0, result_bytes=2**40)
    assert "final/ of 1024.00 GiB must fit in" in told


@pytest.mark.parametrize("where", ["checkpoint.resuming.leave_later_behind", "output.run_files.go_back_to"])
def test_run_that_is_killed_while_it_goes_back_keeps_every_line(
    where: str, resume, killed: Path, monkeypatch: pytest.MonkeyPatch
):
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"finetune.{where}", die)
        with pytest.raises(KeyboardInterrupt):
            resume(checkpoint__resume=str(killed / "checkpoints" / "step-00000002"))
    assert [line["step"] for line in resume()] == [1, 2, 3, 4, 5, 6]


def test_what_a_run_chose_is_no_change_of_its_configuration(
    model_folder: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(session, "plan_of", sizes.plan_of)
    for _ in range(2):
        changes = {**AUTO, "train__steps": 1, "train__activation_checkpointing": "auto"}
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes))
    printed = capsys.readouterr().out
    assert "is finished" in printed
    assert "which nothing was trained with" not in printed


def test_a_setting_that_becomes_auto_is_told_but_for_what_a_record_has_as_it_was_chosen():
    before = {"train": {"micro_batch_size": 4}, "model": {"attention": "eager"}, "data": {"train_think": "never"}}
    now = {"train": {"micro_batch_size": "auto"}, "model": {"attention": "auto"}, "data": {"train_think": "auto"}}
    assert resuming.changes(before, now) == [
        "changed since then: model.attention eager -> auto",
        "changed since then: data.train_think never -> auto",
    ]


def test_weights_of_no_checkpoint_are_refused(resume, no_weights: None):
    with pytest.raises(InputError, match=r"checkpoint\.resume_weights_only takes weights from a checkpoint, but"):
        resume(checkpoint__resume="none", checkpoint__resume_weights_only=True)


def test_process_that_its_launcher_restarts_before_it_saved_begins_from_the_checkpoint_that_was_named(
    finished: Path, model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    launch = distributed.Strategy("single", 0, 1, 1, "no", True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    named = {**AUTO, "adapter__type": "lora", "checkpoint__resume": str(finished)}
    (tmp_path / "run").mkdir()
    run_files.write_run(tmp_path / "run", {"id": "mine", "launcher": distributed.launcher_of(launch)})
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **named)
    restarted = preflight.as_restarted(config, launch)
    assert restarted.checkpoint.resume == str(finished)
    assert preflight.folder_problems(restarted) == []  # its own records are no other run's
    shutil.copytree(finished / "checkpoints", tmp_path / "run" / "checkpoints")
    (*_, last) = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if path != last:
            shutil.rmtree(path)
    for name in (last, last.with_name(f"{last.name}.tmp")):  # complete, and killed before it had its name
        last = last.rename(name)
        restarted = preflight.as_restarted(config, launch)
        assert (restarted.checkpoint.resume, restarted.train.overwrite) == ("auto", False)


def test_model_of_the_hub_is_another_one_by_its_files_and_not_by_its_readme(
    weights_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commits = {}
    for name, config in (("a", {}), ("b", {}), ("c", {"rms_norm_eps": 0.1})):
        commits[name] = shutil.copytree(weights_folder, tmp_path / name)
        known = json.loads((commits[name] / "config.json").read_text())
        (commits[name] / "config.json").write_text(json.dumps(known | config))
    monkeypatch.setattr(loading, "cached_file", lambda path, name, revision: str(commits[revision] / name))
    monkeypatch.setattr(
        loading, "weight_files_of", lambda path, revision: local_files(commits.get(revision, Path(path)))
    )
    (commits["b"] / "consolidated.safetensors").write_bytes(b"which the whole repository has beside the model")
    a, b, c = (loading.identity("owner/model", revision=name, weights=True) for name in "abc")
    assert a == b == loading.identity(str(weights_folder), revision=None, weights=True)
    assert a != c
