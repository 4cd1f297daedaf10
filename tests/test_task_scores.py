"""Tasks of eval.tasks: the same answers and log-probabilities under every strategy, and in the records of the run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from finetune.errors import InputError
from finetune.models import loading
from finetune.training import evaluation
from recipes import sft

LAUNCHES = [
    *[("ddp", 2), ("fsdp2", 2), ("zero3", 2)],
    *[
        pytest.param(*each, marks=pytest.mark.prove)
        for each in [("zero2", 2), ("fsdp2_offload", 2), ("zero3_offload", 2), ("fsdp2", 4), ("hsdp", 4), ("zero3", 4)]
    ],
]
"""Eleven rows make uneven shares."""
EARLY_ENDS = [1, *range(100, 160)]
"""Tokens at which an answer ends: of 512 so many that answers end at different lengths."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights so large that each question has an answer of its own."""
    folder = tiny.build_model_folder(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"initializer_range": 0.2, "eos_token_id": EARLY_ENDS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, held_out: Path) -> list[dict[str, Any]]:
    """Eleven conversations, and seven questions with two to four choices."""
    path = tmp_path_factory.mktemp("tasks") / "choices.jsonl"
    choices = ["runs", "walks beside the river", "a red tree", "sleeps"]
    rows = [{"question": "the stone " * (1 + i), "choices": choices[: 2 + i % 3], "answer": i % 2} for i in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        {"name": "said", "data": str(held_out), "score": "contains", "max_new_tokens": 12},
        {"name": "chosen", "data": str(path), "score": "choice_norm"},
    ]


def recorded(config: Any) -> dict[str, Any]:
    """Run the recipe; returns the tokens of each question's answer, and the log-probabilities of choices, by time."""
    from finetune.training import task_scores

    said: list[dict[str, list[int]]] = []
    found: list[list[float]] = []
    answered, texts, judged = loading.answers, loading.answer_texts, evaluation.log_probabilities

    def watched_answers(model: Any, tokenizer: Any, prompts: Any, **manner: Any) -> list[str]:
        own: list[list[int]] = []

        def watched_texts(tokenizer: Any, tokens: list[list[int]]) -> list[str]:
            own.extend(tokens)
            return texts(tokenizer, tokens)

        loading.answer_texts = watched_texts
        try:
            return answered(model, tokenizer, prompts, **manner)
        finally:
            loading.answer_texts = texts
            ends = [next((i for i, token in enumerate(each) if token in EARLY_ENDS), len(each)) for each in own]
            said.append({str(list(p)): each[: end + 1] for p, each, end in zip(prompts, own, ends)})

    def watched_judged(*args: Any, **kwargs: Any) -> list[float]:
        found.append(judged(*args, **kwargs))
        return found[-1]

    loading.answers, task_scores.log_probabilities = watched_answers, watched_judged
    try:
        seen = scenarios.train(config)
    finally:
        loading.answers, task_scores.log_probabilities = answered, judged
    return {"world_size": seen["world_size"], "said": said, "found": found}


