"""Answers that are judged one by one: the loss, its reference point, the rows, and what a run of them is."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import preferences
import pytest
import scenarios
import torch

from finetune.checkpoint import resuming
from finetune.checkpoint.reader import open_checkpoint
from finetune.config.dpo_section import Dpo
from finetune.data.batches import Inputs
from finetune.data.encoding import Row
from finetune.data.formats import convert_compared
from finetune.errors import BadRow, InputError
from finetune.training.mismatched import both_answers, mismatched
from finetune.training.preference_loss import Pairs, figures_of, losses_of

COMPARED = ("loss", "grad_norm", "reward_chosen", "reward_rejected", "accuracy", "reference_point", "kl", "tokens")


def judged(gains: list[float], is_good: list[bool], point: float) -> Pairs:
    """Answers of 3 tokens, of which the model adds as much to a reference of -5."""
    good = torch.tensor(is_good).float()
    gain = torch.tensor(gains)
    return Pairs(
        (gain - 5) * good, (gain - 5) * (1 - good), -5 * good, -5 * (1 - good), 3 * good, 3 * (1 - good), point
    )


def test_loss_compares_each_answer_with_the_reference_point_and_is_weighted():
    """arXiv:2402.01306, equation 8, with the signs that KTOTrainer of TRL 1.16 has."""
    pairs = judged([1.0, 1.0, -2.0], [True, False, False], point=0.5)
    section = Dpo(loss="kto", beta=0.3, desirable_weight=1.33, undesirable_weight=0.5)
    chosen = 1.33 * (1 - torch.sigmoid(0.3 * (torch.tensor(1.0) - 0.5)))
    rejected = 0.5 * (1 - torch.sigmoid(0.3 * (0.5 - torch.tensor([1.0, -2.0]))))
    torch.testing.assert_close(losses_of(pairs, section), torch.cat([chosen[None], rejected]))


def test_figures_are_of_the_answers_of_their_kind():
    found = figures_of(judged([1.0, 1.0, -2.0], [True, False, False], point=0.5), Dpo(loss="kto", beta=0.5))
    means = {name: (figure.total.sum() / figure.divisor.sum()).item() for name, figure in found.items()}
    assert means == pytest.approx(
        {"reward_chosen": 0.5, "reward_rejected": -0.25, "accuracy": 2 / 3, "reference_point": 0.5, "kl": 0.0}
    )


def test_a_step_without_good_answers_has_finite_figures():
    found = figures_of(judged([1.0], [False], point=0.5), Dpo(loss="kto"))
    assert found["reward_chosen"].total.sum() / found["reward_chosen"].divisor.sum() == 0


class Fixed(Inputs):
    """Rows of given documents."""

    def __init__(self, rows: list[list[Row]]):
        self.given = rows

    def __len__(self) -> int:
        return len(self.given)

    def documents(self, place: int) -> list[Row]:
        return self.given[place]


def row(*tokens: int, trained_from: int, reference: float = 0.0) -> Row:
    spans = [(trained_from, len(tokens))] if trained_from < len(tokens) else []
    return Row(np.array(tokens, np.int32), spans, "file:1", reference=reference)


def test_a_mismatched_answer_is_another_rows_behind_this_prompt():
    missing = row(0, trained_from=1, reference=-7.0)
    rows = [[row(1, 2, 3, trained_from=2), missing], [missing, row(4, 5, 6, 7, trained_from=1)]]
    first, second = (mismatched(Fixed(rows), place) for place in (0, 1))
    assert (first.tokens.tolist(), first.spans, first.reference) == ([1, 2, 5, 6], [(2, 4)], -7.0)
    assert (second.tokens.tolist(), second.spans) == ([4, 3], [(1, 2)])
    assert [each.tokens.tolist() for each in both_answers(Fixed(rows), 1)] == [[4, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("rows", [2, 3, 10, 1000])
def test_no_row_lends_itself_an_answer_nor_its_neighbours_in_long_files(rows: int):
    missing = row(0, trained_from=1)
    inputs = Fixed([[row(1, place + 2, trained_from=1), missing] for place in range(rows)])
    lent = [mismatched(inputs, place).tokens[1] - 2 for place in range(rows)]
    assert sorted(lent) == list(range(rows))
    apart = min(min(abs(lender - place), rows - abs(lender - place)) for place, lender in enumerate(lent))
    assert apart >= max(1, rows // 4)
    assert rows < 10 or not any(abs(abs(lender - place) - rows / 2) < rows / 20 for place, lender in enumerate(lent))


@pytest.mark.parametrize(
    ("label", "is_good"),
    [(True, True), (False, False), (1, True), (0, False), ("True", True), ("false", False), (" 1", True), ("0", False)],
)
def test_label_decides_which_side_of_a_pair_an_answer_is(label: Any, is_good: bool):
    sides = convert_compared({"prompt": "1 + 1 =", "completion": " 2", "label": label})
    assert [side is None for side in sides] == [not is_good, is_good]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a", "completion": "b"}, "the key `label`, required by the format judged, is missing"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "the key `label` is 'good'; give true for good"),
        ({"completion": "b", "label": True}, "the key `prompt`, required"),
        ({"prompt": "a", "completion": " ", "label": True}, "the key `completion` has no text"),
    ],
)
def test_records_that_cannot_be_judged_are_refused_with_the_reason(record: dict[str, Any], reason: str):
    with pytest.raises(BadRow) as refused:
        convert_compared(record)
    assert reason in str(refused.value)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("judged")
    return (
        preferences.write_judged(folder / "train.jsonl", rows=60),
        preferences.write_judged(folder / "held_out.jsonl", rows=7, seed=1),
    )


@pytest.fixture(scope="module")
def run(ranks: Any, model_folder: Path, answers: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, (train, held_out) = tmp_path_factory.mktemp("kto"), answers

    def tune(strategy: str, world_size: int, name: str = "run", **changes: Any) -> list[dict[str, Any]]:
        own = [key for key in changes if key.startswith("dpo__")]
        dpo = {"loss": "kto", **{key.removeprefix("dpo__"): changes.pop(key) for key in own}}
        changes = {"train__steps": 6, "data__eval": str(held_out)} | changes
        config = scenarios.configuration(model_folder, train, folder / name, **changes)
        assert ranks(world_size).run(preferences.tune, config, dpo, strategy=strategy) == [world_size] * world_size
        return scenarios.read_metrics(folder / name)

    tune.folder = folder
    return tune


@pytest.fixture(scope="module")
def alone(run: Any) -> Any:
    known: dict[str, Any] = {}

    def metrics(adapter: str) -> Any:
        if adapter not in known:
            known[adapter] = run("single", 1, adapter__type=adapter, train__micro_batch_size=8)
        return known[adapter]

    return metrics


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        for name in COMPARED:
            if name == "accuracy" and abs(other["loss"] - 0.5) < 1e-5:
                continue  # rewards are 0, but for rounding
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), (one["step"], name)
    for name in ("eval_loss", "eval_reward_chosen", "eval_accuracy", "eval_kl"):
        assert found[-1][name] == pytest.approx(expected[-1][name], rel=1e-5, abs=1e-5)


def test_it_learns_which_answers_are_good(alone: Any):
    first, *_, last = alone("none")
    assert first["loss"] == pytest.approx(0.5, abs=1e-5)  # 1 - sigmoid(0): the model is its own reference
    assert first["reference_point"] == pytest.approx(0, abs=1e-3)
    assert any(step["reference_point"] > 0.01 for step in alone("none"))
    assert last["eval_loss"] < 0.45
    assert last["eval_reward_chosen"] > last["eval_reward_rejected"]


def test_steps_that_are_not_full_are_those_of_one_process(run: Any):
    changes = {"train__steps": None, "train__epochs": 1 / 3, "adapter__type": "lora"}
    expected = run("single", 1, train__micro_batch_size=8, **changes)
    assert len(expected) == 3
    assert_alike(run("fsdp2", 2, train__micro_batch_size=4, **changes), expected)


def test_references_that_are_computed_before_are_those_of_the_adapter_off(run: Any, alone: Any):
    assert_alike(run("single", 1, adapter__type="lora", dpo__reference="cached"), alone("lora"))


def test_a_copy_of_the_weights_of_the_beginning_is_the_reference(run: Any, alone: Any):
    assert_alike(run("fsdp2", 2, dpo__reference="model", train__micro_batch_size=2), alone("none"))


def test_padded_answers_give_the_run_of_flat_ones(run: Any, alone: Any):
    assert_alike(run("ddp", 2, model__attention="sdpa", train__micro_batch_size=2), alone("none"))


def test_other_weights_of_good_and_bad_answers_are_another_run(run: Any):
    run("single", 1, "weighted", checkpoint__every=3, dpo__desirable_weight=1.5)
    with pytest.raises(AssertionError, match=r"dpo.desirable_weight was 1.5 in .* and is 1.0 now: another loss was"):
        run("single", 1, "weighted", checkpoint__resume="auto", train__overwrite=False)


def test_an_evaluation_that_is_made_up_for_after_a_resume_is_that_of_the_undisturbed_run(run: Any):
    """Its reference point is that of the held-out rows, which no step of the run tells."""
    changes = {"eval__every": 4, "checkpoint__every": 4, "train__micro_batch_size": 8, "train__learning_rate": 1e-2}
    whole = run("single", 1, "whole", **changes)
    lines = [json.dumps({k: v for k, v in each.items() if not k.startswith("eval_")}) for each in whole[:4]]
    folder = run.folder / "whole"
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "final" / "run.yaml").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    resumed = run("single", 1, "whole", checkpoint__resume="auto", train__overwrite=False, **changes)
    assert whole[3]["eval_reference_point"] > 0.1
    for key in ("eval_loss", "eval_reference_point", "eval_kl"):
        assert [each[key] for each in (resumed[3], resumed[5])] == [each[key] for each in (whole[3], whole[5])]
    assert resumed[5]["loss"] == whole[5]["loss"]


def test_a_checkpoint_of_a_version_without_these_weights_goes_on(run: Any, alone: Any):
    run("single", 1, "older", checkpoint__every=3, checkpoint__keep=5)
    latest = open_checkpoint(run.folder / "older" / "checkpoints" / "step-00000003")
    now = json.loads(json.dumps(latest.contents["run"]["config"]))
    for section, key in (each.split(".") for each in resuming.LATER):
        latest.contents["run"]["config"][section].pop(key, None)
    assert resuming.config_problems(latest, now, precision="no", weights_only=False) == []


def test_rows_of_the_other_kind_are_refused_before_the_model_loads(
    model_folder: Path, answers: tuple[Path, Path], tmp_path: Path
):
    pairs = preferences.write_pairs(tmp_path / "pairs.jsonl", rows=3)
    with pytest.raises(InputError, match="3 rows are pairs"):
        preferences.tune(scenarios.configuration(model_folder, pairs, tmp_path / "out"), {"loss": "kto"})
    with pytest.raises(InputError, match="60 rows have one answer with a label, but sigmoid compares two"):
        preferences.tune(scenarios.configuration(model_folder, answers[0], tmp_path / "out"), {})
    assert not (tmp_path / "out").exists()


def test_answers_that_are_judged_alone_are_not_called_pairs(
    model_folder: Path, answers: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    changes = {"train__steps": 1, "data__eval": str(answers[1])}
    preferences.tune(scenarios.configuration(model_folder, answers[0], tmp_path / "a", **changes), {"loss": "kto"})
    said = capsys.readouterr().out
    assert "60 judged training answers (preference)" in said
    assert "7 judged held-out answers (preference)" in said
    assert "pairs" not in said


def test_a_run_says_how_many_held_out_answers_it_trains_on_and_no_more(
    model_folder: Path, answers: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    changes = {"train__steps": 1, "data__eval": str(answers[1])}
    preferences.tune(scenarios.configuration(model_folder, answers[0], tmp_path / "a", **changes), {"loss": "kto"})
    assert "eval_loss is optimistic" not in capsys.readouterr().out
    both = tmp_path / "both.jsonl"
    both.write_text(answers[0].read_text() + answers[1].read_text().splitlines(keepends=True)[0])
    preferences.tune(scenarios.configuration(model_folder, both, tmp_path / "b", **changes), {"loss": "kto"})
    assert "eval_loss is optimistic: 2 of the held-out rows" in capsys.readouterr().out  # as of a pair: both its sides


def test_copies_are_counted_once_for_each_label(model_folder: Path, tmp_path: Path):
    from finetune.cli.data_verb import _report
    from recipes.dpo import Config

    rows = [{"prompt": "a b", "completion": " c", "label": label} for label in (True, True, False)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    config = scenarios.configuration(model_folder, file, tmp_path / "out")
    asked = Config.model_validate(config.model_dump(exclude_unset=True) | {"dpo": {"loss": "kto"}})
    report = _report(asked, shown_rows=3, shown_left_out=0, tokens_per_second=None, shows_progress=False)
    assert len(report.examples) == 3
    assert [each.side for each in report.examples].count("chosen") == 2
