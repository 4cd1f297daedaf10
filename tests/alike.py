"""When a run whose rows several processes compute together is that of one process, and texts to train both on."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import corpora
import pytest
import scenarios

from finetune.output.run_reading import read_run

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


def assert_alike_in_16_bits(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=3e-3)
    assert [line["grad_norm"] for line in found] == pytest.approx([line["grad_norm"] for line in expected], abs=1e-2)


def assert_trains_alike(tuned: Any, processes: int, size: int, changes: dict[str, Any], **launch: Any) -> None:
    """Losses, held-out losses and answers of a run are those of one process.

    Args:
        tuned: as ``assert_answers_alike`` takes it.
        launch: what else it is trained with on several.
    """
    expected = tuned("alone", 1, 1, **changes)
    assert_alike(tuned("shared", processes, size, **launch, **changes), expected)
    answers = [read_run(tuned.folder / each)["answers"] for each in ("shared", "alone")]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3


def assert_pretrains_alike(ranks: Any, strategy: str, processes: int, model: Path, folder: Path) -> None:
    """Pretraining, and the figures of its held-out sources, are those of one process."""
    found, texts = {}, texts_in(folder)
    for name, number in (("single", 1), (strategy, processes)):
        changes = texts | {"pretrain__z_loss": 1e-3, "eval__every": 4, "train__steps": 8}
        values = corpora.values_of(model, Path(), folder / name, **changes)
        assert ranks(number).run(corpora.pretrain, values, strategy=name) == [number] * number
        found[name] = scenarios.read_metrics(folder / name)
    assert sum("eval_loss" in line for line in found["single"]) > 1
    for one, other in zip(found[strategy], found["single"], strict=True):
        compared = ["loss", "grad_norm", "tokens", *(FIGURES if "eval_loss" in other else [])]
        assert [one[key] for key in compared] == pytest.approx([other[key] for key in compared], rel=1e-5)


def assert_goes_on(
    tuned: Any, launches: dict[str, tuple[int, int]], pairs: Iterable[tuple[str, str]], changes: dict[str, Any]
) -> None:
    """A run of six steps that goes on after the third under another strategy ends as one that was not interrupted.

    Args:
        launches: processes and sizes, by strategies.
        pairs: of strategies, before and after.
    """
    changes = changes | {"train__steps": 6}
    expected = tuned("alone", 1, 1, **changes)
    for strategy, launch in launches.items():
        tuned(f"before-{strategy}", *launch, strategy=strategy, **changes, checkpoint__every=3, checkpoint__keep=5)
    for before, after in pairs:
        step = tuned.folder / f"before-{before}" / "checkpoints" / "step-00000003"
        found = tuned("after", *launches[after], strategy=after, **changes, checkpoint__resume=str(step))
        assert_alike(found, expected[3:])


def assert_answers_alike(tuned: Any, processes: int, size: int, folder: Path, **launch: Any) -> None:
    """What a run answers, and its scores, are those of one process.

    Args:
        tuned: trains under a name, on so many processes of so large groups, and has its ``folder``.
        folder: for the questions.
        launch: what else it is trained with on several.
    """
    words = ["house", "tree", "dog", "cat", "red"]
    rows = [{"question": f"the red {word}", "answer": word, "choices": [word, "green"]} for word in words]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"name": name, "data": str(folder / "task.jsonl"), "score": name} for name in ("exact_match", "choice")]
    changes = {"eval__tasks": tasks, "eval__exact_match": True}
    expected, found = tuned("alone", 1, 1, **changes), tuned("shared", processes, size, **launch, **changes)
    assert_alike(found, expected)
    for key in ("eval_exact_match", "eval_choice"):
        assert found[-1][key] == expected[-1][key]
    assert read_run(tuned.folder / "shared")["answers"] == read_run(tuned.folder / "alone")["answers"]
