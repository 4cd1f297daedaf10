"""A loss or gradient that is not finite, on any process, never reaches the weights: the step is left out everywhere."""

import functools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scenarios
import tiny
import torch
from parity import data_processes
from safetensors.torch import load_file

from finetune import distributed
from finetune.data.batches import Batches
from finetune.data.sampler import EMPTY, dealt_batch, global_batch
from finetune.errors import RunStopped
from finetune.training import loss
from finetune.training.meter import Meter
from finetune.training.step import scaled

LAUNCHES = [
    ("single", 1),
    ("ddp", 2),
    ("fsdp2", 2),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 2),
    ("zero3_offload", 2),
    ("pp", 2),
    ("tp", 2),
    ("tp_pp", 4),
    ("fsdp2_tp", 4),
    ("fsdp2_pp", 4),
    ("cp_tp", 4),
]
OF_LOSSES = [
    ("single", 1),
    ("fsdp2", 2),
    ("zero3", 2),
    ("cp", 2),
    ("pp", 4),
    ("tp", 4),
    ("tp_pp", 4),
    ("fsdp2_tp", 4),
    ("fsdp2_pp", 4),
    ("cp_tp", 4),
]
"""Each process has the losses of rows of its own, or of a part of them, or none."""
ROWS = 8
CONSTANT = {"train__schedule": "constant", "train__warmup_ratio": 0.0, "train__micro_batch_size": 2}


def infinite_with_finite_gradients(loss: torch.Tensor) -> torch.Tensor:
    return loss + torch.inf


def with_gradients_of_nan(loss: torch.Tensor) -> torch.Tensor:
    loss.register_hook(lambda gradient: gradient * torch.nan)
    return loss


