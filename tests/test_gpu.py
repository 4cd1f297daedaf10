"""On a GPU: half precisions follow fp32, quantised kernels follow the CPU's, and memory and speed are reported."""

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
import yaml
from ranks import ROOT, STRATEGY_FILES

from benchmarks import plan_accuracy, step, step_report
from finetune.cli import commands
from finetune.cli.planning.machine import gpus_here
from recipes import sft

pytestmark = pytest.mark.planned

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_fp32_and_reports_the_gpu(
    precision: str, model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = {}
    for each in ("no", precision):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", each)
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / each))
        found[each] = scenarios.read_metrics(tmp_path / each)
    for key in ("loss", "grad_norm"):
        pairs = zip(found[precision], found["no"])
        assert max(abs(a[key] - b[key]) for a, b in pairs if a[key] is not None) < 2e-2
    assert found[precision][-1]["peak_memory_gib"] > 0


@pytest.mark.gpu
@on_a_gpu
def test_the_last_step_is_timed_like_the_others_though_it_is_read_at_once(
    model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", train__steps=8))
    seconds = [each["step_seconds"] for each in scenarios.read_metrics(tmp_path / "run")]
    assert min(seconds[2:]) > 0.3 * statistics.median(seconds[2:])


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit", "lion_8bit"])
@pytest.mark.parametrize("bits", ["none", 8, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_quantised_base_and_8_bit_optimizers_train_as_fp32_weights_and_adamw_do(
    precision: str,
    bits: Any,
    optimizer: str,
    weights_folder: Path,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: Any,
):
    found = {}
    rate = {"lion_8bit": 3e-4}.get(optimizer, 1e-3)
    for name, settings in {
        "exact": {"train__optimizer": "adamw"},
        "tried": {"train__optimizer": optimizer, "train__learning_rate": rate, "quantization__bits": bits},
    }.items():
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        config = scenarios.configuration(
            weights_folder, conversations, tmp_path / name, adapter__type="lora", **settings
        )
        sft.main(config)
        found[name] = scenarios.read_metrics(tmp_path / name)
    assert abs(found["tried"][0]["loss"] - found["exact"][0]["loss"]) < 5e-2
    assert found["tried"][-1]["loss"] < found["tried"][0]["loss"] - 0.1


@pytest.mark.gpu
@on_a_gpu
def test_paged_state_lies_in_memory_that_the_gpu_may_give_away():
    from finetune.optim.eight_bit import build_eight_bit_optimizer

    weight = torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda"))
    weight.grad = torch.ones_like(weight)
    groups = [{"params": [weight], "weight_decay": 0.0, "state_bits": 8}]
    optimizer = build_eight_bit_optimizer(
        groups, name="paged_adamw_8bit", learning_rate=1e-3, betas=(0.9, 0.999), rounding_seed=0
    )
    optimizer.step()
    (state,) = optimizer.state.values()
    assert state["state1"].is_paged
    assert state["state1"].dtype == torch.uint8
    assert torch.allclose(weight, torch.full_like(weight, -1e-3), atol=1e-6)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_offload", "zero2", "zero3"])
def test_4_bit_base_trains_under_sharding_on_one_gpu(
    strategy: str, weights_folder: Path, conversations: Path, tmp_path: Path
):
    command = [
        "accelerate",
        "launch",
        "--config_file",
        str(STRATEGY_FILES / f"{strategy}.yaml"),
        "--num_processes",
        "1",
    ]
    command += [str(ROOT / "recipes" / "sft.py"), "--model.path", str(weights_folder), "--quantization.bits", "4"]
    command += ["--adapter.type", "lora", "--data.train", str(conversations), "--train.steps", "4"]
    command += ["--train.output_dir", str(tmp_path / "run"), "--train.global_batch_size", "8"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(scenarios.read_metrics(tmp_path / "run")) == 4


@pytest.mark.gpu
@on_a_gpu
def test_8b_shape_trains_with_qlora_in_less_than_24_gb(tmp_path: Path):
    results = tmp_path / "step.jsonl"
    asked = ["--models", "Llama-3.1-8B", "--methods", "qlora", "--peers", "recomputed", "--packing"]
    asked += ["--max_length", "2048", "--rows", "1", "--micro_batch", "1", "--steps", "4", "--results", str(results)]
    assert step.main(asked) == 0
    [found] = step_report.recorded(results)
    assert found["peak_gib"] < 22


@pytest.mark.gpu
@on_a_gpu
def test_peak_of_small_runs_is_within_5_percent_of_the_prediction(tmp_path: Path):
    results = tmp_path / "found.json"
    chosen = ["SmolLM2-135M full fp32_master, kept", "SmolLM2-135M full fp32_master, recomputed"]
    chosen += ["TinyLlama-1.1B 4-bit", "Llama-3.2-1B 8-bit"]
    plan_accuracy.main(["--results", str(results), *(word for name in chosen for word in ("--only", name))])
    runs = json.loads(results.read_text())["runs"]
    assert len(runs) == 4
    for name, run in runs.items():
        if run["predicted"]["verdict"] == "fits":
            assert run["measured"]["outcome"] == "finished", name
            assert run["predicted"]["peak_gib"] == pytest.approx(run["measured"]["allocated_gib"], rel=0.05), name


@pytest.mark.gpu
@on_a_gpu
def test_auto_keys_are_chosen_by_the_plan_and_the_peak_stands_beside_it(
    model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    auto = {"train__micro_batch_size": "auto", "train__activation_checkpointing": "auto"}
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", train__steps=3, **auto))
    record = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert record["config"]["train"]["micro_batch_size"] in (1, 2, 4, 8)
    assert record["config"]["train"]["activation_checkpointing"] == "none"  # a tiny model fits anyway
    assert record["plan"]["peak_memory_gib"] > 0
    assert record["measured"]["peak_memory_gib"] > 0


@pytest.mark.gpu
@on_a_gpu
def test_probe_measures_what_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    configs = json.loads((Path(__file__).parent / "model_configs.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(configs["smollm2-135m"]["config"]))
    asked = ["--model", str(tmp_path), "--gpus", f"1x{gpus_here().gpu.name}", "--method", "full", "--probe", "--json"]
    assert commands.main(["plan", *asked]) == 0
    found = json.loads(capsys.readouterr().out)["probe"]
    assert found["predicted"]["peak_bytes"] == pytest.approx(found["measured"]["peak_bytes"], rel=0.05)
    assert found["measured"]["step_seconds"] > 0
    assert found["verdict"] == "fits"
