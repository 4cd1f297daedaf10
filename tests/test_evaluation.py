"""Held-out answers: the same however they are batched, held against the row's own, and shown as often right as all."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from accelerate import Accelerator
from scenarios import configuration
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from finetune.data.rows import Rows
from finetune.errors import InputError
from finetune.models import loading as models
from finetune.training import evaluation
from finetune.training.evaluation import Question, answers, exact_match, questions, shown
from recipes.sft import main


@pytest.fixture(scope="module")
def rows(held_out: Path) -> Rows:
    return tiny.read_rows(held_out, tiny.build_tokenizer())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Random weights, large enough that its answers depend on each token of the question."""
    config = AutoConfig.from_pretrained(tiny.build_model_folder(tmp_path_factory.mktemp("model")))
    config.initializer_range = 0.2
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def test_answers_in_batches_are_those_of_each_question_alone(model: Any, rows: Rows, monkeypatch: pytest.MonkeyPatch):
    accelerator, tokenizer = Accelerator(cpu=True), tiny.build_tokenizer()
    asked = questions(0, rows, tokenizer, None, compared=True)
    assert len({len(question.prompt) for question in asked}) > 3  # there is padding
    calls: list[int] = []
    together = models.answers

    def counted(*args: Any, **kwargs: Any) -> list[str]:
        calls.append(len(args[2]))
        return together(*args, **kwargs)

    monkeypatch.setattr(models, "answers", counted)
    found = answers(accelerator, model, tokenizer, asked, 12)
    assert calls == [len(asked)]
    monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", 1)
    alone = answers(accelerator, model, tokenizer, asked, 12)
    assert calls[1:] == [1] * len(asked)
    assert found == alone
    assert len(set(found.values())) > 3


def test_batches_hold_every_question_once_and_no_more_tokens_than_allowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluation, "TOKENS_AT_ONCE", 100)
    asked = [Question(str(n), [1] * n, "x", 10) for n in (40, 8, 30, 200)]
    batches = list(evaluation._batches(asked, 5, 1, None))
    assert [[question.name for question in batch] for batch in batches] == [["200"], ["40", "30"], ["8"]]


def test_answer_that_is_compared_has_room_for_the_whole_expected_one():
    assert Question("a", [1], "long", 300).most_tokens(64, None) == 300
    assert Question("b", [1], "short", 2).most_tokens(64, None) == 64


def test_answers_end_with_the_models_positions_however_many_processes_there_are():
    sizes = {"vocab_size": 512, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    config = GPT2Config(**sizes, initializer_range=0.2, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_config(config), tiny.build_tokenizer()
    asked = [Question(str(n), list(range(5, 5 + n)), None) for n in (63, 60, 40, 34, 30)]
    found = answers(Accelerator(cpu=True), model, tokenizer, asked, 30)
    model.eval()
    for question in asked:
        expected = model.generate(torch.tensor([question.prompt]), max_length=min(64, len(question.prompt) + 30))
        assert found[question.name] == models.answer_texts(tokenizer, [expected[0, len(question.prompt) :].tolist()])[0]
    for processes in (1, 2, 4):
        for batch in evaluation._batches(asked, 30, processes, 64):
            assert len(batch[0].prompt) + max(each.most_tokens(30, 64) for each in batch) <= 64


def test_a_text_that_leaves_no_room_for_an_answer_is_refused():
    with pytest.raises(InputError, match=r"eval\.prompts: .* leave no room for an answer, because the model has 2 pos"):
        questions(["the stone"], None, tiny.build_tokenizer(), 2, compared=False)


def test_expected_answer_is_the_last_of_the_row_and_cut_rows_are_not_asked(tmp_path: Path):
    turns = [("user", "the house"), ("assistant", "runs"), ("user", "a tree"), ("assistant", "walks beside the river")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    long = {"messages": [*row["messages"][:3], {"role": "assistant", "content": "runs " * 100}]}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, (row, long, row))))
    tokenizer = tiny.build_tokenizer()
    asked = questions(["the stone"], tiny.read_rows(path, tokenizer), tokenizer, None, compared=True)
    assert [question.expected for question in asked] == [None, "walks beside the river", "walks beside the river"]
    assert len({question.name for question in asked}) == 3  # the same question twice is two questions
    assert tokenizer.decode(asked[1].prompt).endswith("<|im_start|>assistant\n")


def test_exact_match_is_the_share_of_answers_that_are_equal_word_for_word():
    asked = [Question("text", [1]), *(Question(name, [1], "yes") for name in "abcd")]
    answered = {"text": "yes", "a": "yes", "b": "Yes", "c": "yes, sure", "d": "yes"}
    assert exact_match(asked, answered) == 0.5
    assert exact_match(asked, {"text": "yes"}) is None


@pytest.mark.parametrize(
    ("right", "count", "right_shown"), [(27, 4, 3), (0, 4, 0), (36, 4, 4), (1, 36, 1), (20, 50, 20)]
)
def test_shown_answers_are_as_often_right_as_all_of_them(right: int, count: int, right_shown: int):
    asked = [Question(str(i), [1], "yes") for i in range(36)]
    answered = {str(i): "yes" if i >= 36 - right else "no" for i in range(36)}
    found = shown(asked, answered, count)
    assert len(found) == min(count, 36)
    assert list(found.values()) == ["yes"] * right_shown + ["no\n(expected: yes)"] * (len(found) - right_shown)
    assert shown([Question("text", [1])], {"text": "no"}, ["text"]) == {"text": "no"}


def test_run_counts_exact_matches_in_its_record_its_card_and_its_output(
    model_folder: Path,
    conversations: Path,
    held_out: Path,
    rows: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Its answers are wrong before training, and right after it but for one."""
    asked = questions(0, rows, tiny.build_tokenizer(), None, compared=True)
    expected = {tuple(question.prompt): question.expected for question in asked}
    assert len(expected) == len(asked) == 10  # of 11 rows, of which one is cut
    calls: list[int] = []

    def learnt(model: Any, tokenizer: Any, prompts: list[list[int]], **others: Any) -> list[str]:
        calls.append(len(prompts))
        right = [expected[tuple(prompt)] for prompt in prompts]
        return ["wrong"] * len(prompts) if len(calls) == 1 else ["wrong", *right[1:]]

    monkeypatch.setattr(models, "answers", learnt)
    settings = {"data__eval": str(held_out), "eval__exact_match": True, "eval__prompts": 2, "train__steps": 1}
    main(configuration(model_folder, conversations, tmp_path / "run", **settings))
    assert calls == [10, 10]
    found = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["exact_match"]
    assert found == {"rows": 10, "before": 0.0, "after": 0.9}
    line, printed = "exact match on 10 held-out rows: 0 before, 9 after training", capsys.readouterr().out
    assert line in printed
    assert printed.count("├") == 1  # two typical answers, both right
    assert "(expected" not in printed
    assert line in (tmp_path / "run" / "final" / "README.md").read_text()
    assert yaml.safe_load((tmp_path / "run" / "final" / "run.yaml").read_text())["exact_match"] == found
