"""Steps are traced once, remembered, and told apart; what cannot be traced is said in a sentence, and stops nothing."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scenarios

from finetune import forked_workers
from finetune.errors import InputError, RunStopped
from finetune.models.loading import config_from
from finetune.planner.model import Model
from finetune.run import session, sizes
from finetune.shipped import shipped_files
from finetune.trace import asking, serving
from finetune.trace import tracer as tracer_module
from finetune.trace.setting import Setting
from finetune.trace.tracer import Tracer, versions
from recipes import sft

pytestmark = pytest.mark.planned

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 203,
    "max_position_embeddings": 512,
}
LORA = Setting(adapter="lora", row_tokens=100)


def peak(tracer: Tracer, setting: Setting = LORA) -> int:
    with tracer:
        return Model(TINY, tracer).memory(setting).peak


def counted(folder: Path, row_tokens: int = 100) -> tuple[Tracer, list[int]]:
    """A tracer, and how many answers were asked for, each time."""
    asked: list[int] = []
    return Tracer(
        TINY, row_tokens=row_tokens, folder=folder, on_progress=lambda done, of: None if done else asked.append(of)
    ), asked


def test_what_is_traced_once_is_known_to_every_later_tracer(tmp_path: Path):
    tracer, asked = counted(tmp_path)
    first = peak(tracer)
    assert asked == [1, 2], "the anatomy, and two depths"
    for setting, is_alike in (
        (LORA, True),
        (replace(LORA, precision="fp16"), True),
        (replace(LORA, micro_batch_size=3, row_tokens=50, accumulation=7), False),
    ):
        again, asked = counted(tmp_path)
        assert (peak(again, setting) == first) == is_alike
        assert asked == []


def test_another_setting_model_or_row_is_traced_by_itself(tmp_path: Path):
    tracer, _ = counted(tmp_path)
    peak(tracer)
    for row_tokens, setting in ((100, replace(LORA, rank=8)), (200, LORA)):
        tracer, asked = counted(tmp_path, row_tokens)
        peak(tracer, setting)
        assert asked == [2]
    tracer, asked = counted(tmp_path)
    tracer.model_config = TINY | {"tie_word_embeddings": True}  # of the same dimensions
    peak(tracer)
    assert asked == [1, 2]


def test_damaged_memory_is_traced_again(tmp_path: Path):
    tracer, _ = counted(tmp_path)
    first = peak(tracer)
    for file in tmp_path.glob("*.json"):
        file.write_text(file.read_text()[:-20])
    again, asked = counted(tmp_path)
    assert peak(again) == first
    assert sum(asked) == 3


def test_run_knows_what_was_planned_of_the_file_that_its_model_was_read_from(tmp_path: Path):
    """Transformers adds what the file leaves to defaults, and where it lay."""
    tracer, _ = counted(tmp_path)
    planned = peak(tracer)
    again, asked = counted(tmp_path)
    again.model_config = config_from(TINY).to_dict() | {"_name_or_path": "somewhere", "dtype": "bfloat16"}
    assert peak(again) == planned
    assert asked == [1], "the anatomy alone"


def test_old_traces_are_forgotten_when_others_are_made(tmp_path: Path):
    old, young = (tmp_path / f"{name}.json" for name in ("old", "young"))
    for file, days in ((old, tracer_module.KEPT_DAYS + 1), (young, tracer_module.KEPT_DAYS - 1)):
        file.write_text("{}")
        os.utime(file, (0, time.time() - days * 24 * 3600))
    tracer, _ = counted(tmp_path)
    peak(tracer)
    assert not old.exists()
    assert young.exists()


def test_several_questions_are_traced_in_one_round(tmp_path: Path):
    tracer, asked = counted(tmp_path)
    with tracer:
        model = Model(TINY, tracer)
        settings = [replace(LORA, rank=rank) for rank in (2, 4)]
        tracer.prepare(settings)
        found = [model.memory(each) for each in settings]
    assert asked == [1, 4]
    assert found[0].peak < found[1].peak


def test_child_answers_as_a_fork_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tracer, _ = counted(tmp_path / "fork")
    forked = peak(tracer)
    monkeypatch.setattr("finetune.trace.tracer.can_fork", lambda: False)
    monkeypatch.setattr(asking, "can_fork", lambda: False)
    asking.get_ready()
    (child,) = asking._waiting
    tracer, asked = counted(tmp_path / "child")
    assert peak(tracer) == forked
    assert asked == [1, 2]
    assert asking._waiting == [], "the child that was ready was asked"
    assert child.process.poll() is not None, "it ends with the tracer"


def test_child_that_dies_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("finetune.trace.tracer.can_fork", lambda: False)
    child = asking.Child()
    child.process.kill()
    monkeypatch.setattr("finetune.trace.tracer.take_child", lambda: child)
    tracer, _ = counted(tmp_path)
    with pytest.raises(RunStopped, match="process that traces the model ended with exit code -9"):
        peak(tracer)


def test_why_a_child_died_is_told_and_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "peft.py").write_text("raise ImportError('peft is half installed.')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    monkeypatch.setattr("finetune.trace.tracer.can_fork", lambda: False)
    tracer, _ = counted(tmp_path)
    with pytest.raises(RunStopped, match=r"exit code 1 \(ImportError: peft is half installed\); see finetune doctor"):
        peak(tracer)


def test_what_was_traced_under_a_strategy_file_is_not_known_under_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(shipped_files() / "accelerate_configs", tmp_path / "accelerate_configs")
    monkeypatch.setattr("finetune.trace.tracer.shipped_files", lambda: tmp_path)
    before = versions.__wrapped__()
    assert before == versions.__wrapped__()
    file = tmp_path / "accelerate_configs" / "fsdp2.yaml"
    file.write_text(file.read_text().replace("reshard_after_forward: true", "reshard_after_forward: false"))
    assert versions.__wrapped__() != before


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a new version")

    monkeypatch.setattr(serving, "_depth", fail)


@pytest.mark.usefixtures("broken")
def test_libraries_that_cannot_be_traced_are_told_and_nothing_is_remembered(tmp_path: Path):
    tracer, _ = counted(tmp_path)
    with pytest.raises(RunStopped, match=r"under single cannot be traced with the versions .* \(RuntimeError: a new"):
        peak(tracer)
    assert len(list(tmp_path.glob("*.json"))) == 1, "the anatomy alone"


@pytest.mark.usefixtures("broken")
def test_run_starts_without_a_plan_where_its_step_cannot_be_traced(
    model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", train__steps=1))
    assert "plan: none. The step under single cannot be traced" in capsys.readouterr().out
    with pytest.raises(InputError, match="auto lets the planner choose"):
        sft.main(
            scenarios.configuration(model_folder, conversations, tmp_path / "other", train__micro_batch_size="auto")
        )


def test_hanging_trace_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forked_workers, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(serving, "_depth", lambda *_: __import__("time").sleep(60))
    with serving.workers() as forks:
        answers = list(serving.answers_to({"what": "steps", "jobs": [[TINY, {}, {}]] * 3}, forks))
    assert sorted(each["number"] for each in answers) == [0, 1, 2]
    assert all("killed" in each["failed"] for each in answers)


def test_known_answer_imports_no_pytorch(tmp_path: Path):
    tracer, _ = counted(tmp_path)
    peak(tracer)
    ask = f"""
        import sys
        from pathlib import Path
        from finetune.planner.model import Model
        from finetune.trace.setting import Setting
        from finetune.trace.tracer import Tracer
        model = {TINY!r}
        with Tracer(model, row_tokens=100, folder=Path({str(tmp_path)!r})) as tracer:
            print(Model(model, tracer).memory(Setting(adapter="lora", row_tokens=100)).peak)
        assert not {{"torch", "transformers"}} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(ask)], capture_output=True, text=True, check=True)
    tracer, asked = counted(tmp_path)
    assert json.loads(done.stdout) == peak(tracer)
    assert asked == []


