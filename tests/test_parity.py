"""The same recipe gives the same losses and gradient norms under every strategy file, unchanged.

Reference: one process, the whole global batch as one micro-batch. Real configuration, real recipe, real classes;
a tiny GQA Llama in fp32, uneven masks, 20 steps.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
from parity import (
    ACCUMULATIONS,
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    LAUNCHES,
    MAX_GRAD_NORMS,
    OPTIMIZERS,
    ROWS_PER_STEP,
    assert_parity,
    assert_really_active,
    data_processes,
    differences,
)
from safetensors.torch import load_file

from finetune.distributed import deepspeed_ops
from finetune.output.run_files import environment

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "parity.json"
Run = Any


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest) -> Any:
    """Collects every comparison; written to benchmarks/results with --record-proofs."""
    rows: list[dict[str, Any]] = []
    yield rows
    if request.config.getoption("--record-proofs") and len(rows) == len(IN_FP32 + IN_BF16):
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        known = environment()
        hardware = {key: known["hardware"][key] for key in ("gpus", "cpus")}
        where = {"python": known["python"], "packages": known["packages"], "hardware": hardware}
        RESULTS.write_text(json.dumps({"environment": where, "comparisons": rows}, indent=1) + "\n")


@pytest.fixture(scope="module")
def run(ranks: Any, model_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train under a strategy file; asserts that it was really active and returns the metrics."""
    folder = tmp_path_factory.mktemp("parity")

    def train(strategy: str, world_size: int, mixed_precision: str = "no", **changes: Any) -> list[dict[str, Any]]:
        changes.setdefault("train__global_batch_size", ROWS_PER_STEP)
        config = scenarios.configuration(model_folder, conversations, folder / "run", **changes)
        group = ranks(world_size)
        everyone = group.run(scenarios.train, config, strategy=strategy, mixed_precision=mixed_precision)
        for seen in everyone:
            assert_really_active(seen, strategy, world_size)
        half = max(1, world_size // 2)
        for rank, seen in enumerate(everyone):
            first = rank // half * half  # of its half of the processes
            alike = {"ddp": 0, "hsdp": rank % half, "pp": first, "tp": rank % 2, "tp_pp": first + rank % 2}
            same = alike.get(strategy, rank)
            assert seen["weights_held"] == everyone[same]["weights_held"], "replicas differ"  # to the bit
        train.weights = load_file(folder / "run" / "final" / "model.safetensors")
        return scenarios.read_metrics(folder / "run")

    return train


@pytest.fixture(scope="module")
def reference(run: Run) -> Callable[..., list[dict[str, Any]]]:
    """The run on one process with these settings, computed once."""
    known: dict[tuple[str, float, str], Any] = {}

    def lookup(optimizer: str, max_grad_norm: float, mixed_precision: str = "no") -> list[dict[str, Any]]:
        key = (optimizer, max_grad_norm, mixed_precision)
        if key not in known:
            settings = changes_for(optimizer, max_grad_norm, ROWS_PER_STEP)
            known[key] = run("single", 1, mixed_precision, **settings), run.weights
        metrics, lookup.weights = known[key]
        return metrics

    return lookup


def changes_for(optimizer: str, max_grad_norm: float, micro_batch_size: int) -> dict[str, Any]:
    return {
        "train__optimizer": optimizer,
        "train__learning_rate": OPTIMIZERS[optimizer],
        "train__max_grad_norm": max_grad_norm,
        "train__micro_batch_size": micro_batch_size,
    }


def skip_what_this_machine_lacks(strategy: str) -> None:
    if strategy == "zero3_nvme" and deepspeed_ops.NO_LIBAIO in deepspeed_ops.problems(nvme=True):
        pytest.skip(deepspeed_ops.NO_LIBAIO)


IN_FP32 = [
    (strategy, world_size, "fp32", optimizer, max_grad_norm, accumulation)
    for strategy, world_size in [("single", 1), *LAUNCHES]
    for optimizer in OPTIMIZERS
    for max_grad_norm in MAX_GRAD_NORMS
    for accumulation in ACCUMULATIONS
    if (strategy, optimizer) != ("zero3_nvme", "sgd")  # refused, see below
]
IN_BF16 = [(strategy, world_size, "bf16", "adamw", 0.5, 2) for strategy, world_size in LAUNCHES]


@pytest.mark.parametrize("combination", IN_FP32, ids=scenarios.point_id)
def test_losses_and_gradient_norms_are_those_of_one_process(
    combination: Any, run: Run, reference: Any, recorded: list[dict[str, Any]]
):
    strategy, world_size, _, optimizer, max_grad_norm, accumulation = combination
    skip_what_this_machine_lacks(strategy)
    settings = changes_for(
        optimizer, max_grad_norm, ROWS_PER_STEP // (data_processes(strategy, world_size) * accumulation)
    )
    expected, expected_weights = reference(optimizer, max_grad_norm), reference.weights
    metrics = run(strategy, world_size, **settings)
    assert len(metrics) == scenarios.STEPS
    assert_parity(metrics, expected, FP32_TOLERANCE)
    assert run.weights.keys() == expected_weights.keys()
    for name, weight in expected_weights.items():
        difference = (run.weights[name] - weight).abs()
        assert difference.mean() < 1e-6, name
        assert difference.max() < (1e-5 if optimizer == "sgd" else 1e-3), name  # Adam scales rounding errors up
    assert all(m["grad_norm"] > max_grad_norm for m in metrics)  # the norm before clipping
    recorded.append(
        {
            "strategy": strategy,
            "processes": world_size,
            "precision": "fp32",
            "optimizer": optimizer,
            "max_grad_norm": max_grad_norm,
            "accumulation": accumulation,
            **differences(metrics, expected),
        }
    )


def test_nvme_offload_with_another_optimizer_than_adam_is_refused(run: Run):
    with pytest.raises(AssertionError, match=r"only works with DeepSpeed's CPU Adam; set train\.optimizer to adamw"):
        run("zero3_nvme", 2, train__optimizer="sgd")


@pytest.mark.parametrize("combination", IN_BF16, ids=scenarios.point_id)
def test_bf16_losses_stay_within_the_stated_tolerance(
    combination: Any, run: Run, reference: Any, recorded: list[dict[str, Any]]
):
    strategy, world_size, precision, optimizer, max_grad_norm, accumulation = combination
    skip_what_this_machine_lacks(strategy)
    settings = changes_for(
        optimizer, max_grad_norm, ROWS_PER_STEP // (data_processes(strategy, world_size) * accumulation)
    )
    metrics = run(strategy, world_size, precision, **settings)
    expected = reference(optimizer, max_grad_norm, precision)
    assert_parity(metrics, expected, BF16_TOLERANCE)
    exact = reference(optimizer, max_grad_norm)
    assert_parity(metrics, exact, BF16_TOLERANCE)
    assert differences(metrics, exact)["loss"] > FP32_TOLERANCE["loss"]  # it was computed in bf16
    found = differences(metrics, expected)
    recorded.append({"strategy": strategy, "processes": world_size, "precision": "bf16", **found})


@pytest.mark.parametrize(
    ("strategy", "recomputed"),
    [
        *[("ddp", "full"), ("fsdp2", "full"), ("zero3", "full")],
        *[("ddp", 1), ("fsdp2", 1), ("zero1", 1), ("zero3", 1)],
        *[("ddp", "offload"), ("fsdp2", "offload"), ("zero2", "offload"), ("zero3", "offload")],
        *[("fsdp2_offload", "offload"), ("zero3_offload", "offload")],
    ],
)
def test_recomputed_activations_change_nothing(strategy: str, recomputed: Any, run: Run, reference: Any):
    settings = changes_for("sgd", 0.5, 4) | {"train__activation_checkpointing": recomputed}
    assert_parity(run(strategy, 2, **settings), reference("sgd", 0.5), FP32_TOLERANCE)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_bf16_weights_without_masters_follow_the_fp32_run_under_every_strategy(strategy: str, run: Run, reference: Any):
    settings = changes_for("adamw", 0.5, 4) | {"train__weights": "bf16"}
    metrics, expected = run(strategy, 2, "bf16", **settings), reference("adamw", 0.5)
    assert max(abs(one["loss"] - other["loss"]) for one, other in zip(metrics, expected)) < 2e-2
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5
    norms = torch.tensor([each["grad_norm"] for each in metrics])
    assert not norms.equal(norms.bfloat16().float())  # of gradients in bf16, computed in fp32


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_last_step_with_fewer_rows_and_processes_without_any_gives_the_same_run(strategy: str, run: Run):
    partial = {"train__steps": None, "train__epochs": 0.62, "train__micro_batch_size": 2}  # 50 of 80 rows
    expected, metrics = run("single", 1, **partial), run(strategy, 2, **partial)
    assert len(metrics) == 4
    assert metrics[-1]["tokens"] < min(m["tokens"] for m in metrics[:-1])
    assert_parity(metrics, expected, FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "world_size"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("zero2", 2), ("zero3", 2)]
)
def test_packed_rows_give_the_run_of_one_process(strategy: str, world_size: int, run: Run):
    packed = changes_for("sgd", 0.5, 2) | {"data__packing": True}
    expected = run("single", 1, **packed)
    metrics = run(strategy, world_size, **packed)
    assert len(metrics) == scenarios.STEPS
    assert_parity(metrics, expected, FP32_TOLERANCE)
    # no position is spent on padding, and rows hold several documents
    assert [m["total_tokens"] for m in metrics] == [m["total_tokens"] for m in expected]
    assert min(m["total_tokens"] for m in metrics) > 0.8 * ROWS_PER_STEP * 64


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_padded_rows_give_the_run_of_flat_ones(strategy: str, run: Run):
    settings = changes_for("sgd", 0.5, 4) | {"train__steps": 6}
    flat, padded = run("single", 1, **settings), run(strategy, 2, **settings | {"model__attention": "sdpa"})
    assert_parity(padded, flat, FP32_TOLERANCE)
    assert all(more["total_tokens"] > m["total_tokens"] for more, m in zip(padded, flat))
    assert [m["total_tokens"] for m in run(strategy, 2, **settings)] == [m["total_tokens"] for m in flat]


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero3", 2)])
def test_plain_kernels_give_the_run_of_fused_ones(strategy: str, world_size: int, run: Run, reference: Any):
    settings = changes_for("adamw", 0.5, ROWS_PER_STEP // world_size) | {"model__kernels": "plain"}
    assert_parity(run(strategy, world_size, **settings), reference("adamw", 0.5), FP32_TOLERANCE)


def test_run_after_zero3_in_the_same_process_computes_with_pytorchs_own_linear(run: Run, ranks: Any):
    run("zero3", 2, **changes_for("sgd", 0.0, 2))
    assert ranks(2).run(scenarios.linear_is_pytorchs, strategy="ddp") == [True, True]
