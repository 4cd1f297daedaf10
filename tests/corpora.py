"""Texts for tests, and runs of ``recipes/pretrain.py`` on them."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import tiny

from finetune.data.batches import Batches
from finetune.data.encoding import Row
from finetune.data.rows import Rows


class Sized(Rows):
    """Rows of so many tokens each, which are nowhere on disk."""

    def __init__(self, lengths: list[int]) -> None:
        self.folder, self.chosen, self.summary = Path("nowhere"), None, {}
        self.lengths = np.array(lengths, np.int32)
        self.trained_tokens = self.lengths - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        length = int(self.lengths[index])
        return Row(np.full(length, index, np.int32), [(1, length)], f"row {index}")


def batches_of_lengths(lengths: list[int], steps: int, rows: int) -> Batches:
    """Batches of so many rows, of documents of so many tokens."""
    form: dict[str, Any] = {"packing": False, "flat": True, "max_length": 100, "epochs": 1.0, "seed": 0}
    return Batches(Sized(lengths), steps=steps, global_batch_size=rows, micro_batch_size=1, **form)


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
        "log": {"report": False},
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
