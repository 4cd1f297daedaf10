"""What a run says of its launch."""

import os
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
from accelerate.commands import launch as accelerate_launch

from finetune.compat.accelerate_private import launch_defaults
from finetune.distributed import strategy

ROOT = Path(__file__).parent.parent

MUCH_FASTER = "--mixed_precision no is several times faster"


@pytest.mark.parametrize(
    ("has_units", "precision", "is_told"), [(False, "bf16", True), (True, "bf16", False), (False, "no", False)]
)
def test_rehearsal_in_bf16_without_units_for_it_says_what_is_faster(
    has_units: bool, precision: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(strategy, "cpu_computes_bf16", lambda: has_units)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    line = strategy.describe(strategy.Strategy.from_environment())
    assert "rehearsal on CPU" in line
    assert (MUCH_FASTER in line) == is_told


@pytest.mark.parametrize("file", sorted(ROOT.glob("accelerate_configs/*.yaml")), ids=lambda file: file.stem)
def test_a_launch_that_does_not_say_how_many_processes_comes_as_far_as_the_recipe(file: Path):
    """Where a file says nothing either, Accelerate ends in a traceback."""
    arguments = accelerate_launch.launch_command_parser().parse_args(["--config_file", str(file), "recipe.py"])
    assert launch_defaults(arguments)[0].num_processes == 1


@pytest.mark.parametrize(
    ("name", "processes", "gpus", "is_refused"),
    [
        *(("fsdp2", 1, 8, True), ("ddp", 1, 2, True), ("fsdp2_offload", 1, 1, False)),
        *(("zero3", 8, 8, False), ("single", 1, 8, False), ("zero2", 1, 0, False)),
    ],
)
def test_one_process_of_a_strategy_for_several_is_refused_where_there_are_several_gpus(
    name: str, processes: int, gpus: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    launch = strategy.Strategy(name, 0, processes, replicas=1, mixed_precision="no", rehearsal=not gpus)
    found = strategy.problems(launch, bits=None, adapter="none", optimizer="adamw", weights="fp32_master")
    said = f"was launched with one process, and this machine has {gpus} GPUs; launch with --num_processes {gpus}, or"
    assert any(said in problem for problem in found) == is_refused


def train_with_launch_file_of(steps: str, config: Any) -> dict[str, Any]:
    """Run the recipe with a launch file that says how many micro-batches an optimizer step has."""
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = steps
    return scenarios.train(config)


@pytest.mark.parametrize("zero", ["zero1", "zero3"])
def test_a_launch_file_does_not_decide_how_many_micro_batches_a_step_has(
    zero: str, model_folder: Path, conversations: Path, tmp_path: Path, ranks: Any
):
    found = []
    for steps in ("auto", "1"):  # `accelerate config` writes the latter
        config = scenarios.configuration(model_folder, conversations, tmp_path / steps, train__steps=3)
        seen = ranks(2).run(train_with_launch_file_of, steps, config, strategy=zero)
        assert [each["world_size"] for each in seen] == [2, 2]
        found.append([(line["loss"], line["grad_norm"]) for line in scenarios.read_metrics(tmp_path / steps)])
    assert found[0] == found[1]
