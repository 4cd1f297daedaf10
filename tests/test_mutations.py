"""The parity check rejects the classic bugs: a check that accepted them would prove nothing."""

import functools
from pathlib import Path
from typing import Any

import mutations
import pytest
import scenarios
from parity import FP32_TOLERANCE, assert_parity
from thinning import thinned

CASES = [
    ("mean of means", "ddp", "loss differs"),
    ("Accelerate's default sync_with_dataloader", "ddp", "(loss|grad_norm) differs"),
    ("a scheduler stepped once per process", "ddp", "learning_rate differs"),
    ("ZeRO's silent clipping", "zero2", "loss differs"),
]
UNDER_ZERO_3 = [("mean of means", "zero3", "loss differs"), ("ZeRO's silent clipping", "zero3", "loss differs")]


@pytest.fixture(scope="module")
def run(ranks: Any, model_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("mutations")

    @functools.cache
    def train(bug: str, strategy: str, world_size: int) -> list[dict[str, Any]]:
        config = scenarios.configuration(
            model_folder,
            conversations,
            folder / "run",
            train__global_batch_size=16,
            train__micro_batch_size=16 if world_size == 1 else 2,
            train__optimizer="sgd",
            train__learning_rate=0.2,
            train__max_grad_norm=0.0,
        )
        ranks(world_size).run(mutations.train_with, bug, config, strategy=strategy)
        return scenarios.read_metrics(folder / "run")

    return train


@pytest.mark.parametrize(("bug", "strategy", "complaint"), thinned(CASES, UNDER_ZERO_3))
def test_parity_check_rejects(bug: str, strategy: str, complaint: str, run: Any):
    reference = run("none", "single", 1)
    assert_parity(run("none", strategy, 2), reference, FP32_TOLERANCE)  # without the bug all is well
    with pytest.raises(AssertionError, match=complaint):
        assert_parity(with_equal("tokens", run(bug, strategy, 2), reference), reference, FP32_TOLERANCE)


def with_equal(key: str, metrics: list[dict[str, Any]], reference: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hide one tell-tale figure of a bug, so that the others have to show it."""
    return [m | {key: r[key]} for m, r in zip(metrics, reference)]


def test_scheduler_bug_is_also_seen_in_the_losses(run: Any):
    reference = run("none", "single", 1)
    mutated = with_equal("learning_rate", run("a scheduler stepped once per process", "ddp", 2), reference)
    with pytest.raises(AssertionError, match="loss differs"):
        assert_parity(mutated, reference, FP32_TOLERANCE)


def test_data_loader_of_the_mutation_is_harmless_with_our_setting(run: Any):
    reference = run("none", "single", 1)
    assert_parity(run("control: the same data loader, our setting", "ddp", 2), reference, FP32_TOLERANCE)
