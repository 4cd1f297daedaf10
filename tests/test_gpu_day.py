"""What waits for a GPU: two of its parts run in small on a CPU."""

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


def test_each_part_leaves_its_results_at_once_and_one_that_fails_ends_no_other(tmp_path: Path):
    """Of the five that measure steps two: the others differ from them by names."""
    result = gpu_day(tmp_path, "lora_8b", "no_such_part", "full_8b_8bit")
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "failed: no_such_part"
    assert "there are: tests lora_8b" in (tmp_path / "no_such_part.log").read_text()
    records = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()]
    assert [record.get("error") for record in records] == [None, None]
    assert [record["method"] for record in records] == ["lora", "full"]
    assert [record["optimizer"] for record in records] == ["adamw", "adamw_8bit"]
    assert all(record["tokens_per_second"] > 0 for record in records)
