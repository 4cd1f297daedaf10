"""`finetune doctor`: what is seen is told with what to do, and its exit code says whether training can start."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from finetune import hub_access
from finetune.cli import commands
from finetune.cli.doctor_verb import show
from finetune.cli.health import gpu_state, host_state, hub_state, installed_libraries
from finetune.cli.health.finding import Finding
from finetune.units import GIB

TESTED = {"torch": "2.13.0", "peft": "0.21.2"}


@pytest.mark.parametrize(
    ("installed", "state", "seen"),
    [
        ({}, "error", "not installed"),
        ({"torch": "2.9.1"}, "error", "2.9.1, needed is >=2.11"),
        ({"torch": "2.12.0"}, "warning", "2.12.0, tested is 2.13.0"),
    ],
)
def test_library_that_is_not_the_tested_one_is_named_with_the_command_that_installs_it(
    installed: dict[str, str], state: str, seen: str
):
    found, summary = installed_libraries.versions([Requirement("torch>=2.11")], installed, TESTED)
    assert (found.what, found.state, found.seen) == ("torch", state, seen)
    assert found.do.endswith('pip install --constraint constraints.txt "torch==2.13.0"')
    assert "as tested" not in summary.seen


def test_build_of_the_tested_version_counts_as_tested():
    required = [Requirement("torch>=2.11"), Requirement("peft>=0.21"), Requirement("pyyaml>=6")]
    installed = {"torch": "2.13.0+cu130", "peft": "0.21.2", "pyyaml": "6.0.3"}
    [summary] = installed_libraries.versions(required, installed, TESTED)
    assert summary == Finding("libraries", "ok", "torch 2.13.0+cu130, peft 0.21.2; all as tested")


def test_every_library_that_is_named_has_a_tested_version():
    assert installed_libraries.tested_versions().keys() >= {*installed_libraries.CORE}


def test_python_is_compared_with_those_that_the_constraints_are_for():
    states = [installed_libraries.python_version((3, minor)).state for minor in (9, 10, 12, 13)]
    assert states == ["error", "ok", "ok", "warning"]


def test_gpus_that_the_driver_lists_and_pytorch_cannot_use_are_an_error():
    assert gpu_state.without_gpu([], None).state == "warning"
    listed = ["NVIDIA H100 80GB HBM3, 535.104.05"] * 8
    without_cuda, old_driver = (gpu_state.without_gpu(listed, built_for) for built_for in (None, "13.0"))
    assert without_cuda.state == old_driver.state == "error"
    assert "the driver (535.104.05) lists 8 x NVIDIA H100 80GB HBM3" in old_driver.seen
    assert "built without CUDA" in without_cuda.seen
    assert "for CUDA 13.0" in old_driver.do


def test_links_between_gpus_are_told_apart():
    status = ["GPU 0: NVIDIA H100 (UUID: GPU-1)", "\t Link 0: 26.562 GB/s", "\t Link 1: 26.562 GB/s"]
    both = [*status, *(line.replace("GPU 0", "GPU 1") for line in status)]
    assert gpu_state.links(both, peers=True).seen == "NVLink, 2 links of 26.562 GB/s for each GPU"
    assert gpu_state.links(["GPU 0: NVIDIA L4"], peers=True).state == "ok"
    assert gpu_state.links([], peers=False).state == "warning"


def test_too_many_threads_and_too_few_cores_are_warned_of():
    assert host_state.threads(4, 8, "8", 0).do == "Unset OMP_NUM_THREADS, or set it to at most 4."
    assert host_state.threads(4, 8, None, 8).do.startswith("Allow at least 8 cores")
    assert host_state.threads(4, 8, "4", 4) == Finding("cores", "ok", "4 of 8 usable; OMP_NUM_THREADS is 4")


def test_full_disk_is_an_error(tmp_path: Path):
    states = [host_state.disk("disk here", tmp_path, free).state for free in (0, GIB, 100 * GIB)]
    assert states == ["error", "warning", "ok"]


def test_a_folder_of_the_name_of_an_owner_is_not_taken_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / hub_state.PUBLIC[0]).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_access, "_failure", lambda url, seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert [found.state for found in hub_state.examine()] == ["ok", "ok"]


def test_hub_that_cannot_be_reached_is_a_warning_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_access, "_failure", lambda url, seconds: OSError("name: not known"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    [found] = hub_state.examine()
    assert found.state == "warning"
    assert found.seen.startswith("The hub cannot be reached (name: not known)")
    assert found.do.startswith("Check the network")


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked at but the libraries, which say what a test wants."""
    for module in (gpu_state, host_state, hub_state):
        monkeypatch.setattr(module, "examine", lambda: iter(()))


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warning", 0), ("error", 1)])
def test_exit_code_is_1_only_where_training_cannot_start(
    state: str, code: int, only: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def examine() -> Iterator[Finding]:
        yield Finding("Python", state, "seen", "do")  # type: ignore[arg-type]

    monkeypatch.setattr(installed_libraries, "examine", examine)
    assert commands.main(["doctor", "--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["can_train"] == (code == 0)
    assert told["findings"] == [{"what": "Python", "state": state, "seen": "seen", "do": "do"}]


def test_table_is_at_most_80_columns_wide_and_keeps_every_word(capsys: pytest.CaptureFixture[str]):
    findings = [Finding("disk of caches", "warning", "a" * 100, "b " * 60), Finding("hub", "ok", "[answers]")]
    show(findings, Console(width=80, file=sys.stdout))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert (printed.count("a" * 5), printed.count(" b")) == (100 // 5, 60)
    assert "[answers]" in printed


@pytest.mark.slow
def test_machine_that_runs_these_tests_can_train():
    command = [sys.executable, "-m", "finetune.cli", "doctor"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "quantises to 4 bits" in done.stdout
    assert "Training can start" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
