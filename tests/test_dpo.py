"""Preference tuning: what is learnt of pairs, in steps that are full and not, and references that are kept."""

from pathlib import Path
from typing import Any

import preferences
import pytest
import scenarios

from finetune.run import references

COMPARED = ("loss", "grad_norm", "reward_chosen", "reward_rejected", "reward_margin", "accuracy", "kl", "tokens")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preferences.write_pairs(tmp_path_factory.mktemp("pairs") / "train.jsonl", rows=60)


@pytest.fixture(scope="module")
def held_out_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preferences.write_pairs(tmp_path_factory.mktemp("pairs") / "held_out.jsonl", rows=7, seed=1)


@pytest.fixture(scope="module")
def run(
    ranks: Any, model_folder: Path, pairs: Path, held_out_pairs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = tmp_path_factory.mktemp("dpo")

    def tune(strategy: str, world_size: int, name: str = "run", **changes: Any) -> list[dict[str, Any]]:
        dpo = {key.removeprefix("dpo__"): changes.pop(key) for key in list(changes) if key.startswith("dpo__")}
        config = scenarios.configuration(
            model_folder, pairs, folder / name, **{"train__steps": 6, "data__eval": str(held_out_pairs)} | changes
        )
        assert ranks(world_size).run(preferences.tune, config, dpo, strategy=strategy) == [world_size] * world_size
        return scenarios.read_metrics(folder / name)

    tune.folder = folder
    return tune


@pytest.fixture(scope="module")
def alone(run: Any) -> Any:
    """The metrics of one process, with each adapter."""
    known: dict[str, Any] = {}

    def metrics(adapter: str) -> Any:
        if adapter not in known:
            known[adapter] = run("single", 1, adapter__type=adapter, train__micro_batch_size=8)
        return known[adapter]

    return metrics


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        for name in COMPARED:
            if name == "kl" and name not in other:
                continue  # without a reference
            if name == "accuracy" and other["loss"] == pytest.approx(0.693147, abs=1e-5):
                continue  # rewards are 0, but for rounding
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), (one["step"], name)
    for name in ("eval_loss", "eval_reward_margin", "eval_accuracy", *(["eval_kl"] if "kl" in expected[-1] else [])):
        assert found[-1][name] == pytest.approx(expected[-1][name], rel=1e-5, abs=1e-5)


def test_it_learns_which_answer_is_chosen(alone: Any):
    first, *_, last = alone("none")
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)  # log 2: the model is its own reference
    assert last["eval_loss"] < 0.6
    assert last["eval_accuracy"] == 1.0


@pytest.mark.parametrize("loss", ["ipo", "simpo", "orpo", "cpo"])
def test_steps_and_held_out_pairs_that_are_not_full_are_those_of_one_process(loss: str, run: Any):
    """16 of 20 pairs fill two steps, and 2 processes share 7 held-out ones."""
    changes = {"train__steps": None, "train__epochs": 1 / 3, "adapter__type": "lora", "dpo__loss": loss}
    expected = run("single", 1, train__micro_batch_size=8, **changes)
    assert len(expected) == 3
    assert_alike(run("fsdp2", 2, train__micro_batch_size=4, **changes), expected)


def test_held_out_pairs_are_not_dropped_from_where_an_adapter_drops_its_input(run: Any):
    """DeepSpeed's engine does not know that its model is being evaluated."""
    changes = {"adapter__type": "lora", "adapter__dropout": 0.5, "train__learning_rate": 0.1, "train__steps": 1}
    of_ddp, of_zero2 = (run(strategy, 2, **changes, train__optimizer="sgd")[-1] for strategy in ("ddp", "zero2"))
    assert of_zero2["eval_loss"] == pytest.approx(of_ddp["eval_loss"], abs=1e-5)


def test_padded_pairs_give_the_run_of_flat_ones(run: Any, alone: Any):
    assert_alike(run("ddp", 2, model__attention="sdpa", train__micro_batch_size=2), alone("none"))


def test_references_that_are_computed_before_are_those_of_the_adapter_off(run: Any, alone: Any):
    assert_alike(run("single", 1, adapter__type="lora", dpo__reference="cached"), alone("lora"))


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("zero3", 2)])
def test_a_copy_of_the_weights_of_the_beginning_is_the_reference(strategy: str, world_size: int, run: Any, alone: Any):
    assert_alike(run(strategy, world_size, dpo__reference="model"), alone("none"))


def test_modules_that_are_trained_whole_beside_an_adapter_are_copied_with_it(run: Any):
    changes = {"adapter__type": "lora", "adapter__modules_to_save": ["lm_head"], "train__micro_batch_size": 8}
    found, expected = (run("single", 1, **changes, dpo__reference=name) for name in ("model", "adapter_off"))
    assert_alike(found, expected)


def test_a_resumed_run_takes_its_reference_from_the_weights_of_the_beginning(run: Any, alone: Any):
    run("fsdp2", 2, "saved", dpo__reference="model", checkpoint__every=3, checkpoint__keep=5)
    saved = run.folder / "saved" / "checkpoints" / "step-00000003"
    resumed = run("zero2", 2, "resumed", dpo__reference="model", checkpoint__resume=str(saved))
    assert_alike(resumed, alone("none")[3:])


def test_references_go_on_where_a_killed_run_was(
    run: Any,
    alone: Any,
    model_folder: Path,
    pairs: Path,
    held_out_pairs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(references, "AT_ONCE", 5)
    computed, answers = list[int](), references.reference_answers

    def counted(*args: Any) -> Any:
        computed.append(1)
        if len(computed) == 13:
            raise KeyboardInterrupt
        return answers(*args)

    monkeypatch.setattr(references, "reference_answers", counted)
    changes = {"train__steps": 6, "data__eval": str(held_out_pairs), "train__micro_batch_size": 4}
    config = scenarios.configuration(model_folder, pairs, tmp_path / "run", **changes)
    with pytest.raises(KeyboardInterrupt):
        preferences.tune(config, {})
    preferences.tune(config, {})
    assert len(computed) == 13 + (15 + 2) - 10  # 60 pairs and 7, four at a time: ten were written
    preferences.tune(config, {})
    assert len(computed) == 13 + (15 + 2) - 10
    assert_alike(scenarios.read_metrics(tmp_path / "run"), alone("none"))
