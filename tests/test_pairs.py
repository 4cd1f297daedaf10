"""Pairs of answers: every shape they come in, what is refused, and that their two sides stay together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from plan_models import arithmetic, config_named

from finetune.cli.planning.asked import asked
from finetune.cli.planning.launch_command import launch_command
from finetune.cli.planning.written import Options
from finetune.config.dpo_section import Dpo
from finetune.config.recipe_classes import CorpusRun, PairedRun, class_of
from finetune.config.sections import Run
from finetune.config.strategy_names import STRATEGIES
from finetune.data import dataset
from finetune.data.encoding import Settings
from finetune.data.formats import convert_pair
from finetune.data.rows import Rows
from finetune.data.sources import Source
from finetune.distributed import Strategy
from finetune.errors import BadRow, InputError
from finetune.hardware.cards import parse_gpus
from finetune.planner.memory import needed_bytes
from finetune.planner.nearest import nearest_that_fits
from finetune.planner.question import question_about
from finetune.run.pairs import caches_reference, pair_problems
from finetune.trace.setting import Setting
from recipes.dpo import Config

LLAMA_8B = arithmetic("llama-3.1-8b")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


MESSAGES: dict[str, dict[str, Any]] = {
    "messages": {"prompt": [user("Hi")], "chosen": [answer("a")], "rejected": [answer("b")]},
    "messages and texts": {"prompt": [user("Hi")], "chosen": "a", "rejected": "b"},
    "a text and messages": {"prompt": "Hi", "chosen": [answer("a")], "rejected": [answer("b")]},
    "whole conversations": {"chosen": [user("Hi"), answer("a")], "rejected": [user("Hi"), answer("b")]},
    "repeated prompt": {"prompt": "Hi", "chosen": [user("Hi"), answer("a")], "rejected": [user("Hi"), answer("b")]},
    "conversations behind the prompt that they repeat": {
        "prompt": [user("Hi")],
        "chosen": [user("Hi"), answer("a")],
        "rejected": [user("Hi"), answer("b")],
    },
    "texts of JSON, as in tables": {
        "prompt": json.dumps([user("Hi")]),
        "chosen": json.dumps([answer("a")]),
        "rejected": json.dumps([answer("b")]),
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    },
    "alpaca": {"instruction": "Hi", "chosen": "a", "rejected": "b"},
}


@pytest.mark.parametrize("shape", MESSAGES)
def test_every_shape_is_the_same_two_conversations(shape: str):
    chosen, rejected = convert_pair(MESSAGES[shape])
    for example, text in ((chosen, "a"), (rejected, "b")):
        assert example.messages is not None
        assert [(m["role"], m["content"]) for m in example.messages] == [("user", "Hi"), ("assistant", text)]
        assert example.untrained == frozenset()


def test_texts_stay_texts():
    chosen, rejected = convert_pair({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"})
    assert (chosen.prompt, chosen.completion, rejected.completion) == ("1 + 1 =", " 2", " 3")
    assert chosen.messages is None


def test_earlier_answers_are_the_prompts_and_are_not_trained():
    begin = [user("Hi"), answer("Hello"), user("How?")]
    pair = {"chosen": [*begin, answer("so")], "rejected": [*begin, answer("thus")], "system": "Be short."}
    chosen, rejected = convert_pair(pair)
    assert chosen.messages is not None
    assert [message["role"] for message in chosen.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chosen.untrained == rejected.untrained == {2}


REFUSED = {
    "chosen and rejected are the same": {"prompt": "Hi", "chosen": "a", "rejected": "a"},
    "the key `rejected`, required by the format preference, is missing": {"prompt": "Hi", "chosen": "a"},
    "the key `rejected` has no text": {"prompt": "Hi", "chosen": "a", "rejected": " "},
    "the key `chosen` has an empty answer": {"prompt": [user("x")], "chosen": [answer("")], "rejected": [answer("b")]},
    "the key `chosen` is a text without a prompt": {"chosen": "a", "rejected": "b"},
    "the key `chosen` has an empty answer ": {"prompt": [user("x")], "chosen": [], "rejected": [answer("b")]},
    "the key `system` stands beside a prompt that is plain text": {
        "system": "Be short.",
        "prompt": "Hi",
        "chosen": "a",
        "rejected": "b",
    },
    "differ before their answers: from message 1 on": {
        "chosen": [user("Hi"), answer("a")],
        "rejected": [user("Ho"), answer("b")],
    },
    "`rejected` ends where the other goes on": {
        "chosen": [user("Hi"), answer("a"), user("so?"), answer("yes")],
        "rejected": [user("Hi"), answer("a")],
    },
    "the key `chosen` is neither a text nor a list of messages": {"prompt": "Hi", "chosen": 3, "rejected": "b"},
    "the row is not an object": ["chosen", "rejected"],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_pair_is_refused_with_the_reason(reason: str):
    with pytest.raises(BadRow) as refused:
        convert_pair(REFUSED[reason])
    assert reason.strip() in str(refused.value)


def written(path: Path, pairs: list[Any]) -> Path:
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def rows_of(path: Path, max_length: int = 64, **settings: Any) -> Rows:
    form = Settings(max_length, paired=True, **settings)
    return dataset.read_rows([Source(str(path))], tiny.build_tokenizer(), form, skip_bad_rows=True)


def test_chosen_and_rejected_are_two_rows_that_follow_one_another_and_train_their_answers(tmp_path: Path):
    pairs = [
        {"prompt": [user(f"say {i}")], "chosen": [answer(f"yes {i}")], "rejected": [answer(f"no, not {i}")]}
        for i in range(3)
    ]
    rows = rows_of(written(tmp_path / "pairs.jsonl", pairs))
    tokenizer = tiny.build_tokenizer()
    texts = [tokenizer.decode(row.tokens[row.spans[0][0] : row.spans[0][1]]) for row in rows]
    assert [any(word in text for word in ("yes",)) for text in texts] == [True, False] * 3
    assert [row.source for row in rows] == [f"{tmp_path / 'pairs.jsonl'}:{i}" for i in (1, 1, 2, 2, 3, 3)]
    assert dataset.describe(rows, "training").startswith("3 training pairs (preference)")


def test_a_pair_of_which_one_answer_has_no_token_left_is_dropped_whole(tmp_path: Path):
    long = [user("x " * 70)]
    pairs = [
        {"prompt": [user("a")], "chosen": [answer("b")], "rejected": [answer("c")]},
        {"chosen": [*long, answer("b")], "rejected": [*long, answer("c")]},
    ]
    rows = rows_of(written(tmp_path / "pairs.jsonl", pairs))
    assert (len(rows), rows.summary["dropped"]) == (2, 1)


def test_split_and_weights_never_part_a_pair(tmp_path: Path):
    pairs = [{"prompt": [user(f"say {i}")], "chosen": [answer("yes")], "rejected": [answer("no")]} for i in range(60)]
    rows = rows_of(written(tmp_path / "pairs.jsonl", pairs))
    for some in (*dataset.split(rows, 0.3), dataset.weigh(rows, [1.5]), dataset.weigh(rows, [0.5])):
        sources = [row.source for row in some]
        assert len(sources) % 2 == 0
        assert sources[::2] == sources[1::2]
        assert 0 < len(sources) != len(rows)


def configuration(**changes: Any) -> Config:
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "d"}, "train": {"output_dir": "o"}}
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return Config.model_validate(values)


def launched(strategy: str) -> Strategy:
    return Strategy(strategy, 0, 1, 1, "no", rehearsal=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data__streaming": True}, "data.streaming"),
        ({"data__packing": True}, "data.packing"),
        ({"data__format": "text"}, "data.format text"),
        ({"data__train_on": "all"}, "data.train_on all"),
        ({"eval__exact_match": True}, "eval.exact_match"),
        ({"dpo__reference": "adapter_off"}, "dpo.reference adapter_off needs an adapter"),
        ({"dpo__loss": "orpo", "dpo__reference": "cached"}, "dpo.reference: orpo has no reference"),
        ({"dpo__loss": "simpo", "dpo__reference": "model"}, "dpo.reference: simpo has no reference"),
        ({"dpo__label_smoothing": 0.1}, "dpo.label_smoothing belongs to the loss robust"),
        ({"dpo__margin": 1.0}, "dpo.margin belongs to the loss simpo"),
    ],
    ids=str,
)
def test_what_contradicts_pairs_is_refused_by_its_key(changes: dict[str, Any], named: str):
    cfg = configuration(**changes)
    (problem,) = pair_problems(cfg, cfg.dpo, launched("single"))
    assert named in problem


def test_weights_on_disk_cannot_trade_places_and_what_can_is_named():
    cfg = configuration(dpo__reference="model")
    (problem,) = pair_problems(cfg, cfg.dpo, launched("zero3_nvme"))
    assert problem.startswith("dpo.reference: model")
    assert problem.endswith("set it to cached, or use the strategy file zero3_offload.")
    assert [name for name in STRATEGIES if pair_problems(cfg, cfg.dpo, launched(name))] == ["zero3_nvme"]


def test_references_are_cached_where_nothing_can_be_switched_off():
    for adapter, reference, loss, strategy, expected in (
        ("none", "auto", "sigmoid", "fsdp2", True),
        ("lora", "auto", "sigmoid", "fsdp2", False),
        ("lora", "auto", "sigmoid", "zero3_offload", True),
        ("lora", "cached", "ipo", "single", True),
        ("lora", "adapter_off", "ipo", "zero3", False),
        ("none", "auto", "simpo", "single", False),
        ("none", "model", "sigmoid", "zero3", False),
    ):
        cfg = configuration(adapter__type=adapter, dpo__loss=loss, dpo__reference=reference)
        assert caches_reference(cfg, cfg.dpo, launched(strategy)) == expected


def test_supervised_fine_tuning_names_the_recipe_for_pairs(tmp_path: Path):
    path = written(tmp_path / "pairs.jsonl", [MESSAGES["whole conversations"]])
    with pytest.raises(InputError, match=r"preference pair.*recipes/dpo\.py"):
        dataset.read_rows([Source(str(path))], tiny.build_tokenizer(), Settings(64))
    assert pair_problems(configuration(), Dpo(), launched("single")) == []


def test_plan_takes_a_pair_for_two_documents_and_names_the_recipe(tmp_path: Path, arithmetic_steps: None):
    (tmp_path / "config.json").write_text(json.dumps(config_named("llama-3.1-8b")))
    flags = [f"--model.path={tmp_path}", "--data.train=x.jsonl", f"--train.output_dir={tmp_path / 'out'}"]
    flags += ["--data.max_length=1024", "--adapter.type=lora"]
    plain, paired = (asked(words, Options(gpus="1xH100")).question for words in (flags, [*flags, "--dpo.loss=ipo"]))
    assert (plain.base.row_tokens, paired.base.row_tokens) == (1024, 2048)
    assert plain.mean_document_tokens == paired.mean_document_tokens == 1024
    words = [word for group in launch_command(paired, paired.base) for word in group]
    assert "recipes/dpo.py" in words
    assert words[words.index("--dpo.loss") + 1] == "ipo"


def test_plan_counts_the_passes_and_the_copy_of_a_reference():
    machines, full = parse_gpus("8xH100"), Setting("fsdp2", 8, row_tokens=2048, accumulation=2)
    memory = {name: LLAMA_8B.memory(each).peak for name, each in referring(full).items()}
    time = {
        name: LLAMA_8B.time(each, machines, mean_document_tokens=1024).parts for name, each in referring(full).items()
    }
    assert memory["none"] == memory["cached"]
    assert memory["model"] - memory["none"] == pytest.approx(4 * LLAMA_8B.anatomy.parameters / 8, rel=1e-3)  # in fp32
    assert time["none"] == time["cached"]
    assert time["model"].matrix_products == pytest.approx(4 / 3 * time["none"].matrix_products)  # forward is a third
    assert time["model"].communication >= time["none"].communication
    lora = referring(replace(full, adapter="lora"))
    assert [each.forward_passes for each in lora.values()] == [1, 1, 2, 2, 2]
    assert [replace(each, mismatches=True).forward_passes for each in lora.values()] == [2, 2, 4, 4, 4]
    assert replace(lora["auto"], strategy="zero3").forward_passes == 1


def referring(setting: Setting) -> dict[str, Setting]:
    """A setting with each reference."""
    return {name: replace(setting, reference=name) for name in ("none", "cached", "adapter_off", "model", "auto")}


def test_plan_reads_the_reference_of_a_configuration_and_caches_it_where_the_copy_does_not_fit(
    tmp_path: Path, arithmetic_steps: None
):
    (tmp_path / "config.json").write_text(json.dumps(config_named("llama-3.1-8b")))
    flags = [f"--model.path={tmp_path}", "--data.train=x.jsonl", f"--train.output_dir={tmp_path / 'out'}"]
    flags += ["--data.max_length=512", "--dpo.reference=model"]
    question = asked(flags, Options(gpus="2xH100")).question
    assert (question.base.reference, question.base.mismatches) == ("model", False)
    assert asked([*flags[:-1], "--dpo.loss=kto"], Options(gpus="2xH100")).question.base.mismatches
    assert asked([*flags[:-1], "--dpo.loss=orpo"], Options(gpus="2xH100")).question.base.reference == "none"
    start = replace(
        question.base, strategy="fsdp2", weights="bf16", optimizer="adamw_8bit", activation_checkpointing=True
    )
    without, copy = (LLAMA_8B.memory(replace(start, reference=name)) for name in ("cached", "model"))
    between = replace(
        question.machines,
        gpu=replace(
            question.machines.gpu, memory_gib=(needed_bytes(without, start) + needed_bytes(copy, start)) / 2 / 2**30
        ),
    )
    asked_about = question_about(LLAMA_8B, start, between, mean_document_tokens=512)
    found = nearest_that_fits(asked_about, start)
    assert found is not None
    assert found.changes == {"dpo.reference": "cached"}


def test_file_with_the_section_is_one_of_pairs(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\n")
    assert class_of(["--config", str(file)]) is Run
    file.write_text("dpo: {}\n")
    assert class_of([f"--config={file}"]) is PairedRun
    file.write_text("dpo: [\n")
    assert class_of(["--config", str(file)]) is Run  # which the parser refuses
    assert class_of(["--config", str(tmp_path / "missing.yaml")]) is Run


def test_rows_that_cut_through_documents_are_those_of_pretraining(tmp_path: Path):
    file = tmp_path / "run.yaml"
    for packing, expected in (("true", Run), ("concatenate", CorpusRun)):
        file.write_text(f"data: {{packing: {packing}}}\n")
        assert class_of(["--config", str(file)]) is expected
        assert class_of(["--data.packing", packing]) is class_of([f"--data.packing={packing}"]) is expected
    assert class_of(["--config", str(file), "--data.packing", "true"]) is Run  # a flag overrides the file
