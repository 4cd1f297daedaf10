"""Averages of weights: those of PyTorch under every strategy, evaluated and saved, and of no effect on the training."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preferences
import pytest
import scenarios
import torch
import yaml
from parity import FP32_TOLERANCE, assert_parity, assert_really_active
from safetensors.torch import load_file
from test_not_finite import CONSTANT, train_with, with_gradients_of_nan
from thinning import thinned
from torch.optim.swa_utils import AveragedModel

from finetune import distributed
from finetune.checkpoint import resuming
from finetune.checkpoint.reader import open_checkpoint
from finetune.config import compatibility, sections
from finetune.export import checkpoint_export
from finetune.optim import averaging
from finetune.optim.optimizer import build_optimizer, state_bytes_of_weight, state_of
from finetune.optim.optimizer_state import Trained, state_tensors

DECAY = 0.3
"""Reached in the third step, so that steps before and after it are tried."""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(256, 8)
        self.norm = torch.nn.RMSNorm(256)
        self.unused = torch.nn.Linear(2, 2)


def optimizer_of(model: torch.nn.Module, name: str, weights: str = "fp32_master", **changes: Any) -> Any:
    settings: dict[str, Any] = {"learning_rate": 1e-1, "weight_decay": 0.1, "fused": False, "ema_decay": DECAY}
    optimizer = build_optimizer(model, name=name, weights=weights, rounding_seed=0, **settings | changes)
    averaging.keep_averages(optimizer)
    return optimizer


def averages_of(model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    states = {name: state_of(optimizer, parameter) for name, parameter in model.named_parameters()}
    return {name: state[averaging.AVERAGE] for name, state in states.items() if averaging.AVERAGE in state}


def pytorchs_average(ema: torch.Tensor, weights: torch.Tensor, step: Any) -> torch.Tensor:
    decay = min(DECAY, (1 + int(step)) / (10 + int(step)))
    return decay * ema + (1 - decay) * weights.float()


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *((name, "fp32_master") for name in ("adamw", "adamw_8bit", "lion_8bit", "adafactor", "sgd")),
        *((name, "bf16") for name in ("adamw", "adamw_8bit")),
    ],
)
def test_averages_are_those_of_pytorch_and_change_no_weight(name: str, weights: str):
    torch.manual_seed(0)
    model = Block().to(torch.bfloat16 if weights == "bf16" else torch.float32)
    plain = copy.deepcopy(model)
    reference = AveragedModel(copy.deepcopy(model).float(), avg_fn=pytorchs_average)
    reference.update_parameters(model)  # begins with the weights before the first step
    optimizer, without = optimizer_of(model, name, weights), optimizer_of(plain, name, weights, ema_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        for parameter, other in zip([*model.linear.parameters(), model.norm.weight], plain.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            other.grad = parameter.grad.clone()
        optimizer.step()
        without.step()
        reference.update_parameters(model)
    expected = dict(reference.module.named_parameters())
    found = averages_of(model, optimizer)
    assert found.keys() == {"linear.weight", "linear.bias", "norm.weight"}  # of what the optimizer has stepped on
    for key, average in found.items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average, expected[key], rtol=0, atol=1e-6)
        assert (average - model.get_parameter(key).float()).abs().max() > 1e-3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
    assert averages_of(plain, without) == {}


@pytest.mark.parametrize("fused", [False, True])  # a fused one is called all the same, and leaves the step out itself
def test_a_step_that_the_loss_scaler_leaves_out_leaves_the_averages(fused: bool):
    model = Block()
    optimizer, scaler = optimizer_of(model, "adamw", fused=fused), torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, torch.inf, 1.0):
        before = {key: value.clone() for key, value in averages_of(model, optimizer).items()}
        optimizer.zero_grad()
        scaler.scale((model.linear.weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        same = before == {} or torch.equal(before["linear.weight"], averages_of(model, optimizer)["linear.weight"])
        assert same == (factor == torch.inf or before == {})
    assert optimizer.state[model.linear.weight][averaging.AVERAGED_STEPS] == 2


def test_a_first_step_that_overflows_in_a_fused_optimizer_begins_the_averages_and_counts_for_nothing():
    model = Block()
    optimizer = optimizer_of(model, "adamw", fused=True)
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    for found_inf, counted in ((1.0, 0), (0.0, 1)):
        optimizer.found_inf, before = torch.tensor(found_inf), model.linear.weight.detach().clone()
        optimizer.step()
        state = optimizer.state[model.linear.weight]
        assert state[averaging.AVERAGED_STEPS] == state["step"] == counted
        assert torch.equal(before, state[averaging.AVERAGE]) == (counted == 0)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "sgd"])
def test_averages_that_are_made_to_be_read_are_the_weights_and_count_the_steps_of_the_checkpoint(name: str):
    strategy, model = distributed.Strategy("single", 0, 1, 1, "no", True), Block()
    wrapped: Any = SimpleNamespace(optimizer=optimizer_of(model, name))
    distributed.make_optimizer_state(model, wrapped)
    distributed.make_optimizer_state(model, wrapped)
    found = averages_of(model, wrapped.optimizer)
    assert largest_difference(found, {key: value.detach() for key, value in model.named_parameters()}) == 0
    pieces = {piece.name: piece for piece in distributed.pieces(strategy, model, wrapped)}
    assert pieces[distributed.AVERAGES + "linear.weight"].shape == (8, 256)
    assert distributed.optimizer_steps(strategy, model, wrapped) == dict.fromkeys(found, 0)
    distributed.set_optimizer_steps(strategy, model, wrapped, dict.fromkeys(found, 7))
    assert distributed.optimizer_steps(strategy, model, wrapped) == dict.fromkeys(found, 7)
    states = [state_of(wrapped.optimizer, parameter) for parameter in model.parameters()]
    assert {state[averaging.AVERAGED_STEPS] for state in states} == {7}


def test_first_steps_keep_less_so_that_a_short_run_is_not_its_beginning():
    assert [averaging.decay_at(0.999, step) for step in (1, 8, 10**6)] == [2 / 11, 0.5, 0.999]
    assert averaging.decay_at(0.1, 1) == 0.1


# -- runs ------------------------------------------------------------------------------------------------------------

STEPS = 4
EMA: dict[str, Any] = {"train__ema_decay": DECAY, "eval__every": 1}


class Runs:
    """Trains under a strategy, which is asserted to be active."""

    def __init__(self, ranks: Any, model: Path, rows: Path, held_out: Path) -> None:
        self.ranks, self.model, self.rows, self.held_out = ranks, model, rows, held_out
        self.weights_held: list[str] = []
        """Digests of what each process of the last run computed with at its end."""

    def __call__(self, strategy: str, world_size: int, folder: Path, **settings: Any) -> list[dict[str, Any]]:
        precision = settings.pop("mixed_precision", "no")
        changes = {
            "data__eval": str(self.held_out),
            "train__micro_batch_size": 4 // world_size,
            "train__steps": STEPS,
            "train__schedule": "constant",  # that of a run which is shorter at first
            "train__warmup_ratio": 0.0,
            "checkpoint__keep": 9,
        }
        config = scenarios.configuration(self.model, self.rows, folder, **changes | settings)
        launch: dict[str, Any] = {"strategy": strategy, "mixed_precision": precision}
        everyone = self.ranks(world_size).run(scenarios.train, config, **launch)
        for seen in everyone:
            assert_really_active(seen, strategy, world_size)
        self.weights_held = [seen["weights_held"] for seen in everyone]
        return scenarios.read_metrics(folder)


@pytest.fixture(scope="module")
def runs(ranks: Any, weights_folder: Path, conversations: Path, held_out: Path) -> Runs:
    return Runs(ranks, weights_folder, conversations, held_out)


@pytest.fixture(scope="module")
def averaged(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of one process that keeps averages, and evaluates them after each step."""
    folder = tmp_path_factory.mktemp("averaged") / "run"
    return folder, runs("single", 1, folder, **EMA)


