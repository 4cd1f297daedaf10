"""Texts for tests, and runs of ``recipes/pretrain.py`` on them."""

import json
import os
import random
from pathlib import Path
from typing import Any

import tiny


def write_texts(path: Path, rows: int, seed: int = 0) -> Path:
    """Texts very uneven in length, the longest of hundreds of tokens."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            text = ". ".join(tiny.sentence(rng, 12) for _ in range(rng.choice([1, 1, 3, 20])))
            file.write(json.dumps({"text": text}) + "\n")
    return path


def values_of(model: Path, train: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """A configuration as a file has it; changes are ``section__key=value``."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "random_weights": True},
        "data": {"train": str(train), "max_length": 48},
        "train": {
            "output_dir": str(output),
            "overwrite": True,
            "steps": 6,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
        },
        "checkpoint": {"every": 0},
        "pretrain": {},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return values


def pretrain(values: dict[str, Any]) -> int:
    """Run the recipe in a process of a group; returns the group's size."""
    from recipes.pretrain import Config, main

    main(Config.model_validate(values))
    return int(os.environ.get("WORLD_SIZE", "1"))
