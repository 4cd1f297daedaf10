"""``make demo``, as a user runs it but for fewer steps: the real SmolLM2-135M learns, and shows it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from scenarios import read_metrics

from finetune.cli.demo_model import demo_model
from finetune.distributed import native_precision

ROOT = Path(__file__).parent.parent


def test_fetching_the_model_draws_no_progress_bar(tmp_path: Path):
    """In the process that fetches and converts it, libraries that would draw one draw nothing."""
    (tmp_path / "finetune" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    program = (
        "import runpy\nrunpy.run_module('finetune.cli.demo_model', run_name='__main__')\n"
        "from tqdm.auto import tqdm\nassert list(tqdm([1, 2])) == [1, 2]"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path / 'finetune' / 'SmolLM2-135M-Instruct'}\n"


def test_a_model_that_cannot_be_fetched_is_a_sentence(tmp_path: Path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1"}
    command = [sys.executable, "-m", "finetune.cli.demo_model"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert "could not be downloaded; check the network" in result.stderr
    assert "Traceback" not in result.stderr


def assert_told(output: str, folder: Path) -> dict[str, Any]:
    """What a person reads of a demo is what it recorded, which is returned."""
    record: dict[str, Any] = yaml.safe_load((folder / "run.yaml").read_text())
    losses, matches = record["eval_loss"], record["exact_match"]
    assert read_metrics(folder)[-1]["eval_loss"] == losses["after"]
    assert re.search(r"held-out loss: \d\.\d{4} before, \d\.\d{4} after training", output)
    assert matches["before"] == 0  # the format that was taught is in no answer before
    after, rows = round(matches["rows"] * matches["after"]), matches["rows"]
    assert f"exact match on {rows} held-out rows: 0 before, {after} after training" in output
    assert output.count("├") == 3  # four answers in the table
    assert f"The adapter is in {folder / 'final'}" in output
    lines = output.replace(str(folder.parent), "").splitlines()
    assert max(map(len, lines)) <= 100
    return record


def demo(folder: Path, *flags: str) -> str:
    """The output of ``make demo``, as a user runs it but for some flags."""
    command = ["make", "demo", f"DEMO_OUTPUT={folder}", f"DEMO_FLAGS={' '.join(flags)}", f"VENV={Path(sys.prefix)}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_first_steps_of_the_demo_lower_the_held_out_loss_and_are_told(tmp_path: Path):
    few = some_held_out(tmp_path)
    output = demo(tmp_path / "demo", "--train.steps", "4", "--data.eval", str(few), "--eval.max_new_tokens", "12")
    record = assert_told(output, tmp_path / "demo")
    assert record["eval_loss"]["after"] < 0.7 * record["eval_loss"]["before"]
    assert record["exact_match"]["rows"] == 4


@pytest.mark.prove
def test_a_quarter_of_the_demo_lowers_the_held_out_loss_to_a_fifth_and_answers_some_of_the_held_out_rows(
    tmp_path: Path,
):
    output = demo(tmp_path / "demo", "--train.epochs", "0.5")
    record = assert_told(output, tmp_path / "demo")
    losses, matches = record["eval_loss"], record["exact_match"]
    assert losses["after"] < 0.2 * losses["before"]
    assert matches["rows"] == 36
    assert matches["after"] > 0  # 4 of 36 on a CPU; 28 after the whole demo, as the README has it
    assert output.count("(expected:") == 4 - round(4 * matches["after"])  # as often wrong as all are


def some_held_out(folder: Path) -> Path:
    """Four rows of the demo's held-out file."""
    rows = (ROOT / "recipes" / "data" / "demo_heldout.jsonl").read_text().splitlines(keepends=True)
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(rows[:4]))
    return held_out


@pytest.mark.prove  # as the notebook that trains more with its settings
def test_laptop_configuration_trains_a_4_bit_model_end_to_end_on_the_cpu(tmp_path: Path):
    """A few of its steps, on a few held-out rows."""
    held_out = some_held_out(tmp_path)
    command = ["accelerate", "launch", "--config_file", "accelerate_configs/single.yaml"]
    command += ["--mixed_precision", native_precision()]  # where a CPU has no units for bf16, fp32 is 15 times as fast
    command += [
        "recipes/sft.py",
        "--config",
        "recipes/configs/smollm2_135m_qlora.yaml",
        "--model.path",
        str(demo_model()),
    ]
    command += ["--train.output_dir", str(tmp_path / "run"), "--train.steps", "3", "--eval.max_new_tokens", "8"]
    command += ["--data.eval", str(held_out)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    record = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert record["eval_loss"]["after"] < 0.9 * record["eval_loss"]["before"]
    assert record["strategy"]["sharding"]["constants_bytes"] > 0  # it was quantised
    assert "The adapter is in" in result.stdout
    assert "arning" not in result.stdout + result.stderr
    assert (tmp_path / "run" / "final" / "adapter_model.safetensors").stat().st_size < 40 * 2**20


def test_demo_data_is_disjoint_and_large_enough():
    train, held_out = (
        (ROOT / "recipes" / "data" / f"demo_{part}.jsonl").read_text().splitlines() for part in ("train", "heldout")
    )
    assert len(train) >= 150
    assert len(held_out) >= 30
    assert len({*train, *held_out}) == len(train) + len(held_out)
