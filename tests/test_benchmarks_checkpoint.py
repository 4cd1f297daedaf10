"""The benchmarks of checkpoints: their tables count right, and their bounds break when they should."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config

from benchmarks import checkpoint_speed as speed
from benchmarks import kills
from finetune.models import loading

KEYS = ("save_seconds", "second_save_seconds", "second_stall_seconds", "restore_seconds", "stall_seconds")
BYTES = ("own_bytes", "save_bytes", "restore_bytes")


def measured(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, Any]:
    return {"summary": {"ddp, 2": speed.summary([ours], [theirs])}}


def run(seconds: float, own: float = 2**30, more: float = 2**30) -> dict[str, float]:
    return dict.fromkeys(KEYS, seconds) | dict(zip(BYTES, (own, more, more)))


@given(ours=st.floats(0.1, 100), theirs=st.floats(0.1, 100))
def test_time_that_is_longer_than_accelerates_is_told_and_no_other(ours: float, theirs: float):
    told = speed.broken_bounds(measured(run(ours), run(theirs)))
    assert len(told) == (4 if ours / theirs > speed.SLOWER else 0)


@given(own=st.integers(2**20, 2**34), beside=st.integers(0, 2**30))
def test_memory_beyond_the_own_share_is_told(own: int, beside: int):
    told = speed.broken_bounds(measured(run(1.0, own, own + beside), run(2.0)))
    assert len(told) == (2 if beside > speed.BESIDE else 0)


def test_medians_of_several_runs_are_compared():
    found = speed.summary([run(1.0), run(2.0), run(30.0)], [run(4.0), run(8.0), run(1.0)])
    assert found[speed.OURS]["save_seconds"] == 2.0
    assert found["times_theirs"]["restore_seconds"] == 0.5


def test_run_is_its_slowest_process_and_refused_if_something_else_was_restored():
    memory = {"resident_bytes": 1, "anonymous_bytes": 1}
    parts = [
        {"runs": [{"seconds": s, "part_seconds": 0.0} | memory] * 2, "own_bytes": 8, "sums": [1.5]} for s in (1, 3)
    ]
    assert speed.together(parts, parts)["save_seconds"] == 3
    with pytest.raises(RuntimeError, match="not what was saved"):
        speed.together(parts, [parts[0], parts[1] | {"sums": [2.5]}])


def test_model_has_as_many_weights_as_it_says():
    bare = loading.without_weights(Qwen2Config(**speed.SHAPE), trust_remote_code=False)
    assert speed.weights_of(speed.SHAPE) == sum(weight.numel() for weight in bare.parameters())
    assert 0.49e9 < speed.weights_of(speed.SHAPE) < 0.5e9


def test_want_of_room_is_told(tmp_path: Path):
    assert speed.room_problems(tmp_path, 1) == []
    told = speed.room_problems(tmp_path, 2**60)
    assert len(told) == 2
    assert all("fewer --layers" in sentence for sentence in told)


def test_table_of_speed_has_a_line_for_each_and_their_ratio():
    lines = speed.table(measured(run(1.0), run(4.0))).splitlines()
    assert [line.count("|") for line in lines] == [10] * 5
    assert lines[-1].count("0.25") == 4


def test_every_kill_stands_once_in_the_table():
    draw = ["SIGKILL to one rank", "SIGTERM to launcher", "SIGKILL to one rank"]
    records = [
        {"kill": kill, "phase": phase, "gone_seconds": float(seconds), "strategy": "ddp", "processes": 2}
        for seconds, (kill, phase) in enumerate(zip(draw, kills.PHASES))
    ]
    lines = kills.table(records).splitlines()
    assert lines[2:] == [
        "| SIGKILL to one rank | 1 | 0 | 1 | 0 | 2 | 2.0 |",
        "| SIGTERM to launcher | 0 | 1 | 0 | 0 | 1 | 1.0 |",
        "| all | 1 | 1 | 1 | 0 | 3 | 2.0 |",
    ]
    assert kills.by_launch(records) == {"ddp x 2": 3}
