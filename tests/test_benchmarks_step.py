"""The benchmark of the step: every peer gets the same tokens, and a report shows what was measured."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step as benchmark
from benchmarks import step_report

CASE = {
    "model": "tiny",
    "method": "lora",
    "max_length": 256,
    "rows": 4,
    "micro_batch": 2,
    "steps": 3,
    "packing": False,
    "weights": "fp32_master",
    "optimizer": "adamw",
}


def run_of(peer: str, folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        patch.setattr("sys.stdin", io.StringIO(json.dumps(CASE | changes | {"peer": peer, "folder": str(folder)})))
        benchmark.work()
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_peers_train_the_same_tokens_on_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    benchmark.prepare(tmp_path, "tiny", documents=12, models=tmp_path)
    found = {peer: run_of(peer, tmp_path, capsys) for peer in ("recipe", "padded", "plain", "trainer")}
    tokens = [each["tokens"] for each in found.values()]
    assert all(each == tokens[0] for each in tokens)
    assert len(tokens[0]) == 3
    for each in found.values():
        assert each["tokens_per_second"] > 0
        assert each["tflops_per_second"] > 0
        assert each["peak_gib"] > 0.1
        assert {"torch", "transformers"} <= each["versions"].keys()


def measured(case: dict[str, Any], folder: Path, patience: int) -> dict[str, Any]:
    if case["peer"] == "trainer":
        return {"error": "ended with 1: too little memory"}
    speed = {"recipe": 200.0, "padded": 150.0}[case["peer"]]
    return {"tokens_per_second": speed, "peak_gib": 7.0, "tflops_per_second": 0.12}


def test_a_model_that_is_kept_is_drawn_once(tmp_path: Path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        benchmark.prepare(tmp_path / name, "tiny", documents=2, models=tmp_path / "models")
    first, second = ((tmp_path / name / "model" / "model.safetensors").stat() for name in ("first", "second"))
    assert first.st_size > 10_000
    assert (first.st_ino, first.st_mtime_ns) == (second.st_ino, second.st_mtime_ns)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny"]


def test_a_report_shows_the_newest_figures_beside_the_recipes_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(benchmark, "measured", measured)
    monkeypatch.setattr(benchmark, "prepare", lambda *_: None)
    results, chart = tmp_path / "step.jsonl", tmp_path / "step.svg"
    results.write_text(json.dumps(CASE | {"peer": "recipe", "tokens_per_second": 1.0}) + "\n")
    flags = ["--models", "tiny", "--methods", "lora", "--results", str(results), "--chart", str(chart)]
    flags += ["--peers", "recipe", "padded", "trainer", "--max_length", "256", "--rows", "4", "--micro_batch", "2"]
    assert benchmark.main([*flags, "--steps", "3"]) == 1  # one failed
    assert len(results.read_text().splitlines()) == 4
    capsys.readouterr()
    assert benchmark.main([*flags, "--report"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "0.75" in shown
    assert "too little memory" in shown
    assert chart.stat().st_size > 1000


def test_figures_of_one_device_are_not_compared_with_those_of_another():
    both = [CASE | {"peer": peer, "tokens_per_second": 10.0} for peer in ("recipe", "trl")]
    records = [each | {"device": device} for device in ("H200", "2 CPU threads") for each in both]
    records[0]["tokens_per_second"] = 40.0
    assert step_report.newest(records) == records
    assert [step_report.of_recipe(records, record) for record in records] == [40.0, 40.0, 10.0, 10.0]


def test_a_run_that_failed_is_told_until_its_case_is_measured():
    failed = CASE | {"peer": "trl", "error": "no answer within 150 seconds"}
    found = CASE | {"peer": "trl", "tokens_per_second": 10.0, "device": "H200"}
    assert step_report.newest([found, failed]) == [found, failed]
    assert step_report.newest([failed, found]) == [found]


def test_a_peer_that_is_not_installed_is_told_before_a_model_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(benchmark, "NEEDS", {"trl": ["no_such_package"]})
    assert benchmark.main(["--models", "Llama-3.1-8B", "--peers", "recipe", "trl"]) == 2
    assert "need no_such_package; install it" in capsys.readouterr().out
    assert "trl" not in benchmark.default_peers()