@pytest.fixture(scope="module")
def run(ranks: Any, model: Path, tasks: Any, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One step under a strategy; returns answers and log-probabilities before and after it, and the last metrics."""
    folder = tmp_path_factory.mktemp("tasks-run") / "run"

    def train(strategy: str, world_size: int) -> tuple[list[dict[str, list[int]]], list[list[float]], dict[str, Any]]:
        changes = {"train__steps": 1, "train__learning_rate": 1e-2, "eval__tasks": tasks}
        config = scenarios.configuration(model, conversations, folder, **changes)
        everyone = ranks(world_size).run(recorded, config, strategy=strategy)
        assert [seen["world_size"] for seen in everyone] == [world_size] * world_size
        assert all(seen["found"] == everyone[0]["found"] for seen in everyone)
        shares = [seen["said"] for seen in everyone]
        assert world_size == 1 or shares[0] != shares[1]  # each answers some
        said = [{key: tokens for share in shares for key, tokens in share[i].items()} for i in range(2)]
        return said, everyone[0]["found"], scenarios.read_metrics(folder)[-1]

    return train


@pytest.fixture(scope="module")
def alone(run: Any) -> Any:
    return run("single", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), LAUNCHES)
def test_a_strategy_answers_with_the_tokens_of_one_process(strategy: str, world_size: int, run: Any, alone: Any):
    said, found, metrics = run(strategy, world_size)
    before, after = alone[0]
    assert len(before) == 11
    assert len({len(tokens) for tokens in before.values()}) > 3  # processes end at different times
    assert before != after
    assert said == [before, after]
    assert len(found) == 2
    for own, reference in zip(found, alone[1]):
        assert own == pytest.approx(reference, abs=2e-4)
    assert (metrics["eval_said"], metrics["eval_chosen"]) == (alone[2]["eval_said"], alone[2]["eval_chosen"])


@pytest.mark.slow
def test_log_probabilities_of_choices_are_those_of_transformers(alone: Any, model: Path, tasks: Any):
    """Summed over the tokens of the choice, each given the question and what stands before it."""
    tokenizer = tiny.build_tokenizer()
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    expected = []
    for line in Path(tasks[1]["data"]).read_text().splitlines():
        row = json.loads(line)
        talk: Any = [{"role": "user", "content": row["question"]}]
        question = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        begin = len(tokenizer(question)["input_ids"])
        for choice in row["choices"]:
            ids = torch.tensor([tokenizer(question + choice)["input_ids"]])
            with torch.no_grad():
                scores = reference(ids).logits.log_softmax(-1)[0, :-1]
            expected.append(scores.gather(1, ids[0, 1:, None])[begin - 1 :].sum().item())
    assert alone[1][0] == pytest.approx(expected, abs=2e-4)


def config_of(model: Path, conversations: Path, output: Path, tasks: Any, **changes: Any) -> Any:
    return scenarios.configuration(model, conversations, output, eval__tasks=tasks, **changes)


def test_a_run_scores_its_tasks_when_evaluation_is_due_and_writes_that_down(
    model: Path,
    conversations: Path,
    tasks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Without held-out rows; the model knows one answer more at each evaluation."""
    calls: list[int] = []

    def learnt(model: Any, tokenizer: Any, prompts: list[list[int]], **others: Any) -> list[str]:
        calls.append(len(prompts))
        return [" ".join(tiny.WORDS) if i < len(calls) else "-" for i in range(len(prompts))]

    monkeypatch.setattr(loading, "answers", learnt)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "a", "answer": "the a one"}) + "\n" for _ in range(6)))
    told = [{"name": "told", "data": str(rows), "score": "contains", "limit": 4, "max_new_tokens": 1}, tasks[1]]
    output = tmp_path / "run"
    sft.main(config_of(model, conversations, output, told, train__steps=4, eval__every=2))
    assert calls == [4, 4, 4]
    metrics = scenarios.read_metrics(output)
    assert [line.get("eval_told") for line in metrics] == [None, 0.5, None, 0.75]
    assert all(0 <= line["eval_chosen"] <= 1 for line in metrics[1::2])
    record = yaml.safe_load((output / "run.yaml").read_text())
    assert record["tasks"]["told"] == {"score": "contains", "rows": 4, "before": 0.25, "after": 0.75}
    assert record["tasks"]["chosen"]["score"] == "choice_norm"
    assert record["tasks"]["chosen"]["rows"] == 7
    assert record["tasks"]["chosen"]["after"] == metrics[-1]["eval_chosen"]
    printed = capsys.readouterr().out
    line = "told (contains, 4 rows): 25.0% before, 75.0% after training"
    assert "told (contains, 4 rows) before training: 25.0%" in printed
    assert "step 2: told (contains, 4 rows) 50.0%" in printed
    assert line in printed
    assert line in (output / "final" / "README.md").read_text()


