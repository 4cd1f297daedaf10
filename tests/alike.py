"""When a run whose rows several processes compute together is that of one process, and texts to train both on."""

from pathlib import Path
from typing import Any

import corpora
import pytest

FIGURES = ["eval_loss", "eval_bits_per_byte"]
FIGURES += [f"eval_{figure}/{source}.jsonl" for figure in ("loss", "bits_per_byte") for source in "ab"]
"""Of the held-out sources of ``texts_in``."""


def texts_in(folder: Path) -> dict[str, Any]:
    """Texts to train on, and two held-out sources."""
    held_out = [
        str(corpora.write_texts(folder / f"{name}.jsonl", rows=5, seed=seed)) for seed, name in ((1, "a"), (2, "b"))
    ]
    return {"data__train": str(corpora.write_texts(folder / "train.jsonl", rows=60)), "data__eval": held_out}


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        compared = ["loss", "grad_norm", "tokens", *(["eval_loss"] if "eval_loss" in other else [])]
        assert [one[key] for key in compared] == pytest.approx([other[key] for key in compared], rel=2e-5)
