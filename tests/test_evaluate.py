"""``finetune evaluate``: its scores are those of the run and of transformers; two models are compared row by row."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import corpora
import pytest
import tiny
import torch
import yaml
from test_generate import build_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli.commands import main
from finetune.generation.speaker import Answer, Speaker
from recipes import pretrain, sft


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def run(base: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of an adapter in fp32, with held-out rows."""
    folder = tmp_path_factory.mktemp("runs")
    rows = tiny.write_conversations(folder / "rows.jsonl", rows=40)
    train = {"output_dir": str(folder / "run"), "steps": 4, "global_batch_size": 8, "learning_rate": 1e-2}
    data = {"train": str(rows), "eval": str(held_out), "max_length": 64}
    sections = {"model": {"path": str(base)}, "data": data, "train": train, "adapter": {"type": "lora", "rank": 4}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCELERATE_MIXED_PRECISION", "no")
        sft.main(sft.Config.model_validate(sections | {"eval": {"exact_match": True, "max_new_tokens": 24}}))
    return folder / "run"


@pytest.fixture
def choices(tmp_path: Path) -> Path:
    path = tmp_path / "choices.jsonl"
    rows = [
        {"prompt": "the stone " * (1 + i), "choices": ["runs", "walks beside the river", "a"], "answer": i % 3}
        for i in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["evaluate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_scores_on_the_rows_of_the_run_are_those_that_the_run_recorded(run: Path, capsys: pytest.CaptureFixture[str]):
    record = yaml.safe_load((run / "run.yaml").read_text())
    (found,) = as_json(capsys, str(run), "--max-new-tokens", "24")["models"]
    assert list(found["scores"]) == ["exact_match", "loss"]
    loss = found["scores"]["loss"]
    assert loss["rows"] == 11
    assert loss["value"] == pytest.approx(record["eval_loss"]["after"], abs=1e-5)
    assert loss["perplexity"] == pytest.approx(math.exp(loss["value"]))
    assert loss["interval"][0] < loss["value"] < loss["interval"][1]
    before = as_json(capsys, str(run), "--compare", "--score", "loss")
    assert before["models"][0]["scores"]["loss"]["value"] == pytest.approx(record["eval_loss"]["before"], abs=1e-5)
    assert before["models"][1]["scores"]["loss"] == loss
    gained = record["eval_loss"]["after"] - record["eval_loss"]["before"]
    assert before["differences"]["loss"]["value"] == pytest.approx(gained, abs=1e-5)


@pytest.fixture(scope="module")
def run_of_a_fraction(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that held out a fraction of its training rows."""
    folder = tmp_path_factory.mktemp("fraction")
    rows = tiny.write_conversations(folder / "rows.jsonl", rows=40)
    train = {"output_dir": str(folder / "run"), "steps": 2, "global_batch_size": 8, "learning_rate": 1e-2}
    data = {"train": str(rows), "eval": 0.25, "max_length": 64}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCELERATE_MIXED_PRECISION", "no")
        sft.main(sft.Config.model_validate({"model": {"path": str(base)}, "data": data, "train": train}))
    return folder / "run"


def test_the_rows_of_a_fraction_are_those_that_the_run_held_out(
    run_of_a_fraction: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    record = yaml.safe_load((run_of_a_fraction / "run.yaml").read_text())
    answers = tmp_path / "answers.jsonl"
    (found,) = as_json(capsys, str(run_of_a_fraction), "--score", "loss")["models"]
    assert found["scores"]["loss"]["value"] == pytest.approx(record["eval_loss"]["after"], abs=1e-5)
    assert 0 < found["scores"]["loss"]["rows"] < 40
    models = as_json(capsys, str(run_of_a_fraction), "--compare", "--score", "loss")["models"]
    assert models[0]["scores"]["loss"]["value"] == pytest.approx(record["eval_loss"]["before"], abs=1e-5)
    assert models[1] == found
    command = ["evaluate", str(run_of_a_fraction), "--limit", "3", "--max-new-tokens", "4", "--output", str(answers)]
    assert main(command) == 0
    assert len(answers.read_text().splitlines()) == 3


def test_rows_of_an_array_on_one_line_are_told_apart(
    run_of_a_fraction: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    record = yaml.safe_load((run_of_a_fraction / "run.yaml").read_text())
    lines = Path(record["config"]["data"]["train"]).read_text().splitlines()
    array = tmp_path / "rows.json"
    array.write_text(json.dumps([json.loads(line) for line in lines]))
    model = shutil.copytree(run_of_a_fraction / "final", tmp_path / "model")
    record["config"]["data"]["train"] = str(array)
    (model / "run.yaml").write_text(yaml.safe_dump(record))
    (held_out,) = as_json(capsys, str(model), "--score", "loss")["models"]
    assert held_out["scores"]["loss"]["value"] == pytest.approx(record["eval_loss"]["after"], abs=1e-5)
    (limited,) = as_json(capsys, str(model), "--score", "loss", "--data", str(array), "--limit", "3")["models"]
    assert limited["scores"]["loss"]["rows"] == 3


def test_the_rows_of_another_file_need_no_key_by_which_a_run_split_its_own(
    run_of_a_fraction: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    record = yaml.safe_load((run_of_a_fraction / "run.yaml").read_text())
    rows = record["config"]["data"]["train"]
    model = shutil.copytree(run_of_a_fraction / "final", tmp_path / "model")
    record["config"]["data"] |= {"split_key": "document", "format": "alpaca"}
    (model / "run.yaml").write_text(yaml.safe_dump(record))
    (found,) = as_json(capsys, str(model), "--score", "loss", "--data", rows)["models"]
    assert found["scores"]["loss"]["rows"] == 40


def test_held_out_preferences_are_refused_since_they_have_no_right_answer(
    run_of_a_fraction: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune.models.loading.load_model", None)
    folder = shutil.copytree(run_of_a_fraction / "final", tmp_path / "model")
    record = yaml.safe_load((folder / "run.yaml").read_text())
    (folder / "run.yaml").write_text(yaml.safe_dump(record | {"config": record["config"] | {"dpo": {}}}))
    assert main(["evaluate", str(folder)]) == 2
    assert "learnt preferences, and its held-out rows have no right answer; name a file" in capsys.readouterr().err
    record["config"] |= {"dpo": {}, "data": record["config"]["data"] | {"eval": None}}
    (folder / "run.yaml").write_text(yaml.safe_dump(record))
    assert main(["evaluate", str(folder)]) == 2
    assert "held none out; name a file" in capsys.readouterr().err


def test_the_loss_of_a_pretraining_run_is_the_one_that_it_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tiny.build_model_folder(tmp_path / "model")
    train, held_out = (
        corpora.write_texts(tmp_path / f"{name}.jsonl", rows=rows, seed=rows)
        for name, rows in (("train", 30), ("held_out", 5))
    )
    changes = {"data__eval": str(held_out), "train__steps": 2}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCELERATE_MIXED_PRECISION", "no")
        values = corpora.values_of(model, train, tmp_path / "run", **changes)
        pretrain.main(pretrain.Config.model_validate(values))
    record = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert record["config"]["data"]["packing"] == "concatenate"
    (found,) = as_json(capsys, str(tmp_path / "run"))["models"]
    assert found["scores"]["loss"]["value"] == pytest.approx(record["eval_loss"]["after"], abs=1e-5)


def test_pieces_of_texts_that_a_run_held_out_are_refused_as_no_rows_of_a_file(
    run_of_a_fraction: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune.models.loading.load_model", None)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"{word} stone river" * 200}) + "\n" for word in ("the", "one", "red"))
    )
    folder = shutil.copytree(run_of_a_fraction / "final", tmp_path / "model")
    record = yaml.safe_load((folder / "run.yaml").read_text())
    record["config"]["data"] |= {"train": str(texts), "format": "auto"}
    (folder / "run.yaml").write_text(yaml.safe_dump(record))
    assert main(["evaluate", str(folder), "--score", "loss"]) == 2
    assert "held out 0.25 of the pieces of its texts, and trained others of the same texts" in capsys.readouterr().err


def test_a_limit_takes_the_loss_of_the_rows_whose_answers_are_scored(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A long text gives several rows to train on."""
    lines = [json.dumps({"text": word + " stone river" * 60}) + "\n" for word in ("the", "one", "red", "blue")]
    whole, first = tmp_path / "whole.jsonl", tmp_path / "first.jsonl"
    whole.write_text("".join(lines))
    first.write_text("".join(lines[:2]))
    (limited,), (expected,) = (
        as_json(capsys, str(run), "--score", "loss", "--data", *more)["models"]
        for more in ((str(whole), "--limit", "2"), (str(first),))
    )
    assert limited["scores"]["loss"]["rows"] > 2
    assert limited == expected


def test_a_bad_row_counts_up_to_the_limit_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [json.dumps({"prompt": "the stone", "completion": "runs"}) + "\n"] * 3
    (tmp_path / "rows.jsonl").write_text("".join([*rows, "{broken\n"]))
    command = [str(run), "--score", "loss", "--data", str(tmp_path / "rows.jsonl"), "--limit"]
    (found,) = as_json(capsys, *command, "3")["models"]
    assert found["scores"]["loss"]["rows"] == 3
    assert main(["evaluate", *command, "4"]) == 2
    assert "rows.jsonl:4" in capsys.readouterr().err


def test_a_model_that_diverged_has_no_significant_difference_and_its_record_is_json(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    output = tmp_path / "answers.jsonl"
    for loss, shown in ((800.0, "inf"), (math.nan, "nan")):

        def nats(speaker: Any, rows: Any, shown: Any, loss: float = loss) -> list[float]:
            return [-loss * row.trained_tokens for row in rows]

        monkeypatch.setattr("finetune.generation.judging.log_probabilities", nats)
        found = as_json(capsys, str(run), str(run), "--score", "loss", "--limit", "3", "--output", str(output))
        assert [each["scores"]["loss"]["perplexity"] for each in found["models"]] == [None, None]
        assert main(["evaluate", str(run), "--score", "loss", "--limit", "3"]) == 0
        assert re.search(rf"perplexity +{shown}", capsys.readouterr().out)
        assert len(output.read_text().splitlines()) == 3
        output.unlink()
    assert found["differences"]["loss"]["p"] is None


def test_a_limit_below_the_first_row_with_a_loss_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"prompt": "the stone " * 60, "completion": "runs"}, {"prompt": "the stone", "completion": "runs"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(run), "--score", "loss", "--data", str(tmp_path / "rows.jsonl"), "--limit"]
    assert main(["evaluate", *command, "1"]) == 2
    assert "At data.max_length 64 no trained token is left of what is asked" in capsys.readouterr().err
    (found,) = as_json(capsys, *command, "2")["models"]
    assert found["scores"]["loss"]["rows"] == 1


def test_answers_are_scored_and_written_with_the_rows(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    rows = [{"id": i, "prompt": "a " * (5 - i), "answer": "b", "evaluation": "good"} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths: list[int] = []
    longest = len(
        tiny.build_tokenizer()("<|im_start|>user\na a a a a <|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    )

    def said(self: Speaker, prompts: Any, manner: Any) -> list[Answer]:
        lengths.append(len(prompts))
        return [Answer("b" if len(prompt) > longest - 3 else "so b", 1, False) for prompt in prompts]

    monkeypatch.setattr(Speaker, "answers", said)
    output = tmp_path / "answers.jsonl"
    command = ["evaluate", str(run), "--data", str(tmp_path / "rows.jsonl"), "--batch-size", "2"]
    assert main([*command, "--score", "exact_match", "--score", "contains", "--output", str(output)]) == 0
    assert lengths == [2, 2, 1]
    found = [json.loads(line) for line in output.read_text().splitlines()]
    as_they_were = [row | {"evaluation": row["own_evaluation"]} for row in found]
    assert [{key: row[key] for key in rows[0]} for row in as_they_were] == rows
    (each,) = found[4]["evaluation"]
    assert each["model"] == str(run)
    assert each["scores"]["contains"] == 1
    right = sum(row["evaluation"][0]["scores"]["exact_match"] for row in found)
    assert 0 < right < 5
    printed = capsys.readouterr().out
    assert f"{100 * right / 5:.1f} %" in printed
    assert max(map(len, printed.splitlines()[:3])) <= 80
    assert main([*command, "--output", str(output)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_choices_have_the_log_probabilities_of_transformers(
    base: Path, choices: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "found.jsonl"
    found = as_json(capsys, str(base), "--data", str(choices), "--plain", "--output", str(output))
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    right = 0
    for line in output.read_text().splitlines():
        row = json.loads(line)
        expected = []
        for choice in row["choices"]:
            ids = torch.tensor([tokenizer(row["prompt"].rstrip() + " " + choice)["input_ids"]])
            begin = len(tokenizer(row["prompt"].rstrip())["input_ids"])
            with torch.no_grad():
                scores = model(ids).logits.log_softmax(-1)[0, :-1]
            expected.append(scores.gather(1, ids[0, 1:, None])[begin - 1 :].sum().item())
        (each,) = row["evaluation"]
        assert each["log_probabilities"] == pytest.approx(expected, abs=1e-4)
        right += max(range(3), key=expected.__getitem__) == row["answer"]
        assert each["scores"]["choice"] == (max(range(3), key=expected.__getitem__) == row["answer"])
    assert found["models"][0]["scores"]["choice"]["value"] == pytest.approx(right / 5)
    assert list(found["models"][0]["scores"]) == ["choice", "choice_norm"]


def test_two_models_are_compared_on_the_same_rows_within_eighty_columns(
    run: Path, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """One that is always right against one that never is: eleven rows all differ, p = 2 / 2**11."""
    monkeypatch.setenv("COLUMNS", "200")

    def answers(self: Speaker, prompts: Sequence[Any], manner: Any) -> list[Answer]:
        return [Answer("x" if self.name == str(run) else "{}", 1, False)] * len(prompts)

    monkeypatch.setattr(Speaker, "answers", answers)
    judge = "regex:" + "|".join(["x", *tiny.WORDS])
    assert main(["evaluate", str(run), str(base), "--score", judge, "--score", "json", "--score", "loss"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == [f"A: {run}", f"B: {base}"]
    assert all(len(line) <= 80 for line in printed[2:])
    assert "B - A" in printed[2]
    found = as_json(capsys, str(run), str(base), "--score", "json")
    assert found["differences"]["json"] == {"value": 1.0, "interval": [1.0, 1.0], "p": 2 / 2**11}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--score", "exactmatch"], "did you mean exact_match?"),
        (["--limit", "0"], "--limit 0: give a number from 1 on"),
        (["--batch-size", "0"], "--batch-size 0: give a number from 1 on"),
        (["--data", "missing.jsonl"], "--data missing.jsonl: there is no such data file"),
        (["other", "--compare"], "leave one of them out"),
        (["missing"], "There is no folder missing"),
        (["--score", "choice"], "it has no choices"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_refused_before_weights_load(
    arguments: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune.models.loading.load_model", None)
    assert main(["evaluate", str(run), *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert said in printed


def test_an_output_that_cannot_be_created_is_refused_before_weights_load(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune.models.loading.load_model", None)
    assert main(["evaluate", str(run), "--output", str(tmp_path / "missing" / "answers.jsonl")]) == 2
    assert "answers.jsonl cannot be created (No such file or directory)" in capsys.readouterr().err


def test_a_second_model_that_cannot_answer_is_refused_before_the_first_is_loaded(
    run: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """One without its base, and one whose positions the rows do not fit; no file of answers is left."""
    monkeypatch.setattr("finetune.models.loading.load_model", None)
    adapter, short, output = tmp_path / "adapter", tmp_path / "short", tmp_path / "answers.jsonl"
    shutil.copytree(run / "final", adapter)
    named = json.loads((adapter / "adapter_config.json").read_text())
    named["base_model_name_or_path"] = str(tmp_path / "gone")
    (adapter / "adapter_config.json").write_text(json.dumps(named))
    shutil.copytree(base, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    for other, said in ((adapter, "base model cannot be read"), (short, "leave no room for an answer")):
        assert main(["evaluate", str(run), str(other), "--score", "json", "--output", str(output)]) == 2
        assert said in capsys.readouterr().err
        assert not output.exists()


def test_a_model_that_no_run_left_needs_a_file_of_rows(
    base: Path, choices: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune.models.loading.load_model", None)
    assert main(["evaluate", str(base)]) == 2
    assert "name a file with --data" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path), "--data", str(choices)]) == 2
    assert "neither run.yaml nor" in capsys.readouterr().err
    assert main(["evaluate", str(base), "--data", str(choices), "--score", "loss"]) == 2
    assert "in a format that training reads" in capsys.readouterr().err
    (tmp_path / "bare.jsonl").write_text('{"prompt": "a"}\n')
    assert main(["evaluate", str(base), "--data", str(tmp_path / "bare.jsonl")]) == 2
    assert "nothing to score" in capsys.readouterr().err