def test_a_run_that_ended_before_it_scored_a_step_makes_up_for_it(
    model: Path, conversations: Path, tasks: Any, tmp_path: Path
):
    output = tmp_path / "run"
    changes = {"train__steps": 2, "eval__every": 1}
    sft.main(config_of(model, conversations, output, tasks[1:], **changes))
    whole = scenarios.read_metrics(output)
    lines = [{key: value for key, value in line.items() if key != "eval_chosen"} for line in whole]
    (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = yaml.safe_load((output / "run.yaml").read_text())
    (output / "final" / "run.yaml").unlink()
    changes |= {"checkpoint__resume": "auto", "train__overwrite": False}
    sft.main(config_of(model, conversations, output, tasks[1:], **changes))
    assert scenarios.read_metrics(output)[-1]["eval_chosen"] == whole[-1]["eval_chosen"]
    assert yaml.safe_load((output / "run.yaml").read_text())["tasks"] == record["tasks"]


def test_a_run_that_goes_on_with_less_patience_ends_with_the_scores_of_the_step_where_it_stands(
    model: Path, conversations: Path, held_out: Path, tasks: Any, tmp_path: Path
):
    output = tmp_path / "run"
    changes: dict[str, Any] = {"eval__every": 2, "eval__metric": "eval_loss", "data__eval": str(held_out)}
    changes |= {"train__learning_rate": 0.05, "train__schedule": "constant", "checkpoint__keep": 9}  # it gets worse
    begun = {**changes, "train__steps": 9, "checkpoint__every": 1, "eval__early_stopping": 9}
    sft.main(config_of(model, conversations, output, tasks[1:], **begun))
    shutil.rmtree(output / "final")
    for step in (8, 9):
        shutil.rmtree(output / "checkpoints" / f"step-{step:08d}")
    again = {**begun, "eval__early_stopping": 1, "checkpoint__resume": "auto", "train__overwrite": False}
    sft.main(config_of(model, conversations, output, tasks[1:], **again))
    record = yaml.safe_load((output / "run.yaml").read_text())
    assert record["stopped"]["after_step"] == 7
    assert record["tasks"]["chosen"]["after"] == scenarios.read_metrics(output)[-1]["eval_chosen"]


def test_answers_in_a_run_are_those_that_generate_gives_whatever_the_model_says_of_generation(
    model: Path, conversations: Path, tasks: Any, tmp_path: Path
):
    said = []
    for number, own in enumerate(({}, {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1})):
        folder = shutil.copytree(model, tmp_path / f"model-{number}")
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EARLY_ENDS} | own))
        torch.manual_seed(0)
        loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        loaded.generation_config = GenerationConfig.from_pretrained(folder)
        asked = {"most_tokens": [30], "device": torch.device("cpu")}
        said.append(loading.answers(loaded.eval(), tiny.build_tokenizer(), [[40, 41, 40, 41]], **asked))
    assert said[0] == said[1] != [""]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"score": "exactmatch"}, "eval.tasks: said: score exactmatch: there is no score"),
        ({"data": "missing.jsonl"}, "eval.tasks: said: missing.jsonl: there is no such data file"),
        ({"name": "loss"}, "eval_loss is a figure of the held-out loss"),
        ({"name": "a b"}, "the name 'a b' has other characters"),
        ({"score": "choice"}, "it has no choices"),
    ],
    ids=str,
)
def test_tasks_that_cannot_be_scored_are_refused_before_weights_load(
    changes: dict[str, Any],
    said: str,
    model: Path,
    conversations: Path,
    tasks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(loading, "load_model", None)
    with pytest.raises(InputError) as refused:
        sft.main(config_of(model, conversations, tmp_path / "run", [tasks[0] | changes]))
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_two_tasks_of_one_name_are_refused(model: Path, conversations: Path, tasks: Any, tmp_path: Path):
    with pytest.raises(InputError, match="said is the name of two tasks"):
        sft.main(config_of(model, conversations, tmp_path / "run", [tasks[0], tasks[0]]))
