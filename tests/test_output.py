"""What a run leaves: refused before it would be lost, complete when it is there."""

import errno
import importlib.metadata
import json
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
import yaml
from scenarios import configuration, read_metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.errors import InputError, RunStopped
from finetune.models import loading
from finetune.output import output_folder, run_files
from finetune.output.run_files import _fenced
from finetune.run import logbook
from recipes.sft import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, conversations: Path, held_out: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    main(
        configuration(
            model_folder,
            conversations,
            folder,
            train__steps=5,
            data__eval=str(held_out),
            eval__every=2,
            eval__prompts=1,
            log__report=True,
        )
    )
    return folder


def test_metrics_have_one_line_per_step_with_the_documented_keys(run: Path):
    metrics = read_metrics(run)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5]
    keys = {"step", "loss", "tokens", "total_tokens", "grad_norm", "learning_rate", "step_seconds", "tokens_per_second"}
    assert all(set(m) - {"eval_loss", "save_stall_seconds"} == keys for m in metrics)
    assert [m["step"] for m in metrics if "eval_loss" in m] == [2, 4, 5]
    assert [m["step"] for m in metrics if "save_stall_seconds" in m] == [5]
    assert all(m["tokens"] < m["total_tokens"] for m in metrics)


def test_run_yaml_tells_configuration_strategy_versions_hardware_data_and_commit(run: Path):
    record = yaml.safe_load((run / "run.yaml").read_text())
    assert record["config"]["train"]["steps"] == 5
    strategy = record["strategy"]
    assert (strategy["name"], strategy["processes"], strategy["sharding"]["shards"]) == ("single", 1, 1)
    assert strategy["sharding"]["held_bytes"] == strategy["sharding"]["total_bytes"] > 0
    assert record["packages"]["torch"] == importlib.metadata.version("torch")
    assert len(record["data"]["train"]) == 64
    assert {"python", "hardware", "git_commit"} <= set(record)
    assert record["eval_loss"]["after"] == read_metrics(run)[-1]["eval_loss"]


def test_run_yaml_tells_what_was_read_and_held_and_how_held_out_questions_were_answered(run: Path, held_out: Path):
    record = yaml.safe_load((run / "run.yaml").read_text())
    read = record["data_figures"]
    assert (read["train"]["rows"], read["eval"]["rows"]) == (80, 11)
    assert sum(read["eval"]["lengths"]["rows"]) == 11
    tokens = list(tiny.read_rows(held_out, AutoTokenizer.from_pretrained(run / "final")).lengths)
    assert (read["eval"]["tokens"], read["eval"]["longest"]) == (sum(tokens), max(tokens))
    (held,) = record["held_bytes"]
    weights = record["strategy"]["sharding"]["total_bytes"]
    assert 2 * weights <= held["optimizer"] <= 2.01 * weights == 2.01 * held["weights"]
    (answer,) = record["answers"]
    question = json.loads(held_out.read_text().splitlines()[0])["messages"]
    assert answer["prompt"] == next(each["content"] for each in question if each["role"] == "user")
    card = (run / "final" / "README.md").read_text()
    for text in (answer["prompt"], answer["before"], answer["after"]):
        assert f"```text\n{text}\n```" in card


def test_a_run_leaves_its_report(run: Path):
    assert "held-out loss" in (run / "report.html").read_text()
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")


def test_an_answer_cannot_leave_its_block_of_the_model_card():
    text = "```\n# Not a heading\n````"
    assert _fenced(text) == f"`````text\n{text}\n`````"


def test_final_loads_with_transformers_and_gives_the_held_out_loss_of_the_run(run: Path, held_out: Path):
    from finetune.training.loss import token_loss_sum

    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert model.config.tie_word_embeddings
    rows = tiny.read_rows(held_out, tokenizer)
    total = 0.0
    with torch.no_grad():
        for row in rows:
            next_tokens, input_ids = tiny.tensors(row)
            total += token_loss_sum(model(input_ids=input_ids).logits, next_tokens).item()
    assert total / sum(rows.trained_tokens) == pytest.approx(read_metrics(run)[-1]["eval_loss"], rel=2e-2)
    assert "base_model" in (run / "final" / "README.md").read_text()
    assert not list((run / "final").glob("*.bin"))


def test_folder_that_holds_a_run_is_refused_and_left_alone(run: Path, model_folder: Path, conversations: Path):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(InputError, match=r"already contains a run.*overwrite"):
        main(configuration(model_folder, conversations, run, train__overwrite=False))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_overwriting_removes_the_records_of_the_run_and_neither_its_result_nor_anything_else(tmp_path: Path):
    (tmp_path / "final").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "notes.txt").write_text("mine")
    assert output_folder.problems(tmp_path, overwrite=True, resumes=False) == []
    output_folder.prepare_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "final"}


def test_output_folder_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    assert "is a file" in output_folder.problems(tmp_path / "file", overwrite=False, resumes=False)[0]
    assert output_folder.problems(tmp_path / "new" / "folder", overwrite=False, resumes=False) == []
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_looked_at_is_a_sentence(tmp_path: Path):
    (problem,) = output_folder.problems(tmp_path / ("n" * 300), overwrite=False, resumes=False)
    assert problem.endswith("cannot be used (File name too long); choose another folder.")


@pytest.mark.parametrize("belongs", [True, False])
def test_commit_is_that_of_the_repository_of_this_code_and_of_no_other_around_it(
    belongs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = tmp_path / "lib" / "run_files.py"
    here.parent.mkdir()
    here.touch()
    (tmp_path / ".gitignore").write_text("" if belongs else "lib\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(run_files, "__file__", str(here))
    assert (run_files.environment.__wrapped__()["git_commit"] is not None) == belongs


def test_a_disk_that_is_full_when_the_tokenizer_is_written_is_no_bare_exception(tmp_path: Path):
    tokenizer = tiny.build_tokenizer()
    (tmp_path / "tokenizer.json").mkdir()  # which the tokenizers library refuses as it does a full disk
    with pytest.raises(OSError, match="directory"):
        loading.save_tokenizer(tokenizer, tmp_path)


def test_records_that_cannot_be_written_stop_the_run_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(folder: Path, run: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_files, "write_run", full)
    book = logbook.Logbook(tmp_path, mock.Mock(), mock.Mock(), mock.Mock(), writes=True)
    with pytest.raises(RunStopped, match=r"could not be written \(No space left on device\); free some space"):
        book.open(mock.Mock(), None, None, overwrite=False)
