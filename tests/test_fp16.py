"""fp16 with loss scaling is as right as bf16: losses, unscaled norms, skipped steps, under every kind of strategy.

Accelerate and DeepSpeed allow fp16 on GPUs only, and so does the recipe. PyTorch computes fp16 on CPU too; here the
two locks are opened by hand, and the same lines of the recipe, Accelerate and DeepSpeed run.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scenarios
import torch
from parity import assert_really_active

from finetune import distributed

LAUNCHES = [("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2)]
TOLERANCE = 5e-3


def train_in_fp16(config: Any, scale_power: int) -> dict[str, Any]:
    """Run the recipe in fp16, starting from a loss scale of ``2**scale_power``."""
    with fp16_on_cpu(scale_power):
        return scenarios.train(config)


def train_in_fp16_with_a_fused_optimizer(config: Any, scale_power: int) -> dict[str, Any]:
    """As on a GPU, where the optimizer is fused unless losses are scaled."""

    def on_a_gpu(accelerator: Any) -> bool:
        with mock.patch.object(type(accelerator), "device", torch.device("cuda")):
            return fuses(accelerator)

    fuses = distributed.fuses
    with fp16_on_cpu(scale_power), mock.patch.object(distributed, "fuses", on_a_gpu):
        return scenarios.train(config)


@contextlib.contextmanager
def fp16_on_cpu(scale_power: int) -> Iterator[None]:
    from accelerate import Accelerator
    from accelerate.utils import get_fsdp2_grad_scaler
    from deepspeed.accelerator import get_accelerator

    setup = distributed.setup
    configure = setup._configure_deepspeed

    def with_scaler(*args: Any, **kwargs: Any) -> Any:
        accelerator = Accelerator(*args, **kwargs)
        if kwargs["mixed_precision"] == "fp16" and accelerator.state.deepspeed_plugin is None:
            make = get_fsdp2_grad_scaler if accelerator.is_fsdp2 else torch.amp.GradScaler
            accelerator.scaler = make(device="cpu", init_scale=2.0**scale_power)
            accelerator.native_amp = True
        return accelerator

    def with_first_scale(accelerator: Any, *args: Any) -> None:
        configure(accelerator, *args)
        accelerator.state.deepspeed_plugin.deepspeed_config["fp16"]["initial_scale_power"] = scale_power

    with (
        mock.patch.object(distributed, "problems", return_value=[]),
        mock.patch.object(setup, "Accelerator", with_scaler),
        mock.patch.object(setup, "_configure_deepspeed", with_first_scale),
        mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True),
    ):
        yield


@pytest.fixture
def run(ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path) -> Any:
    def train(
        strategy: str, world_size: int, scale_power: int | None, function: Any = train_in_fp16, **changes: Any
    ) -> list[dict[str, Any]]:
        config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes)
        group = ranks(world_size)
        if scale_power is None:
            found = group.run(scenarios.train, config, strategy=strategy)
        else:
            found = group.run(function, config, scale_power, strategy=strategy, mixed_precision="fp16")
        for seen in found:
            assert_really_active(seen, strategy, world_size)
        return scenarios.read_metrics(tmp_path / "run")

    return train


CLIPPED_SGD = {"train__optimizer": "sgd", "train__learning_rate": 0.3, "train__max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def in_fp32() -> list[dict[str, Any]]:
    """Metrics of one process, filled by the first test that asks."""
    return []


@pytest.mark.parametrize(("strategy", "world_size"), LAUNCHES)
def test_losses_and_unscaled_norms_are_those_of_fp32(
    strategy: str, world_size: int, run: Any, in_fp32: list[dict[str, Any]]
):
    if not in_fp32:
        in_fp32.extend(run("single", 1, None, **CLIPPED_SGD))
    half, full = run(strategy, world_size, 10, **CLIPPED_SGD), in_fp32
    assert len(half) == len(full) == 20
    for key in ("loss", "grad_norm"):
        difference = max(abs(a[key] - b[key]) for a, b in zip(half, full))
        assert 1e-5 < difference < TOLERANCE  # computed in fp16, and right
    assert half[-1]["skipped_steps"] == 0
    assert "skipped_steps" not in full[-1]


@pytest.mark.parametrize(
    ("strategy", "world_size", "function"),
    [(strategy, world_size, train_in_fp16) for strategy, world_size in LAUNCHES]
    + [(*LAUNCHES[0], train_in_fp16_with_a_fused_optimizer)],
)
def test_steps_whose_gradients_overflow_are_skipped_counted_and_survived(
    strategy: str, world_size: int, function: Any, run: Any
):
    metrics = run(strategy, world_size, 24, function, train__micro_batch_size=4)
    overflowed = [m["grad_norm"] is None for m in metrics]
    assert overflowed[:2] == [True, True]  # the scale is lowered until the gradients fit
    assert not any(overflowed[14:])
    assert [m["skipped_steps"] for m in metrics] == [sum(overflowed[: m["step"]]) for m in metrics]
    first = overflowed.index(False)
    assert metrics[first]["loss"] == pytest.approx(metrics[0]["loss"], abs=0.2)  # nothing was learnt before
    assert metrics[-1]["loss"] < metrics[first]["loss"] - 0.1


def test_gradients_that_overflow_at_every_scale_stop_the_run(run: Any):
    with pytest.raises(AssertionError, match="41 steps in a row overflowed in fp16"):
        run("single", 1, 120, train__micro_batch_size=8, train__steps=60)
