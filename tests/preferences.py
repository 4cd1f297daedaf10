"""Pairs of answers for tests, and runs of ``recipes/dpo.py`` on them."""

import json
import os
import random
from pathlib import Path
from typing import Any

import tiny


def write_pairs(path: Path, rows: int, seed: int = 0) -> Path:
    """Answers very uneven in length, of which the chosen one says yes."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            prompt = [{"role": "user", "content": tiny.sentence(rng, 12)}]
            chosen, rejected = (f"{word} {tiny.sentence(rng, 12)}" for word in ("yes", "no"))
            answers = {
                key: [{"role": "assistant", "content": text}]
                for key, text in (("chosen", chosen), ("rejected", rejected))
            }
            file.write(json.dumps({"prompt": prompt, **answers}) + "\n")
    return path


def write_judged(path: Path, rows: int, seed: int = 0) -> Path:
    """Answers very uneven in length, of which about two thirds are good, those that say yes."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            prompt = [{"role": "user", "content": tiny.sentence(rng, 12)}]
            label = rng.random() < 2 / 3
            answer = f"{'yes' if label else 'no'} {tiny.sentence(rng, 12)}"
            row = {"prompt": prompt, "completion": [{"role": "assistant", "content": answer}], "label": label}
            file.write(json.dumps(row) + "\n")
    return path


def tune(config: Any, dpo: dict[str, Any]) -> int:
    """Run the recipe in a process of a group; returns the group's size."""
    from recipes.dpo import Config, main

    main(Config.model_validate(config.model_dump(exclude_unset=True) | {"dpo": dpo}))
    return int(os.environ.get("WORLD_SIZE", "1"))
