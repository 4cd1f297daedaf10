"""A run that an earlier version began goes on under this one. The checkpoint in tests/data is that version's own."""

import json
import shutil
from pathlib import Path

import pytest
from scenarios import configuration, read_metrics

from recipes import sft

STARTED = Path(__file__).parent / "data" / "started_before"
"""A LoRA run with dropout, in fp32, ended after step 2 of 4; what it measured when it was not ended."""


def test_a_run_of_an_earlier_version_is_resumed_as_if_it_had_not_been_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(STARTED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    changes = {"adapter__type": "lora", "adapter__rank": 4, "adapter__dropout": 0.1, "checkpoint__every": 2}
    config = configuration(
        Path("model"),
        Path("train.jsonl"),
        Path("run"),
        train__steps=4,
        train__overwrite=False,
        checkpoint__keep=2,
        checkpoint__resume="auto",
        **changes,
    )
    sft.main(config)
    expected = [json.loads(line) for line in Path("expected_metrics.jsonl").read_text().splitlines()]
    found = read_metrics(Path("run"))
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert found[:2] == expected[:2]  # lines of the earlier version stay as they are
    for now, then in zip(found[2:], expected[2:]):
        # rows of a step are dealt out otherwise since, and dropout falls on others: a step changes the loss by 3e-3
        for key, tolerance in (("loss", 1e-4), ("grad_norm", 5e-2), ("learning_rate", 1e-9)):
            assert now[key] == pytest.approx(then[key], rel=tolerance)
