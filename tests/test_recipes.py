"""What every recipe promises: one run under every strategy, resumed under another, steps that leave no trace if their
numbers are bad, and refusals before anything is written."""

from itertools import product
from pathlib import Path
from typing import Any

import distillation
import every_recipe
import pytest
import scenarios
import torch
from every_recipe import RECIPES, Recipe
from safetensors.torch import load_file

from finetune.config.compatibility import Cell, refusal
from finetune.errors import InputError

LAUNCHES = [("ddp", 2), ("fsdp2", 2), ("zero2", 2), ("zero3", 2), ("hsdp", 4)]
LAUNCHES += [("ddp", 4), ("fsdp2", 4), ("zero2", 4), ("zero3", 4), ("zero1", 2)]
LAUNCHES += [("fsdp2_offload", 2), ("zero3_offload", 2)]
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter__type": "lora", "adapter__rank": 4},
    "qlora": {"adapter__type": "lora", "adapter__rank": 4, "quantization__bits": 4},
}
POINTS = [
    (recipe, *launch, method)
    for recipe, launch, method in product(RECIPES, LAUNCHES, METHODS)
    if not refusal(Cell(launch[0], 4 if method == "qlora" else None, "none" if method == "full" else "lora", "adamw"))
]
TOGETHER = [
    (recipe, *launch, method)
    for recipe, launch, method in product(
        RECIPES, [("cp", 2), ("ulysses", 2), ("cp", 4), ("pp", 2), ("pp", 4), ("fsdp2_pp", 4)], METHODS
    )
    if recipe.name in ("sft", "pretrain")
]
"""Where several processes compute each row: answers that are compared are refused there."""
SPLIT = [
    (recipe, *launch, method)
    for recipe, launch, method in product(RECIPES, [("tp", 2), ("tp", 4), ("fsdp2_tp", 4)], ("full", "lora"))
]
"""Where several processes compute the same rows. In 4 bits the model is too small to split."""
SPLIT += [
    (recipe, strategy, 4, method)
    for recipe, strategy, method in product(RECIPES, ("tp_pp", "cp_tp"), ("full", "lora"))
    if recipe.name in ("sft", "pretrain")
]
POINTS += TOGETHER + SPLIT
CHAIN = ["fsdp2", "zero3", "ddp", "zero2"]


def name_of(value: Any) -> str:
    """Of a recipe, a strategy, ..., in the name of a test."""
    return value.name if isinstance(value, Recipe) else str(value)


of_every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=name_of)


@pytest.fixture(scope="module")
def run(ranks: Any, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("recipes")
    files = {
        recipe.write: [
            recipe.write(folder / f"{i}-{seed}.jsonl", rows=rows, seed=seed) for seed, rows in ((0, 60), (1, 7))
        ]
        for i, recipe in enumerate(RECIPES)
    }

    def train(
        recipe: Recipe,
        strategy: str,
        world_size: int,
        name: str = "run",
        spoiled_step: int | None = None,
        **changes: Any,
    ) -> list[dict[str, Any]]:
        rows, held_out = files[recipe.write]
        output = folder / recipe.name / name
        values = every_recipe.values_of(recipe, model_folder, rows, output, data__eval=[str(held_out)], **changes)
        asked = (every_recipe.train, recipe.module.__name__, values, spoiled_step)
        assert ranks(world_size).run(*asked, strategy=strategy) == [world_size] * world_size
        return scenarios.read_metrics(output)

    train.folder = folder
    return train


@pytest.fixture(scope="module")
def alone(run: Any) -> Any:
    """The metrics of one process, with each method; all rows of a step are one micro-batch."""
    known: dict[tuple[str, str], Any] = {}

    def metrics(recipe: Recipe, method: str) -> Any:
        key = recipe.like or recipe.name, method
        if key not in known:
            [own] = [each for each in RECIPES if each.name == key[0]]
            known[key] = run(own, "single", 1, train__micro_batch_size=8, **METHODS[method])
        return known[key]

    return metrics


def assert_alike(recipe: Recipe, found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    near = {"rel": 1e-5, "abs": recipe.absolute}
    for one, other in zip(found, expected):
        for name in recipe.compared:
            if name != "accuracy" or not recipe.is_at_the_beginning(other):
                assert one[name] == pytest.approx(other[name], **near), (one["step"], name)
    for name in recipe.held_out:
        assert found[-1][name] == pytest.approx(expected[-1][name], **near), name


def test_a_recipe_of_ones_own_is_short():
    assert len(Path(distillation.__file__).read_text().splitlines()) < 60


@of_every_recipe
def test_it_learns(recipe: Recipe, alone: Any):
    first, *_, last = alone(recipe, "full")
    assert last["loss"] < first["loss"]


@pytest.mark.parametrize(
    ("recipe", "strategy", "world_size", "method"),
    POINTS,
    ids=name_of,
)
def test_a_strategy_gives_the_run_of_one_process(
    recipe: Recipe, strategy: str, world_size: int, method: str, run: Any, alone: Any
):
    assert_alike(recipe, run(recipe, strategy, world_size, **METHODS[method]), alone(recipe, method))


@pytest.mark.parametrize(
    ("recipe", "before", "after"),
    [(recipe, CHAIN[i % 4], CHAIN[(i + 1) % 4]) for i, recipe in enumerate(RECIPES)],
    ids=name_of,
)
def test_a_run_resumed_under_another_strategy_is_the_uninterrupted_one(
    recipe: Recipe, before: str, after: str, run: Any, alone: Any
):
    run(recipe, before, 2, "saved", checkpoint__every=3, checkpoint__keep=5)
    step = run.folder / recipe.name / "saved" / "checkpoints" / "step-00000003"
    resumed = run(recipe, after, 2, "resumed", checkpoint__resume=str(step))
    assert_alike(recipe, resumed, alone(recipe, "full")[3:])


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [(recipe, CHAIN[i % 4]) for i, recipe in enumerate(RECIPES)],
    ids=name_of,
)
def test_a_step_with_bad_numbers_on_one_process_leaves_no_trace_on_any(recipe: Recipe, strategy: str, run: Any):
    constant = {"train__schedule": "constant", "train__warmup_ratio": 0.0}
    run(recipe, strategy, 2, "one", **constant, train__steps=1)
    found = run(recipe, strategy, 2, "two", 2, **constant, train__steps=2)
    assert ["not_finite" in line for line in found] == [False, True]
    weights = [load_file(run.folder / recipe.name / name / "final" / "model.safetensors") for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__train": "missing.jsonl"}, "missing.jsonl: there is no such data file"),
        ({"train__global_batch_size": 7, "train__micro_batch_size": 2}, "train.global_batch_size 7 does not divide"),
        ({"model__attention": "flash_attention_2"}, "flash_attention_2"),
        ({"adapter__type": "lora", "adapter__targets": ["nothing"]}, "nothing"),
        ({"checkpoint__resume": "missing"}, "missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@of_every_recipe
def test_it_refuses_what_every_recipe_refuses_before_it_writes_anything(
    recipe: Recipe,
    changes: dict[str, Any],
    said: str,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    rows = recipe.write(tmp_path / "rows.jsonl", rows=9)
    changes = {"train__overwrite": "checkpoint__resume" not in changes} | changes
    values = every_recipe.values_of(recipe, model_folder, rows, tmp_path / "out", **changes)
    with pytest.raises(InputError, match=said):
        every_recipe.train(recipe.module.__name__, values)
    assert not (tmp_path / "out").exists()
