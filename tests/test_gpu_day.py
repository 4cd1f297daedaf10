"""What waits for a GPU: one of its parts runs in small on a CPU."""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def gpu_day(folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu_day.sh"), str(folder), *parts],
        env=os.environ | {"REHEARSAL": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_part_that_fails_ends_no_other_and_each_leaves_its_results_at_once(tmp_path: Path):
    """Of those that measure steps one of each kind: the others differ from them by names."""
    result = gpu_day(tmp_path, "no_such_part", "full_8b_8bit", "fp8_8b")
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "failed: no_such_part"
    assert "there are: tests fp8_8b" in (tmp_path / "no_such_part.log").read_text()
    record, *others = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()]
    assert (record.get("error"), record["method"], record["optimizer"]) == (None, "full", "adamw_8bit")
    assert [each["peer"] for each in others] == ["recipe", "fp8"]
    assert all(each["tokens_per_second"] > 0 for each in (record, *others))


def test_a_machine_without_a_gpu_is_told_before_anything_is_measured(tmp_path: Path):
    command = ["bash", str(ROOT / "benchmarks" / "gpu_day.sh"), str(tmp_path)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 2
    assert "PyTorch reaches no GPU here" in result.stdout
    assert not list(tmp_path.iterdir())
