"""The recipes as rows of one table: what ``test_recipes`` asks of each. A recipe that is added adds a row."""

import importlib
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corpora
import distillation
import preferences
import tiny

from finetune.run.session import Session
from finetune.training import step
from recipes import dpo, pretrain, sft

REWARDS = ("reward_chosen", "reward_rejected", "accuracy")


@dataclass(frozen=True)
class Recipe:
    """A recipe with the data that it learns from."""

    name: str
    module: types.ModuleType
    write: Callable[..., Path]
    """A file of so many rows, drawn from a seed."""
    values: dict[str, Any] = field(default_factory=dict)
    """Of its own, as ``section__key``."""
    compared: tuple[str, ...] = ("loss", "grad_norm", "tokens")
    """Figures of a step that no strategy changes."""
    held_out: tuple[str, ...] = ("eval_loss",)
    absolute: float = 2e-6
    """By which a strategy may differ, beside 1e-5 of each figure: of sums of log-probabilities, more than of means."""
    is_at_the_beginning: Callable[[dict[str, Any]], bool] = lambda metrics: False
    """The model is its own reference: rewards are 0, but for rounding, and what is compared of them is luck."""
    like: str | None = None
    """The recipe whose run on one process it repeats, and is compared with; None for its own."""


RECIPES = (
    Recipe("sft", sft, tiny.write_conversations),
    Recipe(
        "dpo",
        dpo,
        preferences.write_pairs,
        compared=("loss", "grad_norm", "tokens", "reward_margin", "kl", *REWARDS),
        held_out=("eval_loss", "eval_reward_margin", "eval_accuracy", "eval_kl"),
        absolute=1e-5,
        is_at_the_beginning=lambda metrics: abs(metrics["loss"] - 0.693147) < 1e-5,
    ),
    Recipe(
        "simpo",
        dpo,
        preferences.write_pairs,
        {"dpo__loss": "simpo"},
        compared=("loss", "grad_norm", "tokens", "reward_margin", *REWARDS),
        held_out=("eval_loss", "eval_reward_margin", "eval_accuracy"),
        absolute=1e-5,
    ),
    Recipe(
        "kto",
        dpo,
        preferences.write_judged,
        {"dpo__loss": "kto"},
        compared=("loss", "grad_norm", "tokens", "reference_point", "kl", *REWARDS),
        held_out=("eval_loss", "eval_reward_chosen", "eval_accuracy", "eval_kl"),
        absolute=1e-5,
        is_at_the_beginning=lambda metrics: abs(metrics["loss"] - 0.5) < 1e-5,
    ),
    Recipe(
        "pretrain",
        pretrain,
        corpora.write_texts,
        {"pretrain__z_loss": 1e-3, "train__decay_embeddings": False, "train__schedule": "wsd"},
        compared=("loss", "grad_norm", "tokens", "total_tokens"),
        held_out=("eval_loss", "eval_bits_per_byte"),
    ),
    Recipe(
        "pretrain_stream",
        pretrain,
        corpora.write_texts,
        {"data__streaming": True},
        held_out=("eval_loss", "eval_bits_per_byte"),
    ),
    Recipe("distillation", distillation, tiny.write_conversations),
    Recipe(
        "dpo_model",
        dpo,
        preferences.write_pairs,
        {"dpo__reference": "model"},
        compared=("loss", "grad_norm", "tokens", "reward_margin", "kl", *REWARDS),
        held_out=("eval_loss", "eval_reward_margin", "eval_accuracy", "eval_kl"),
        absolute=1e-5,
        is_at_the_beginning=lambda metrics: abs(metrics["loss"] - 0.693147) < 1e-5,
        like="dpo",
    ),
)
"""Those of the repository, those of their losses and data that go other ways, and one of a user's own."""


def values_of(recipe: Recipe, model: Path, train: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """A configuration as a file has it; changes are ``section__key=value``."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "random_weights": True},
        "data": {"train": str(train), "max_length": 64},
        "train": {
            "output_dir": str(output),
            "overwrite": True,
            "steps": 6,
            "global_batch_size": 8,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
        },
        "checkpoint": {"every": 0},
        "log": {"report": False},
    }
    for name, value in (recipe.values | changes).items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return values


def train(module: str, values: dict[str, Any], spoiled_step: int | None = None) -> int:
    """Run a recipe in a process of a group; returns the group's size.

    Args:
        spoiled_step: the last process's losses of this step have gradients that are no numbers.
    """
    recipe = importlib.import_module(module)
    world_size, is_last = int(os.environ.get("WORLD_SIZE", "1")), True
    is_last = int(os.environ.get("RANK", "0")) == world_size - 1
    steps, scaled = Session.steps, step.scaled
    now = [0]

    def watched(session: Session) -> Any:
        for now[0] in steps(session):
            yield now[0]

    def spoiled(loss: Any, factor: float) -> Any:
        is_spoiled = is_last and now[0] == spoiled_step
        return scaled(loss, float("nan") if is_spoiled else factor)

    Session.steps, step.scaled = watched, spoiled  # type: ignore[method-assign]
    try:
        recipe.main(recipe.Config.model_validate(values))
    finally:
        Session.steps, step.scaled = steps, scaled  # type: ignore[method-assign]
    return world_size
