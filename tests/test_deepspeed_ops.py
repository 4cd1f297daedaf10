"""DeepSpeed's C++ operations: a killed build leaves nothing behind that a later one waits for."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import scenarios
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import OpBuilder
from deepspeed.ops.op_builder.all_ops import ALL_OPS

from finetune.distributed import deepspeed_ops
from finetune.errors import InputError
from recipes import sft


class Builder:
    """Stands for DeepSpeed's builder of one operation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loads = 0

    def load(self, verbose: bool) -> None:
        self.loads += 1

    def is_compatible(self, verbose: bool) -> bool:
        return False


@pytest.fixture
def builders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Builder]:
    found: dict[str, Builder] = {}
    monkeypatch.setattr(
        type(get_accelerator()), "create_op_builder", lambda self, name: found.setdefault(name, Builder(name))
    )
    return found


def test_lock_of_a_killed_build_is_removed_and_other_operations_are_left_alone(
    builders: dict[str, Builder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for operation in ("CPUAdamBuilder", "SomebodyElse"):
        (tmp_path / operation).mkdir()
        (tmp_path / operation / "lock").touch()
    deepspeed_ops.build(cpu=True, offload=True, nvme=False)
    assert {name: builder.loads for name, builder in builders.items()} == {
        "ShareMemCommBuilder": 1,
        "CPUAdamBuilder": 1,
    }
    assert not (tmp_path / "CPUAdamBuilder" / "lock").exists()
    assert (tmp_path / "SomebodyElse" / "lock").exists()
    assert capsys.readouterr().out.count("Compiling DeepSpeed's") == 2


def test_no_operation_that_is_loaded_on_the_way_waits_for_a_killed_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """DeepSpeed's own builders, of which one loads another."""
    locks = {name: tmp_path / "py_cpu" / name / "lock" for name in ALL_OPS}
    for lock in locks.values():
        lock.parent.mkdir(parents=True)
        lock.touch()
    loaded: dict[str, bool] = {}
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "_deepspeed_pin_memory_op_module", None, raising=False)  # as in a new process
    monkeypatch.setattr(
        OpBuilder, "load", lambda self, verbose: loaded.setdefault(self.name, locks[self.name].exists())
    )
    deepspeed_ops.build(cpu=True, offload=True, nvme=True)
    assert loaded == dict.fromkeys(("deepspeed_shm_comm", "cpu_adam", "pin_memory", "async_io"), False)


def test_operations_that_were_built_are_loaded_without_a_word(
    builders: dict[str, Builder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "CPUAdamBuilder").mkdir()
    (tmp_path / "CPUAdamBuilder" / "CPUAdamBuilder.so").touch()
    deepspeed_ops.build(cpu=False, offload=True, nvme=False)
    assert builders["CPUAdamBuilder"].loads == 1
    assert capsys.readouterr().out == ""


def test_each_environment_builds_in_a_folder_of_its_own_unless_the_user_names_one(
    builders: dict[str, Builder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = []
    for environment in ("one", "two", "one"):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setattr(sys, "prefix", environment)
        deepspeed_ops.build(cpu=False, offload=True, nvme=False)
        folders.append(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    assert folders[0] == folders[2] != folders[1]
    assert all(folder.parent == tmp_path / "finetune" / "operations" and folder.is_dir() for folder in folders)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "named"))
    deepspeed_ops.build(cpu=False, offload=True, nvme=False)
    assert (tmp_path / "named").is_dir()


def test_nvme_offload_without_libaio_is_refused_with_what_to_install(
    builders: dict[str, Any], tmp_path: Path, model_folder: Path, conversations: Path, monkeypatch: pytest.MonkeyPatch
):
    for key, value in {"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "3", "MIXED_PRECISION": "no"}.items():
        monkeypatch.setenv(f"ACCELERATE_{key}", value)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme")
    with pytest.raises(InputError) as error:
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "out"))
    assert error.value.problems == [deepspeed_ops.NO_LIBAIO]
