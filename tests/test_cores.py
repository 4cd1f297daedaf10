"""Threads: as many as the user says, else as many as the cores that a process may use."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch

from finetune.distributed import Strategy, setup
from finetune.hardware import cores

V1 = "11:memory:/job\n4:cpu,cpuacct:/job/step\n1:cpuset:/\n0::/\n"
V2 = "0::/job/step\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("memberships", "files", "quota"),
    [
        (V2, {"job/step/cpu.max": "150000 100000"}, 1.5),
        (V2, {"job/step/cpu.max": "max 100000", "job/cpu.max": "400000 100000"}, 4),
        (V2, {"job/step/cpu.max": "max 100000"}, math.inf),
        (V2, {"cpu.max": "200000 100000"}, 2),  # a container that sees the path of the host
        (V1, {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        (V1, {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, math.inf),
        (V1, {}, math.inf),
    ],
)
def test_quota_is_the_smallest_of_the_groups_above_a_process(
    memberships: str, files: dict[str, str], quota: float, tmp_path: Path
):
    write(tmp_path, files)
    assert cores.quota_of(memberships, tmp_path) == quota


@pytest.mark.skipif(sys.platform != "linux", reason="affinity and quota are read on Linux only")
def test_affinity_and_quota_both_limit_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cores, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert cores.usable() == 6
    for name, text in {"cpu.max": "250000 100000", "cpu/cpu.cfs_quota_us": "250000"}.items():
        write(tmp_path, {name: text, "cpu/cpu.cfs_period_us": "100000"})
    assert cores.usable() == 2
    write(tmp_path, {"cpu.max": "50000 100000", "cpu/cpu.cfs_quota_us": "50000"})
    assert cores.usable() == 1


@pytest.mark.parametrize(
    ("environment", "threads"),
    [({}, 6), ({"LOCAL_WORLD_SIZE": "4"}, 1), ({"LOCAL_WORLD_SIZE": "2"}, 3), ({"OMP_NUM_THREADS": "1"}, None)],
)
def test_processes_share_the_usable_cores_unless_the_user_says_how_many_threads(
    environment: dict[str, str], threads: int | None, monkeypatch: pytest.MonkeyPatch
):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(cores, "usable", lambda: 6)
    setup.share_cores(Strategy("ddp", 0, 1, 1, "no", rehearsal=True))
    assert told == ([] if threads is None else [threads])
