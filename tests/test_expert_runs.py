"""Runs whose processes share the experts of a mixture are those of one process, and go on under every strategy."""

import json
from pathlib import Path
from typing import Any

import balancing
import every_recipe
import experts
import pytest
import scenarios
import sharing
import torch
from parity import BF16_TOLERANCE, FP32_TOLERANCE, OF_MIXTURES, assert_parity, assert_really_active
from safetensors.torch import load_file
from test_families import MIXTURES
from thinning import thinned

from finetune.output.run_files import read_run
from finetune.training.router_balance import FIGURE

HALF, STEPS = 10, 20
LORA: dict[str, Any] = {"adapter__type": "lora", "adapter__rank": 4, "train__learning_rate": 0.05}
ADAMW: dict[str, Any] = {"train__optimizer": "adamw", "train__learning_rate": 1e-3}
METHODS = {"full": {}, "lora": LORA, "full, adamw": ADAMW}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {family: balancing.mixture_folder(folder / family, family) for family in (*MIXTURES, "qwen2_moe")}


@pytest.fixture(scope="module")
def run(ranks: Any, models: dict[str, Path], conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train; returns the metrics, and leaves what processes saw in ``seen``."""
    folder = tmp_path_factory.mktemp("experts")

    def train(
        strategy: str, world_size: int, *, size: int = 2, output: Path | None = None, bug: str = "", **changes: Any
    ) -> Any:
        precision, family = changes.pop("precision", "no"), changes.pop("family", "mixtral")
        settings = {
            "train__optimizer": "sgd",
            "train__learning_rate": 0.2,
            "train__max_grad_norm": 0.5,
            "train__micro_batch_size": 8 if world_size == 1 else 2,
            "train__steps": STEPS,
        }
        output = output or folder / "run"
        config = scenarios.configuration(models[family], conversations, output, **settings | changes)
        trained: tuple[Any, ...] = (scenarios.train, config)
        if strategy == "ep":
            trained = (experts.train_with, bug, config) if bug else (experts.shared_by, size, config)
        train.seen = ranks(world_size).run(*trained, strategy=strategy, mixed_precision=precision)
        for seen in train.seen:
            assert seen["world_size"] == seen["num_processes"] == world_size
            if strategy == "ep" and size == 2:
                assert_really_active(seen, strategy, world_size)
        return scenarios.read_metrics(output)

    return train


@pytest.fixture(scope="module")
def reference(run: Any) -> Any:
    """The run of one process, trained once."""
    known: dict[str, Any] = {}

    def lookup(**changes: Any) -> Any:
        key = repr(changes)
        if key not in known:
            known[key] = run("single", 1, **changes)
        return known[key]

    return lookup


@pytest.mark.parametrize(
    ("strategy", "world_size", "method"),
    thinned(
        [("ep", 2, "full"), ("ep", 4, "lora")],
        [("ep", 4, "full"), ("ep", 2, "lora"), ("ep", 2, "full, adamw"), ("ep", 4, "full, adamw")],
    ),
)
def test_losses_and_gradient_norms_are_those_of_one_process(
    strategy: str, world_size: int, method: str, run: Any, reference: Any
):
    expected, metrics = reference(**METHODS[method]), run(strategy, world_size, **METHODS[method])
    assert len(metrics) == STEPS
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert_parity(metrics, expected, FP32_TOLERANCE)
    held = [seen["weights_held"] for seen in run.seen]
    assert len(set(held)) == 2  # shares
    assert held == held[:2] * (world_size // 2)  # their copies, to the bit


SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"family": "qwen2_moe"},
    "qwen3_moe, layers computed again": {"family": "qwen3_moe", "train__activation_checkpointing": "full"},
    "packed, experts balanced": {"data__packing": True, "train__router_aux_loss_coef": 0.5},
    "padded, one row at a time": {"model__attention": "sdpa", "train__micro_batch_size": 1},
    "lora, activations in host memory": LORA | {"family": "qwen3_moe", "train__activation_checkpointing": "offload"},
    "a last step of fewer rows": {"train__steps": None, "train__epochs": 0.25},
    "rates by layer": {"train__layer_decay": 0.5},
    "an adapter that starts with the weights": LORA | {"adapter__targets": ["q_proj"], "adapter__init": "pissa"},
}


@pytest.mark.parametrize("name", thinned(list(SETTINGS)[:4], list(SETTINGS)[4:]))
def test_settings_train_as_on_one_process(name: str, run: Any, reference: Any):
    changes = {"train__steps": 4} | SETTINGS[name]
    expected, metrics = reference(**changes | {"train__micro_batch_size": 8}), run("ep", 2, **changes)
    assert_parity(metrics, expected, FP32_TOLERANCE)
    assert [m.get(FIGURE) for m in metrics] == pytest.approx([m.get(FIGURE) for m in expected], abs=1e-5)


def test_each_of_four_processes_may_have_one_expert(run: Any, reference: Any):
    changes = {"train__steps": 4}
    expected, metrics = reference(**changes), run("ep", 4, size=4, **changes)
    assert_parity(metrics, expected, FP32_TOLERANCE)
    assert [seen["share_held"] for seen in run.seen] == [1 / 4] * 4
    assert len({seen["weights_held"] for seen in run.seen}) == 4


def test_step_that_is_not_finite_on_one_process_is_left_out_on_all(
    ranks: Any, models: dict[str, Path], conversations: Path, tmp_path: Path
):
    [recipe] = [each for each in every_recipe.RECIPES if each.name == "sft"]
    values = every_recipe.values_of(recipe, models["mixtral"], conversations, tmp_path / "run", train__steps=3)
    assert ranks(2).run(every_recipe.train, recipe.module.__name__, values, 2, strategy="ep") == [2, 2]
    first, second, third = scenarios.read_metrics(tmp_path / "run")
    assert second["not_finite"] == "gradient norm"
    assert first["grad_norm"] > 0
    assert third["grad_norm"] > 0


def test_bf16_losses_stay_within_the_stated_tolerance(run: Any, reference: Any):
    changes = METHODS["full, adamw"] | {"precision": "bf16"}
    assert_parity(run("ep", 2, **changes), reference(**changes), BF16_TOLERANCE)


def test_replicas_of_bf16_weights_stay_alike(run: Any):
    run("ep", 4, **ADAMW, precision="bf16", train__weights="bf16", train__steps=4)
    held = [seen["weights_held"] for seen in run.seen]
    assert held == held[:2] * 2


@pytest.mark.parametrize(
    ("bug", "complaint"), [("experts added up over all", "differs"), ("norms of own experts", "grad_norm differs")]
)
def test_parity_check_rejects(bug: str, complaint: str, run: Any, reference: Any):
    changes = {"train__steps": 4, "train__max_grad_norm": 0.0}
    with pytest.raises(AssertionError, match=complaint):
        assert_parity(run("ep", 2, bug=bug, **changes), reference(**changes), FP32_TOLERANCE)


@pytest.mark.parametrize(("strategy", "world_size"), OF_MIXTURES)
def test_result_is_saved_as_by_one_process(strategy: str, world_size: int, run: Any, tmp_path: Path):
    """To the bit: the steps are too small to change a weight."""
    for name, launch in (("alone", ("single", 1)), ("shared", (strategy, world_size))):
        run(*launch, output=tmp_path / name, train__learning_rate=1e-30, train__steps=1)
    alone, shared = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("alone", "shared"))
    assert alone.keys() == shared.keys()
    assert any("experts" in name for name in alone)
    for name, weight in alone.items():
        assert torch.equal(shared[name], weight), name
    files = [sorted(each.name for each in (tmp_path / name / "final").iterdir()) for name in ("alone", "shared")]
    assert files[0] == files[1]


OTHERS = [("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero2", 2), ("zero3", 2), ("pp", 2)]
PAIRS = [
    *((("ep", 2), each) for each in OTHERS),
    *((each, ("ep", 2)) for each in OTHERS),
    (("ep", 2), ("ep", 2)),
    (("ep", 2), ("ep", 4)),
    (("ep", 4), ("ep", 2)),
    (("ep", 4), ("single", 1)),
]
KEPT = [(("ep", 2), ("fsdp2", 2)), (("zero2", 2), ("ep", 4))]


@pytest.mark.parametrize("method", ["full, adamw", pytest.param("lora", marks=pytest.mark.prove)])
@pytest.mark.parametrize(
    ("before", "after"),
    thinned(KEPT, [pair for pair in PAIRS if pair not in KEPT]),
    ids=lambda each: f"{each[0]}x{each[1]}",
)
def test_checkpoints_go_on_under_every_strategy(
    before: Any, after: Any, method: str, run: Any, reference: Any, tmp_path: Path
):
    changes = ADAMW if method == "full, adamw" else LORA | ADAMW
    expected, folder = reference(**changes), tmp_path / "run"
    whole = changes | {"output": folder, "checkpoint__every": HALF, "train__overwrite": False}
    if before != ("single", 1):
        whole |= {"train__micro_batch_size": 2}
    run(*before, **whole)
    from_half = {"checkpoint__resume": str(folder / "checkpoints" / f"step-{HALF:08}")}
    resumed = run(*after, **changes, **from_half, output=tmp_path / "resumed", train__micro_batch_size=2)
    assert [m["step"] for m in resumed] == list(range(HALF + 1, STEPS + 1))
    assert_parity(resumed, expected[HALF:], FP32_TOLERANCE)


def test_state_in_8_bits_goes_on(run: Any, tmp_path: Path):
    changes = ADAMW | {"train__optimizer": "adamw_8bit"}
    whole = run("ep", 2, output=tmp_path / "run", checkpoint__every=HALF, **changes)
    from_half = {"checkpoint__resume": str(tmp_path / "run" / "checkpoints" / f"step-{HALF:08}")}
    resumed = run("ep", 2, output=tmp_path / "resumed", **from_half, **changes)
    assert [m["loss"] for m in resumed] == [m["loss"] for m in whole[HALF:]]


def test_held_out_losses_answers_and_scores_are_those_of_one_process(run: Any, held_out: Path, tmp_path: Path):
    words = ["house", "tree", "dog", "cat", "red"]
    rows = [{"question": f"the red {word}", "answer": word, "choices": [word, "green"]} for word in words]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"name": name, "data": str(tmp_path / "task.jsonl"), "score": name} for name in ("exact_match", "choice")]
    changes = {
        "data__eval": [str(held_out)],
        "eval__every": 2,
        "eval__prompts": 3,
        "eval__tasks": tasks,
        "train__ema_decay": 0.5,
        "train__steps": 4,
        "train__micro_batch_size": 2,
    }
    found = {}
    for name, launch in (("alone", ("single", 1)), ("shared", ("ep", 4))):
        found[name] = run(*launch, output=tmp_path / name, **changes)
    assert_parity(found["shared"], found["alone"], FP32_TOLERANCE)
    for one, other in zip(found["shared"], found["alone"], strict=True):
        for key in ("eval_loss", "eval_exact_match", "eval_choice"):
            assert one.get(key) == pytest.approx(other.get(key), abs=1e-5)
    answers = [read_run(tmp_path / name)["answers"] for name in ("shared", "alone")]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3


REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "three processes for the experts": ({"MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE": "3"}, {}, "launch a multiple of 3"),
    "stages beside them": (
        {"MEGATRON_LM_PP_DEGREE": "2"},
        {},
        "for which there is no strategy; use the strategy file pp or ep.",
    ),
    "nothing to share": ({"MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE": "1"}, {}, "to 2 or more"),
    "adafactor": ({}, {"train__optimizer": "adafactor"}, "ep gives each process only a part of them"),
    "4 bits": ({}, LORA | {"quantization__bits": 4}, "which bitsandbytes does not quantise"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launches_and_settings_that_do_not_go_with_it_are_refused(
    name: str, ranks: Any, models: dict[str, Path], conversations: Path, tmp_path: Path
):
    environment, changes, sentence = REFUSED[name]
    config = scenarios.configuration(models["mixtral"], conversations, tmp_path / "run", **changes)
    asked = "recipes.sft", config.model_dump(), environment
    for said in ranks(2).run(sharing.refused_by_a_run, *asked, strategy="ep"):
        assert sentence in said
    assert not (tmp_path / "run").exists()


def test_a_dense_model_is_refused(ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path):
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run")
    for said in ranks(2).run(sharing.refused_by_a_run, "recipes.sft", config.model_dump(), {}, strategy="ep"):
        assert said.startswith("ep shares the experts of each layer, and LlamaForCausalLM has none that can be shared")


@pytest.mark.parametrize("name", ["dpo", "pretrain"])
def test_other_recipes_train_as_on_one_process(name: str, ranks: Any, models: dict[str, Path], tmp_path: Path):
    [recipe] = [each for each in every_recipe.RECIPES if each.name == name]
    data, found = recipe.write(tmp_path / "rows.jsonl", rows=40, seed=0), {}
    for launch, processes in (("single", 1), ("ep", 2)):
        values = every_recipe.values_of(recipe, models["mixtral"], data, tmp_path / launch)
        asked = every_recipe.train, recipe.module.__name__, values
        assert ranks(processes).run(*asked, strategy=launch) == [processes] * processes
        found[launch] = scenarios.read_metrics(tmp_path / launch)
    assert len(found["ep"]) == len(found["single"]) == 6
    for one, other in zip(found["ep"], found["single"]):
        for key in set(recipe.compared) - {"accuracy"}:  # at the beginning it is luck
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=recipe.absolute), (one["step"], key)