def tensors(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint of a run."""
    found = open_checkpoint(folder)
    return dict(zip(found.shapes(prefix), (found.tensor(prefix + name) for name in found.shapes(prefix))))


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    assert found
    return max(float((found[name] - expected[name]).abs().max()) for name in found)


def test_training_is_the_same_to_the_bit_and_what_is_evaluated_and_saved_is_the_average(
    averaged: tuple[Path, list[dict[str, Any]]], runs: Runs, tmp_path: Path
):
    folder, metrics = averaged
    plain = runs("single", 1, tmp_path / "run", eval__every=1)
    for key in ("loss", "grad_norm"):
        assert [each[key] for each in metrics] == [each[key] for each in plain]
    assert largest_difference(tensors(folder, "weights/"), tensors(tmp_path / "run", "weights/")) == 0
    # an evaluation that forgot the averages would find the losses of the plain run
    assert min(abs(a["eval_loss"] - b["eval_loss"]) for a, b in zip(metrics, plain)) > 1e-4
    averages, final = tensors(folder, distributed.AVERAGES), load_file(folder / "final" / "model.safetensors")
    assert largest_difference({name: averages[name] for name in final}, final) == 0
    assert "weights: exponential moving average, decay 0.3\n" in (folder / "final" / "README.md").read_text()
    record = yaml.safe_load((folder / "run.yaml").read_text())
    assert record["config"]["train"]["ema_decay"] == DECAY
    assert record["eval_loss"]["after"] == metrics[-1]["eval_loss"]


@pytest.mark.parametrize("strategy", thinned(["fsdp2", "zero2", "zero3_offload"], ["ddp", "zero1", "zero3"]))
def test_averages_and_their_loss_are_those_of_one_process_under_every_strategy(
    strategy: str, averaged: tuple[Path, list[dict[str, Any]]], runs: Runs, tmp_path: Path
):
    folder, expected = averaged
    metrics = runs(strategy, 2, tmp_path / "run", **EMA)
    assert_parity(metrics, expected, FP32_TOLERANCE)
    assert [each["eval_loss"] for each in metrics] == pytest.approx([e["eval_loss"] for e in expected], abs=5e-6)
    prefix = distributed.AVERAGES
    assert largest_difference(tensors(tmp_path / "run", prefix), tensors(folder, prefix)) < 5e-6
    final, averages = load_file(tmp_path / "run" / "final" / "model.safetensors"), tensors(tmp_path / "run", prefix)
    assert largest_difference({name: averages[name] for name in final}, final) == 0


@pytest.mark.parametrize(("strategy", "weights"), [("fsdp2", "bf16"), ("zero2", "fp32_master")])
def test_weights_come_back_to_the_bit_after_evaluations_and_after_the_result(
    strategy: str, weights: str, runs: Runs, tmp_path: Path
):
    losses, held = [], []
    for settings in (EMA, {}):
        settings = settings | {"train__weights": weights, "train__steps": 3, "mixed_precision": "bf16"}
        losses.append([each["loss"] for each in runs(strategy, 2, tmp_path / "run", **settings)])
        held.append(runs.weights_held)
    assert losses[0] == losses[1]
    assert held[0] == held[1]


@pytest.mark.parametrize("strategy", thinned(["zero2"], ["ddp", "fsdp2", "zero3", "zero3_offload"]))
def test_a_step_that_is_not_finite_leaves_the_averages(
    strategy: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    found = []
    for steps, spoiled_calls in ((1, set[int]()), (2, {3})):  # the first micro-batch of the second step
        changes = {"train__ema_decay": DECAY, "train__steps": steps, "train__micro_batch_size": 2, **CONSTANT}
        config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes)
        given = with_gradients_of_nan, spoiled_calls, config
        assert [seen["num_processes"] for seen in ranks(2).run(train_with, *given, strategy=strategy)] == [2, 2]
        found.append(tensors(tmp_path / "run", distributed.AVERAGES))
    assert scenarios.read_metrics(tmp_path / "run")[-1]["not_finite"] == "gradient norm"
    assert largest_difference(*found) == 0


@pytest.mark.parametrize(("strategy", "world_size"), thinned([("fsdp2", 2)], [("single", 1), ("zero3", 2)]))
def test_averages_are_compared_with_the_weights_of_the_beginning(
    strategy: str, world_size: int, ranks: Any, model_folder: Path, tmp_path: Path
):
    rows, held_out = (preferences.write_pairs(tmp_path / f"{n}.jsonl", rows=n, seed=n) for n in (40, 7))
    found = []
    for reference in ("model", "cached"):
        changes = EMA | {"data__eval": str(held_out), "train__steps": 2, "train__learning_rate": 1e-2}
        config = scenarios.configuration(model_folder, rows, tmp_path / reference, **changes)
        given = config, {"reference": reference}
        assert ranks(world_size).run(preferences.tune, *given, strategy=strategy) == [world_size] * world_size
        found.append(scenarios.read_metrics(tmp_path / reference))
    for one, other in zip(*found):
        for name in ("loss", "eval_loss", "eval_kl", "eval_reward_margin"):
            assert one[name] == pytest.approx(other[name], abs=1e-5)
    assert abs(found[0][-1]["eval_kl"]) > 1e-3


def test_a_run_that_goes_on_under_another_strategy_has_the_averages_of_one_that_was_not_stopped(
    averaged: tuple[Path, list[dict[str, Any]]], runs: Runs, tmp_path: Path
):
    folder, expected = averaged
    runs("zero2", 2, tmp_path / "run", **EMA, train__steps=2)
    resumed = {"train__overwrite": False, "checkpoint__resume": "auto"}
    metrics = runs("fsdp2", 2, tmp_path / "run", **EMA, **resumed)
    assert metrics[-1]["eval_loss"] == pytest.approx(expected[-1]["eval_loss"], abs=5e-6)
    prefix = distributed.AVERAGES
    assert largest_difference(tensors(tmp_path / "run", prefix), tensors(folder, prefix)) < 5e-6


@pytest.mark.parametrize(
    ("strategy", "world_size", "settings"),
    [
        ("single", 1, {"adapter__type": "lora", "train__optimizer": "adamw_8bit", "adapter__rank": 4}),
        ("fsdp2", 2, {"train__weights": "bf16", "mixed_precision": "bf16"}),
        ("zero2", 2, {"adapter__type": "lora", "adapter__rank": 4, "train__optimizer": "sgd"}),
        ("zero3", 2, {"train__weights": "bf16", "mixed_precision": "bf16"}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_export_of_the_last_step_is_the_result_of_the_run(
    strategy: str, world_size: int, settings: dict[str, Any], runs: Runs, tmp_path: Path
):
    runs(strategy, world_size, tmp_path / "run", **EMA, **settings, train__learning_rate=1e-2, train__steps=2)
    told = checkpoint_export.export(tmp_path / "run", tmp_path / "exported")
    assert told["averaged"]
    assert checkpoint_export.describe(told).startswith("Exported the averaged ")
    name = "adapter_model.safetensors" if told["kind"] == "adapter" else "model.safetensors"
    final, exported = load_file(tmp_path / "run" / "final" / name), load_file(tmp_path / "exported" / name)
    assert largest_difference(exported, final) == 0
    averages, weights = tensors(tmp_path / "run", distributed.AVERAGES), tensors(tmp_path / "run", "weights/")
    assert averages.keys() == weights.keys()
    assert largest_difference({key: averages[key] for key in weights}, weights) > 1e-4


def test_the_best_evaluation_is_of_averages_and_they_are_the_result(runs: Runs, tmp_path: Path):
    settings = {"train__learning_rate": 0.5, "train__optimizer": "sgd", "train__max_grad_norm": 0.0}
    metrics = runs("fsdp2", 2, tmp_path / "run", **EMA, **settings, eval__keep_best=True, eval__metric="eval_loss")
    best = min(metrics, key=lambda each: each["eval_loss"])
    record = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert record["best"]["step"] == best["step"] < STEPS
    found = open_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{best['step']:08d}")
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    averages = {name: found.tensor(distributed.AVERAGES + name) for name in final}
    assert largest_difference(averages, final) == 0


# -- what is refused, and what is counted ----------------------------------------------------------------------------


def test_averages_are_not_kept_of_weights_on_disk():
    [problem] = compatibility.averaging_problems("zero3_nvme", averages=True)
    assert "use the strategy file zero3_offload" in problem
    assert compatibility.averaging_problems("zero3_nvme", averages=False) == []
    assert compatibility.averaging_problems("zero3_offload", averages=True) == []


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (0.0, 0.9, "train.ema_decay was 0 in c and is 0.9 now, but the checkpoint has no averages of its weights"),
        (None, 0.9, "the checkpoint has no averages"),
        (0.9, 0.0, "the checkpoint has averages of its weights, which were evaluated; set it back"),
        (0.9, 0.99, None),
        (None, 0.0, None),
    ],
)
def test_averages_are_not_begun_or_given_up_where_an_optimizer_goes_on(
    before: float | None, now: float, said: str | None
):
    averaged = {} if before is None else {"ema_decay": before}
    config: dict[str, Any] = {"adapter": {"type": "none", "init": "default"}, "train": averaged}
    run = {"config": config, "strategy": {"precision": "no"}}
    checkpoint: Any = SimpleNamespace(path="c", contents={"run": run})
    after = json.loads(json.dumps(config)) | {"train": {"ema_decay": now}}
    problems = resuming.config_problems(checkpoint, after, precision="no", weights_only=False)
    assert len(problems) == (said is not None)
    assert all(str(said) in problem for problem in problems)
    assert all("reset the optimizer with --checkpoint.resume_weights_only true" in problem for problem in problems)
    assert resuming.config_problems(checkpoint, after, precision="no", weights_only=True) == []


@pytest.mark.parametrize("decays", [(0.0, DECAY), (DECAY, 0.0), (DECAY, 0.9)])
def test_a_run_whose_optimizer_is_reset_takes_up_averages_gives_them_up_or_changes_them(
    decays: tuple[float, float], runs: Runs, tmp_path: Path
):
    settings: dict[str, Any] = {"eval__every": 1, "eval__keep_best": True, "eval__metric": "eval_loss"}
    settings |= {"checkpoint__every": 1, "train__overwrite": False}
    runs("single", 1, tmp_path / "run", **settings, train__ema_decay=decays[0], train__steps=2)
    resumed = {"checkpoint__resume": "auto", "checkpoint__resume_weights_only": True, "train__learning_rate": 0.5}
    metrics = runs("single", 1, tmp_path / "run", **settings, **resumed, train__ema_decay=decays[1])
    assert [each["step"] for each in metrics] == [1, 2, 3, 4]
    best = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["best"]["step"]
    assert metrics[1]["eval_loss"] < min(each["eval_loss"] for each in metrics[2:])
    assert best == (2 if all(decays) else min(metrics[2:], key=lambda each: each["eval_loss"])["step"])
    found = open_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{best:08d}")
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    prefix = distributed.AVERAGES if decays[1] else "weights/"
    assert largest_difference({name: found.tensor(prefix + name) for name in final}, final) == 0


def test_averages_take_four_bytes_of_each_trained_weight():
    for optimizer in ("adamw", "adamw_8bit", "paged_adamw_8bit", "sgd"):
        one = Trained(elements=4096, rows=64, width=4)
        more = sum(state_tensors(optimizer, "bf16", one, averages=True)) - sum(state_tensors(optimizer, "bf16", one))
        assert more == 4 * 4096
        assert state_bytes_of_weight(optimizer, 2, averages=True) - state_bytes_of_weight(optimizer, 2) == 4
    train = sections.Train(output_dir="o", ema_decay=0.9)
    without = sections.Train(output_dir="o")
    shapes = {"a": (3, 5), "b": (7,)}
    assert resuming.bytes_of(shapes, train) - resuming.bytes_of(shapes, without) == 4 * 22