def _planned(config: Any) -> str:
    """What the recipe says of its plan, on a rank."""
    said = io.StringIO()
    planning = mock.patch.object(session, "plan_of", sizes.plan_of)
    with contextlib.redirect_stdout(said), planning:
        sft.main(config)
    return next((line for line in said.getvalue().splitlines() if line.startswith("plan:")), "plan: nothing")


def test_run_in_a_process_that_is_still_in_the_group_of_another_run_is_planned(
    ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    group = ranks(2)
    assert group.world_size == 2
    for strategy in ("ddp", "fsdp2", "zero3", "zero1"):
        config = scenarios.configuration(model_folder, conversations, tmp_path / strategy, train__steps=1)
        first, _ = group.run(_planned, config, strategy=strategy)
        assert first.startswith("plan: peak"), strategy


def test_a_process_that_has_traced_other_steps_traces_as_a_new_one():
    depths = [["zero3", "fsdp2", "zero2", "ddp", "zero3", "ddp"], ["ddp"], ["zero2"]]
    found: list[dict[str, Any]] = []
    for strategies in depths:
        settings = [replace(LORA, strategy=each, world_size=2) for each in strategies]
        jobs = [[TINY | {"num_hidden_layers": 2}, asdict(each), {"rows": 7, "row_tokens": 97}] for each in settings]
        with forked_workers.Workers(serving._answer, 1, prepare=serving._forget) as forks:
            found += forks.answers(jobs)
    assert [each.pop("number") for each in found] == [0, 1, 2, 3, 4, 5, 0, 0]
    assert all(list(each) == ["depth"] for each in found)
    assert found[4] == found[0]
    assert found[5] == found[3] == found[6]
    assert found[7] == found[2]


def do(job: list[Any]) -> dict[str, Any]:
    """A job that tells which process did it, or fails."""
    return {"failed": "so"} if job == ["fail"] else {"by": os.getpid()}


def test_a_worker_that_is_killed_within_its_answer_has_failed():
    worker = forked_workers.Worker.__new__(forked_workers.Worker)
    worker.pipe, there = connection.Pipe()
    os.write(there.fileno(), b"\x00\x00\x00\x10{")  # one byte of 16
    there.close()
    assert worker.answer() == {"failed": "its process was killed"}


def test_a_worker_does_one_job_after_another_until_one_fails():
    with forked_workers.Workers(do, 1) as forks:
        answers = list(forks.answers([[1], [2], ["fail"], [3]]))
        later = list(forks.answers([[4]]))
    pids = [each.get("by") for each in answers]
    assert pids[0] == pids[1] != pids[3]
    assert later[0]["by"] == pids[3]
    assert answers[2] == {"number": 2, "failed": "so"}
    assert os.getpid() not in pids
    with pytest.raises(ProcessLookupError):
        os.kill(pids[3], 0)  # it ended with its context


def test_a_worker_that_is_killed_between_its_jobs_is_replaced():
    with forked_workers.Workers(do, 1) as forks:
        (first,) = forks.answers([[1]])
        os.kill(first["by"], signal.SIGKILL)
        os.waitid(os.P_PID, first["by"], os.WEXITED | os.WNOWAIT)
        (second,) = forks.answers([[2]])
    assert second["by"] not in (first["by"], os.getpid())
