"""One checkpoint continues the same run: under the strategy that wrote it to the bit, under any other to 1e-5.

A run trains 20 steps and leaves its checkpoint after the 10th; from there other launches train the last 10.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import scenarios
import torch
from parity import FP32_TOLERANCE, assert_parity, assert_really_active, differences
from safetensors.torch import load_file

from benchmarks.resume_table import RESULTS
from finetune.config.strategy_names import splits_layers
from finetune.output.run_files import environment

HALF = 10
LAUNCHES = [
    ("single", 1),
    ("ddp", 2),
    ("fsdp2", 2),
    ("fsdp2", 4),
    ("hsdp", 4),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 2),
    ("zero3", 4),
    ("cp", 2),
    ("pp", 2),
    ("tp", 2),
    ("tp", 4),
    ("tp_pp", 4),
    ("fsdp2_tp", 4),
    ("fsdp2_pp", 4),
    ("fsdp2_tp_pp", 8),
    ("cp_tp", 4),
]
ADAPTER_LAUNCHES = [
    ("single", 1),
    ("ddp", 2),
    ("fsdp2", 2),
    ("zero2", 2),
    ("zero3", 2),
    ("pp", 2),
    ("tp", 2),
    ("tp_pp", 4),
    ("fsdp2_tp", 4),
    ("fsdp2_pp", 4),
    ("cp_tp", 4),
]
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter__type": "lora", "adapter__rank": 4},
    "qlora": {"adapter__type": "lora", "adapter__rank": 4, "quantization__bits": 4},
}
Launch = tuple[str, int]


class Run(NamedTuple):
    """What a run left."""

    folder: Path
    metrics: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    held: list[str]
    """Digest of the weights that each process held at the end, bit by bit."""


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest) -> Any:
    """Collects every comparison; written to benchmarks/results with --record-proofs."""
    rows: list[dict[str, Any]] = []
    yield rows
    if request.config.getoption("--record-proofs") and len(rows) == len(PAIRS):
        known = environment()
        hardware = {key: known["hardware"][key] for key in ("gpus", "cpus")}
        where = {"python": known["python"], "packages": known["packages"], "hardware": hardware}
        RESULTS.write_text(json.dumps({"environment": where, "comparisons": rows}, indent=1) + "\n")


@pytest.fixture(scope="module")
def train(ranks: Any, weights_folder: Path, conversations: Path) -> Callable[..., Run]:
    """Train under a strategy file, which is asserted to be really active."""

    def run(launch: Launch, output: Path, **changes: Any) -> Run:
        strategy, world_size = launch
        changes |= {"train__global_batch_size": 8, "train__micro_batch_size": 2, "train__overwrite": False}
        config = scenarios.configuration(weights_folder, conversations, output, **changes)
        everyone = ranks(world_size).run(scenarios.train, config, strategy=strategy)
        for seen in everyone:
            assert seen["world_size"] == world_size
            if "quantization__bits" not in changes and "adapter__type" not in changes:
                assert_really_active(seen, strategy, world_size)
        (file,) = (output / "final").glob("*model.safetensors")
        return Run(output, scenarios.read_metrics(output), load_file(file), [seen["weights_held"] for seen in everyone])

    return run


@pytest.fixture(scope="module")
def uninterrupted(train: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Launch], Run]:
    """The whole run with a method under a launch, trained once."""
    known: dict[tuple[str, Launch], Run] = {}

    def lookup(method: str, launch: Launch) -> Run:
        if (method, launch) not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            known[method, launch] = train(launch, folder, checkpoint__every=HALF, **METHODS[method])
            assert len(known[method, launch].metrics) == 2 * HALF
        return known[method, launch]

    return lookup


def launches_of(method: str) -> list[Launch]:
    if method == "full":
        return LAUNCHES
    return [each for each in ADAPTER_LAUNCHES if method != "qlora" or not splits_layers(each[0])]  # of these


PAIRS = [
    (method, before, after) for method in METHODS for before in launches_of(method) for after in launches_of(method)
]


def name_of(value: Any) -> str:
    return f"{value[0]}x{value[1]}" if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("method", "before", "after"), PAIRS, ids=name_of)
def test_second_half_under_another_launch_is_that_of_the_uninterrupted_run(
    method: str,
    before: Launch,
    after: Launch,
    train: Callable[..., Run],
    uninterrupted: Callable[[str, Launch], Run],
    tmp_path: Path,
    recorded: list[dict[str, Any]],
):
    whole = uninterrupted(method, before)
    checkpoint = whole.folder / "checkpoints" / f"step-{HALF:08d}"
    resumed = train(after, tmp_path / "run", checkpoint__resume=str(checkpoint), checkpoint__every=0, **METHODS[method])
    rest = whole.metrics[HALF:]
    assert [line["step"] for line in resumed.metrics] == [line["step"] for line in rest]
    assert_parity(resumed.metrics, rest, FP32_TOLERANCE)
    assert_parity(resumed.metrics, uninterrupted(method, ("single", 1)).metrics[HALF:], FP32_TOLERANCE)
    assert resumed.weights.keys() == whole.weights.keys()
    if before == after:
        for figure in ("loss", "grad_norm", "tokens", "learning_rate"):
            assert [line[figure] for line in resumed.metrics] == [line[figure] for line in rest]
        assert resumed.held == whole.held
    for name, weight in whole.weights.items():
        assert (resumed.weights[name] - weight).abs().mean() < 1e-6, name
    recorded.append(
        {
            "method": method,
            "before": name_of(before),
            "after": name_of(after),
            **differences(resumed.metrics, rest),
        }
    )


@pytest.mark.parametrize("launch", ADAPTER_LAUNCHES, ids=name_of)
def test_resumed_in_its_own_folder_a_run_is_the_uninterrupted_one_to_the_bit_dropout_included(
    launch: Launch, train: Callable[..., Run], tmp_path: Path
):
    changes = METHODS["lora"] | {"adapter__dropout": 0.3, "checkpoint__every": 4, "checkpoint__keep": 5}
    whole = train(launch, tmp_path / "run", **changes)
    shutil.rmtree(tmp_path / "run" / "final")
    for step in (12, 16, 20):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    resumed = train(launch, tmp_path / "run", **changes, checkpoint__resume="auto")
    for figure in ("step", "loss", "grad_norm", "tokens", "total_tokens", "learning_rate"):
        assert [line[figure] for line in resumed.metrics] == [line[figure] for line in whole.metrics]
    assert resumed.held == whole.held
    assert "save_stall_seconds" in resumed.metrics[-1]