def train_with(spoil: Callable[[torch.Tensor], torch.Tensor], calls_to_spoil: set[int], config: Any) -> dict[str, Any]:
    """Run the recipe; the losses of these calls are spoiled, on the last process only. The memory check comes first."""
    original, calls = loss.token_loss_sum, iter(range(10**6))
    strategy = distributed.Strategy.from_environment()
    is_last = strategy.rank == strategy.world_size - 1

    def spoiled(logits: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        loss = original(logits, next_tokens)
        return spoil(loss) if next(calls) in calls_to_spoil and is_last else loss

    loss.token_loss_sum = spoiled
    try:
        return scenarios.train(config)
    finally:
        loss.token_loss_sum = original


def rows_of_step(step: int, conversations: Path, micro_batch_size: int) -> list[int]:
    """In the order of the micro-batches."""
    lengths = tiny.read_rows(conversations, tiny.build_tokenizer()).lengths
    rows = global_batch(step, rows=80, rows_in_run=10**6, global_batch_size=ROWS, seed=0)
    return dealt_batch(rows, lengths, micro_batch_size, flat=True)


SHOWN = {
    with_gradients_of_nan: ("single", "ddp", "zero1", "zero3", "pp", "tp"),
    infinite_with_finite_gradients: ("fsdp2", "cp"),
}


def shown_or_proven(strategy: str, world_size: int, spoil: Any) -> Any:
    marks = () if strategy in SHOWN[spoil] else pytest.mark.prove
    return pytest.param(strategy, world_size, spoil, marks=marks)


# every strategy sums gradients in its own way; the loss is summed by one function
@pytest.mark.parametrize(
    ("strategy", "world_size", "spoil"),
    [shown_or_proven(*launch, with_gradients_of_nan) for launch in LAUNCHES]
    + [shown_or_proven(*launch, infinite_with_finite_gradients) for launch in OF_LOSSES],
)
def test_step_leaves_all_weights_as_they_were_is_reported_with_its_rows_and_the_next_one_trains(
    strategy: str, world_size: int, spoil: Any, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    sharing = data_processes(strategy, world_size)
    calls_before = 2 if strategy.endswith("pp") else 1  # of the memory check, which fills both stages
    of_second_step = {calls_before + ROWS // 2 // sharing}  # the first of its micro-batches
    run = functools.partial(scenarios.configuration, model_folder, conversations, tmp_path / "run", **CONSTANT)
    weights, metrics = {}, {}
    for name, steps, spoiled_calls in [("one", 1, set()), ("two", 2, of_second_step), ("three", 3, of_second_step)]:
        everyone = ranks(world_size).run(train_with, spoil, spoiled_calls, run(train__steps=steps), strategy=strategy)
        assert [seen["num_processes"] for seen in everyone] == [world_size] * world_size
        weights[name] = load_file(tmp_path / "run" / "final" / "model.safetensors")
        metrics[name] = scenarios.read_metrics(tmp_path / "run")
    for name, weight in weights["one"].items():
        assert torch.equal(weights["two"][name], weight), name
        assert not torch.equal(weights["three"][name], weight), name
    first, second, third = metrics["three"]
    of_loss = spoil is infinite_with_finite_gradients
    assert (second["not_finite"], second["bad_steps"]) == ("loss" if of_loss else "gradient norm", 1)
    assert (second["loss"], second["grad_norm"]) == (None, None)
    assert "not_finite" not in first
    assert "not_finite" not in third
    assert third["loss"] < 7
    rows = rows_of_step(2, conversations, micro_batch_size=2)
    rows = rows[2 * sharing - 2 : 2 * sharing] if of_loss else rows
    assert second["rows"] == [f"{conversations}:{row + 1}" for row in rows]


def test_run_stops_after_so_many_in_a_row_naming_rows_and_the_last_checkpoint(
    model_folder: Path, conversations: Path, tmp_path: Path
):
    changes = {"train__max_bad_steps": 2, "checkpoint__every": 2, "train__steps": 9, "train__micro_batch_size": 8}
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes)
    with pytest.raises(RunStopped, match="step 7: the loss is not finite; 2 steps in a row left") as error:
        train_with(infinite_with_finite_gradients, {3, 6, 7}, config)  # one alone, then two
    assert "to resume after step 6" in str(error.value)
    rows = rows_of_step(7, conversations, micro_batch_size=8)
    assert f"The rows are {', '.join(f'{conversations}:{row + 1}' for row in rows)}." in str(error.value)
    assert [line.get("bad_steps") for line in scenarios.read_metrics(tmp_path / "run")] == [None] * 2 + [
        1,
        None,
        None,
        2,
    ]
    assert not (tmp_path / "run" / "final").exists()


def test_count_goes_on_in_a_resumed_run(model_folder: Path, conversations: Path, tmp_path: Path):
    changes = {"train__max_bad_steps": 2, "checkpoint__every": 3, "train__micro_batch_size": 8}
    for steps, resume in [(3, "none"), (9, "auto")]:
        settings = changes | {"train__steps": steps, "checkpoint__resume": resume, "train__overwrite": False}
        config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **settings)
        if resume == "none":
            train_with(infinite_with_finite_gradients, {3}, config)
    with pytest.raises(RunStopped, match="step 4: "):
        train_with(infinite_with_finite_gradients, {1}, config)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_gradients_of_a_loss_that_is_not_finite_are_nan(value: float):
    weight = torch.tensor(2.0, requires_grad=True)
    scaled(weight * 3 + value, 0.5).backward()
    assert weight.grad is not None
    assert weight.grad.isnan()


def test_finite_loss_is_scaled_as_by_multiplication():
    weight = torch.tensor(2.0, requires_grad=True)
    scaled(weight * 3, 0.5).backward()
    assert weight.grad == 1.5


def test_rows_of_a_micro_batch_are_named_though_the_run_ends_within_its_global_batch(conversations: Path):
    rows = tiny.read_rows(conversations, tiny.build_tokenizer())
    form: dict[str, Any] = {"packing": False, "flat": False, "max_length": 64, "seed": 0, "epochs": 11 / len(rows)}
    work = Batches(rows, steps=None, global_batch_size=8, micro_batch_size=2, **form)
    batch = work.step(work.steps)
    assert sum(place == EMPTY for place in batch.places) == 5
    for bad in range(4):
        known = {"rows": batch.sources, "step": 2, "skipped": False}
        meter: Any = SimpleNamespace(counters=Counter(), max_bad_steps=9)
        losses = torch.tensor([[math.nan if number == bad else 1.0 for number in range(4)]])
        told = Meter._count_if_bad(meter, known, losses, 1.0)
        places = [place for place in batch.places[2 * bad : 2 * bad + 2] if place != EMPTY]
        assert told["rows"] == [work.documents(place)[0].source for place in places]


# under the others gradients are dropped
@pytest.mark.parametrize(
    "strategy",
    ["zero2", "zero3", *(pytest.param(each, marks=pytest.mark.prove) for each in ("zero1", "zero3_offload"))],
)
def test_a_memory_check_that_is_not_finite_leaves_no_trace(
    strategy: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **CONSTANT, train__steps=2)
    metrics = []
    for calls in (set(), {0}):
        for seen in ranks(2).run(train_with, with_gradients_of_nan, calls, config, strategy=strategy):
            assert seen["num_processes"] == 2
        metrics.append([(each["loss"], each["grad_norm"]) for each in scenarios.read_metrics(tmp_path / "run")])
    assert metrics[0] == metrics[1]
