"""Real ``accelerate launch`` runs, as a user starts them, on weights that are read from disk."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from parity import BF16_TOLERANCE
from safetensors.torch import load_file
from scenarios import read_metrics
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.config.strategy_names import SHARDED_PARTS, TOGETHER, has_stages, splits_layers

ROOT = Path(__file__).parent.parent
SINGLE = [("single", 1, "bf16"), pytest.param(("single", 1, "fp32"), marks=pytest.mark.prove)]
"""What the launches are compared with."""
KEPT = [("fsdp2", 2, "bf16")]
FURTHER = [
    ("zero3", 2, "fp32"),
    *(("hsdp", 4, "fp32"), ("ddp", 2, "fp32"), ("fsdp2", 2, "fp32"), ("fsdp2_offload", 1, "fp32")),
    *(("cp", 2, "fp32"), ("ulysses", 2, "bf16"), ("pp", 2, "fp32"), ("pp", 2, "bf16")),
    *(("tp", 2, "fp32"), ("tp", 2, "bf16"), ("fsdp2_tp", 4, "fp32"), ("fsdp2_pp", 4, "bf16")),
    *(("tp_pp", 4, "fp32"), ("fsdp2_tp_pp", 8, "fp32"), ("cp_tp", 4, "fp32"), ("cp_tp", 8, "bf16")),
    *(("zero2", 2, "fp32"), ("zero3_offload", 1, "fp32"), ("ddp", 2, "bf16"), ("zero3", 2, "bf16")),
]
"""Those that `make prove` starts as well."""
Launch = tuple[str, int, str]
Runs = Callable[[Launch], tuple[subprocess.CompletedProcess[str], Path]]


def launches(*, precision: str) -> list[Any]:
    """Those in one precision, of more than the reference, as parameters of a test."""
    further = [pytest.param(each, marks=pytest.mark.prove) for each in FURTHER if each[2] == precision]
    return [each for each in KEPT if each[2] == precision] + further


of_every_launch = pytest.mark.parametrize(
    "launched", [*SINGLE, *launches(precision="fp32"), *launches(precision="bf16")], ids=str
)


@pytest.fixture(scope="module")
def saved_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights in bf16, as most are published."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


def launch(
    strategy: str, processes: int, *flags: str | Path, precision: str | None = "no"
) -> subprocess.CompletedProcess[str]:
    config = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--main_process_port", "0"] + (
        [] if strategy == "single" and processes == 1 else ["--num_processes", str(processes)]
    )
    launcher += [] if precision is None else ["--mixed_precision", precision]
    command = [*launcher, str(ROOT / "recipes" / "sft.py"), *map(str, flags)]
    cleaned = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "FSDP", "PYTEST"))}
    return subprocess.run(command, capture_output=True, text=True, env=cleaned, timeout=300)


def flags_for(model: Path, train: Path, output: Path) -> list[str | Path]:
    return [
        *("--model.path", model, "--data.train", train, "--data.max_length", "64", "--train.output_dir", output),
        *("--train.steps", "4", "--train.global_batch_size", "8", "--train.learning_rate", "1e-3"),
    ]


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in fp32, with an output head that is a matrix of its own."""
    model = tiny.build_model_folder(tmp_path_factory.mktemp("untied"), tied=False)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def runs(
    saved_model: Path,
    untied_model: Path,
    conversations: Path,
    held_out: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    """What a launch printed, and its folder. In fp32 it reads bf16 weights; in bf16, which is what the files say, fp32
    weights. Each is launched once."""
    done: dict[Launch, tuple[subprocess.CompletedProcess[str], Path]] = {}

    def run(launched: Launch) -> tuple[subprocess.CompletedProcess[str], Path]:
        if launched not in done:
            strategy, processes, precision = launched
            output = tmp_path_factory.mktemp("launched") / strategy
            model = saved_model if precision == "fp32" else untied_model
            flags = [*flags_for(model, conversations, output), "--data.eval", held_out, "--eval.prompts", "1"]
            flags += ["--eval.max_new_tokens", "4", "--eval.exact_match", "true"]
            asked = "no" if precision == "fp32" else None
            done[launched] = launch(strategy, processes, *flags, precision=asked), output
        return done[launched]

    return run


@of_every_launch
def test_launch_trains_prints_once_and_ends_well(launched: Launch, runs: Runs):
    strategy, processes, precision = launched
    result, output = runs(launched)
    assert result.returncode == 0, result.stderr
    count = f"{processes} process{'es' if processes > 1 else ''}"
    count += ", 2 for each row" if strategy in TOGETHER else ""
    count += ", 2 stages" if has_stages(strategy) else ""
    count += ", 2 for each layer" if splits_layers(strategy) else ""
    shards = processes // 2 if strategy == "cp_tp" else 2
    count += f", {shards} shards of each part" if strategy in SHARDED_PARTS else ""
    assert result.stdout.count(f"{strategy} on {count}, computing in {precision}: rehearsal on CPU") == 1
    assert result.stdout.count("step 4/4") == 1
    assert result.stdout.count("held-out loss before training") == 1
    assert f"The fine-tuned model is in {output / 'final'}" in result.stdout
    assert "Traceback" not in result.stderr
    assert max(len(line) for line in result.stdout.splitlines() if "┃" in line or "│" in line) <= 80
    left = {".lock", "checkpoints", "final", "metrics.jsonl", "report.html", "report.png", "run.yaml"}
    assert {path.name for path in output.iterdir()} == left


@of_every_launch
def test_launch_answers_every_whole_held_out_row_together(launched: Launch, runs: Runs):
    _, output = runs(launched)
    record = yaml.safe_load((output / "run.yaml").read_text())
    assert record["strategy"]["processes"] == launched[1]
    assert record["exact_match"] == {"rows": 10, "before": 0.0, "after": 0.0}  # of 11, of which one is cut


@of_every_launch
def test_launch_prints_no_stray_warning(launched: Launch, runs: Runs):
    result, _ = runs(launched)
    launcher = ("real_accelerator.py", "torch/distributed/run.py")  # printed by accelerate launch, before our code
    stray = [line for line in result.stderr.splitlines() if line.strip() and not any(own in line for own in launcher)]
    assert stray == []
    assert "Warning" not in result.stdout
    assert "WARNING" not in "".join(line for line in result.stdout.splitlines() if launcher[0] not in line)


@pytest.mark.parametrize("launched", launches(precision="fp32"), ids=str)
def test_launches_on_read_weights_train_and_save_what_one_process_does(launched: Launch, runs: Runs):
    one_process, output = runs(("single", 1, "fp32"))[1], runs(launched)[1]
    reference, found = read_metrics(one_process), read_metrics(output)
    for key in ("loss", "grad_norm", "learning_rate", "tokens"):
        assert [m[key] for m in found] == pytest.approx([m[key] for m in reference], abs=1e-5)
    assert found[-1]["eval_loss"] == pytest.approx(reference[-1]["eval_loss"], abs=1e-5)
    expected = load_file(one_process / "final" / "model.safetensors")
    saved = load_file(output / "final" / "model.safetensors")
    assert AutoConfig.from_pretrained(output / "final").dtype == torch.bfloat16
    assert saved.keys() == expected.keys()
    assert len(saved) > 10
    for name, tensor in expected.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(saved[name], tensor, atol=1e-4, rtol=1e-2)  # one bf16 rounding apart


@pytest.mark.parametrize("launched", launches(precision="bf16"), ids=str)
def test_unchanged_files_train_read_weights_in_bf16_and_save_the_masters(launched: Launch, runs: Runs):
    result, output = runs(launched)
    assert result.returncode == 0, result.stderr
    of_one_process = runs(("single", 1, "bf16"))[1]
    reference, found = read_metrics(of_one_process), read_metrics(output)
    for key, tolerance in BF16_TOLERANCE.items():
        assert [m[key] for m in found] == pytest.approx([m[key] for m in reference], abs=tolerance)
    expected = load_file(of_one_process / "final" / "model.safetensors")
    saved = load_file(output / "final" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= saved.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == torch.float32
        assert (tensor != tensor.bfloat16()).any(), f"{name} was saved from its bf16 copy"
        assert (tensor - expected[name]).abs().mean() < 1e-4


@pytest.mark.prove  # test_two_machines does so with a network between them
def test_two_machines_meet_with_an_unchanged_file(saved_model: Path, conversations: Path, tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = []
    for machine in ("0", "1"):
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(ROOT / "accelerate_configs" / "zero2.yaml"), "--mixed_precision", "no"]
        command += ["--num_machines", "2", "--num_processes", "2", "--machine_rank", machine]
        command += ["--main_process_ip", "127.0.0.1", "--main_process_port", port, str(ROOT / "recipes" / "sft.py")]
        command += map(str, flags_for(saved_model, conversations, tmp_path / "out"))
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    results = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], results
    assert results[0][0].count("zero2 on 2 processes") == 1
    assert "step" not in results[1][0]
    assert len(read_metrics(tmp_path / "out")) == 4


def test_wrong_configuration_is_printed_once_by_all_processes_together_and_ends_with_code_2(
    saved_model: Path, conversations: Path, tmp_path: Path
):
    flags = flags_for(saved_model, conversations, tmp_path / "out")
    result = launch("ddp", 2, *flags, "--train.global_batch_size", "7", "--data.eval", tmp_path / "missing.jsonl")
    assert result.returncode != 0
    assert result.stderr.count("error: train.global_batch_size 7 rows cannot be shared") == 1
    assert result.stderr.count("error: ") == 2
    assert "missing.jsonl: there is no such data file" in result.stderr
    assert "exitcode  : 2" in result.stderr
    assert "finetune/" not in result.stderr  # no traceback of ours
    assert not (tmp_path / "out").exists()


def test_recipe_without_the_launcher_ends_with_code_2_on_wrong_input(tmp_path: Path):
    command = [sys.executable, str(ROOT / "recipes" / "sft.py"), "--train.steps", "x"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("error: ") == 4
    assert all(line.startswith("error: ") for line in result.stderr.splitlines())


def test_several_processes_under_the_file_for_one_are_an_error(saved_model: Path, conversations: Path, tmp_path: Path):
    result = launch("single", 2, *flags_for(saved_model, conversations, tmp_path / "out"))
    assert result.returncode != 0
    assert "asked for several processes but started one" in result.stderr
