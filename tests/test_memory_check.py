"""The pass before the first step: the largest micro-batch, no trace of it, and want of memory in words."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scenarios
import torch
from accelerate import Accelerator
from thinning import thinned

from finetune.distributed.strategy import Strategy
from finetune.errors import InputError
from finetune.models.recomputation import recompute_activations
from finetune.optim.optimizer import state_bytes
from finetune.run import model_setup, session
from finetune.run.sizes import advice_on_memory
from finetune.training import loss, memory_check
from recipes import sft

LAUNCHES = thinned(
    [("single", 1), ("fsdp2", 2), ("zero3_offload", 2)], [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2)]
)


def train_without_it(config: Any) -> dict[str, Any]:
    with mock.patch.object(session, "check_memory"):
        return scenarios.train(config)


@pytest.mark.parametrize(("strategy", "world_size"), LAUNCHES)
def test_run_with_and_without_it_is_the_same(
    strategy: str, world_size: int, ranks: Any, weights_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(
        weights_folder,
        conversations,
        tmp_path / "run",
        train__steps=3,
        train__micro_batch_size=2,
        adapter__type="lora",
        adapter__dropout=0.3,  # the random state matters
    )
    found = []
    for function in (scenarios.train, train_without_it):
        everyone = ranks(world_size).run(function, config, strategy=strategy)
        assert [seen["num_processes"] for seen in everyone] == [world_size] * world_size
        metrics = scenarios.read_metrics(tmp_path / "run")
        figures = [(line["loss"], line["grad_norm"]) for line in metrics]
        found.append(([seen["weights_held"] for seen in everyone], figures))
    if strategy == "ddp":  # after its first backward pass it lays gradients out anew, which moves last bits
        pairs = zip(sum(found[0][1], ()), sum(found[1][1], ()))
        assert max(abs(one - other) for one, other in pairs) < 1e-6
    else:
        assert found[0] == found[1]


def check(loss_of: Any, **changes: Any) -> torch.nn.Module:
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    values: dict[str, Any] = {
        "optimizer_bytes": 10**15,
        "what": "The largest micro-batch (7 rows)",
        "advice": "Do this.",
    }
    before = torch.random.get_rng_state()
    memory_check.check_memory(
        accelerator, model, optimizer, lambda model, _: loss_of(model), dict, **(values | changes)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not optimizer.state
    return model


def test_gradients_random_state_and_optimizer_are_as_before():
    model = check(lambda model: model(torch.ones(2, 4)).sum())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_want_of_memory_is_told_with_the_batch_and_what_to_change():
    def fail(model: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    with pytest.raises(InputError, match=r"^The largest micro-batch \(7 rows\) does not fit .*20\.00 GiB.* Do this\.$"):
        check(fail)


def test_pass_is_made_as_in_training(
    weights_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    modes: list[bool] = []

    def watched(model: Any, layers: int | None, *, offloads: bool) -> None:
        recompute_activations(model, layers, offloads=offloads)
        model.register_forward_pre_hook(lambda module, args: modes.append(module.training))

    monkeypatch.setattr(model_setup, "recompute_activations", watched)
    changes = {"train__activation_checkpointing": "full", "train__steps": 2}
    sft.main(scenarios.configuration(weights_folder, conversations, tmp_path / "run", **changes))
    assert len(modes) > 2
    assert all(modes)  # nothing is evaluated here


def test_optimizer_state_in_host_memory_is_not_asked_of_the_gpu():
    assert state_bytes(torch.nn.Linear(8, 8), "adamw") == 0
    meta = torch.nn.Linear(8, 8, device="meta")
    assert state_bytes(meta, "adamw") == 0


@pytest.mark.slow
def test_recipe_checks_its_largest_micro_batch_before_anything_is_written(
    model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[int, ...]] = []
    original = loss.trained_positions

    def first_fails(next_tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(next_tokens.shape))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(loss, "trained_positions", first_fails)
    changes = {"train__micro_batch_size": 4, "train__epochs": 2.0, "train__steps": None}
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes)
    with pytest.raises(InputError) as error:
        sft.main(config)
    assert "4 rows of up to 64 tokens" in str(error.value)
    for change in ("train.micro_batch_size 2", "activation_checkpointing full", "data.max_length 32", "type lora"):
        assert change in str(error.value)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    monkeypatch.setattr(loss, "trained_positions", lambda given: seen.append(tuple(given.shape)) or original(given))
    sft.main(config)
    assert seen[0] == seen[1] == max(seen, key=lambda shape: shape[0] * shape[1])


def test_where_layers_are_divided_advice_names_more_processes_for_them(
    model_folder: Path, conversations: Path, tmp_path: Path
):
    deferring = {"train__pipeline_schedule": "zero_bubble"}
    every = {}, deferring, deferring | {"train__pipeline_parts": 2}, deferring | {"adapter__type": "lora"}
    plain, deferred, parts, adapter = (
        scenarios.configuration(model_folder, conversations, tmp_path, **each) for each in every
    )
    known: Any = {"rank": 0, "world_size": 8, "replicas": 1, "mixed_precision": "no", "rehearsal": True}
    staged = advice_on_memory(deferred, Strategy("pp", **known, stages=4))
    assert staged.startswith("Set one of train.pipeline_schedule 1f1b, train.activation_checkpointing full, ")
    # of several parts fewer are computed ahead than in 1f1b
    assert advice_on_memory(parts, Strategy("pp", **known, stages=4)).startswith("Set one of train.pipeline_parts 1, ")
    # gradients of adapters are not deferred
    assert "pipeline_schedule" not in advice_on_memory(adapter, Strategy("pp", **known, stages=4))
    assert staged.endswith("; or launch with more stages than 4 (--megatron_lm_pp_degree).")
    split = advice_on_memory(plain, Strategy("tp", **known, tensor=2))
    assert split.endswith("; or launch with more GPUs for each layer than 2 (--megatron_lm_tp_degree).")
    assert "pipeline" not in split
    assert "on more GPUs than 8 with a strategy that shards" in advice_on_memory(plain, Strategy("ddp", **known))
