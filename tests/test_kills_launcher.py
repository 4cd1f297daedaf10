"""The launcher starts a process that died again, with the others, and the run ends as if nothing had been."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scenarios

from finetune.config.command_line import parse
from recipes.sft import Config

ROOT = Path(__file__).parent.parent
STEPS, DIES_IN = 8, 6
DYING = """
import os, signal, sys
from pathlib import Path

from finetune.data import batches
from finetune.run.entry import run
from recipes.sft import Config, main

marker, dies_in = Path(sys.argv.pop(1)), int(sys.argv.pop(1))


class Dying(batches.Batches):
    def step(self, step):
        if step == dies_in and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(step)


batches.Batches = Dying
run(main, Config)
"""


def launch(script: Path, marker: Path, flags: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--num_processes", "2"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / "ddp.yaml"), "--mixed_precision", "no"]
    command += ["--max_restarts", "1", "--monitor_interval", "0.2"]
    command += [str(script), str(marker), str(DIES_IN), *flags]
    cleaned = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "FSDP", "PYTEST"))}
    cleaned |= {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=cleaned, timeout=300)


def test_process_that_dies_is_restarted_by_the_launcher_and_the_run_ends_as_if_it_had_not(
    model_folder: Path, conversations: Path, tmp_path: Path, ranks: Any
):
    script, marker = tmp_path / "dying.py", tmp_path / "died"
    script.write_text(DYING)
    flags = [
        "--model.path",
        str(model_folder),
        "--model.random_weights",
        "true",
        "--data.train",
        str(conversations),
        "--data.max_length",
        "64",
    ]
    flags += ["--train.steps", str(STEPS), "--train.global_batch_size", "8", "--train.learning_rate", "1e-3"]
    flags += ["--checkpoint.every", "2", "--checkpoint.resume", "auto"]
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    result = launch(script, marker, [*flags, "--train.output_dir", str(disturbed)])
    assert result.returncode == 0, result.stderr
    assert marker.exists()
    assert result.stdout.count("ddp on 2 processes") == 2  # it began twice
    assert result.stdout.count("resuming after step") == 1
    config = parse(Config, [*flags, "--train.output_dir", str(undisturbed)])
    everyone = ranks(2).run(scenarios.train, config, strategy="ddp")
    assert [seen["num_processes"] for seen in everyone] == [2, 2]
    found, expected = scenarios.read_metrics(disturbed), scenarios.read_metrics(undisturbed)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "tokens", "learning_rate"):  # last bits move with the number of threads
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], abs=1e-6)
