"""Processes that would not train the same run are refused, by name, before weights load."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scenarios

from finetune.run import agreement
from finetune.run.agreement import Told

FIRST = Told(
    "process 0 on node1",
    "node1",
    inputs={"train": "1a", "eval": None, "base": "2b"},
    settings={"train.learning_rate": 1e-4, "the strategy": "fsdp2"},
    versions={"torch": "2.13.0", "deepspeed": "0.19.0"},
)
SECOND = replace(FIRST, name="process 1 on node2", host="node2")


def test_processes_that_are_alike_but_for_their_names_agree():
    assert agreement.problems([FIRST, SECOND]) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"inputs": FIRST.inputs | {"train": "3c"}},
            "data.train: the training rows of process 1 on node2 are not those of process 0 on node1; make the files "
            "the same on every machine.",
        ),
        (
            {"settings": FIRST.settings | {"train.learning_rate": 2e-4}},
            "train.learning_rate is 0.0002 for process 1 on node2 and 0.0001 for process 0 on node1; start every "
            "machine with the same configuration and flags.",
        ),
        (
            {"settings": FIRST.settings | {"the strategy": "zero3"}},
            "the strategy is 'zero3' for process 1 on node2 and 'fsdp2' for process 0 on node1; start every "
            "machine with the same configuration and flags.",
        ),
        (
            {"versions": {"torch": "2.12.1", "deepspeed": "0.19.0"}},
            "torch is 2.12.1 for process 1 on node2 and 2.13.0 for process 0 on node1; install the same on every "
            "machine.",
        ),
        (
            {"versions": {"torch": "2.13.0"}},
            "deepspeed is missing for process 1 on node2 and 0.19.0 for process 0 on node1; install the same on every "
            "machine.",
        ),
    ],
)
def test_a_difference_is_one_sentence_that_names_both_processes(changes: dict[str, Any], expected: str):
    third = replace(SECOND, name="process 2 on node3", **changes)
    assert agreement.problems([FIRST, replace(SECOND, **changes), third]) == [expected]


@pytest.mark.parametrize(
    ("key", "value", "elsewhere", "otherwise"),
    [
        (
            "data.train",
            [{"path": "/a", "weight": 2.0}],
            [{"path": "/b", "weight": 2.0}],
            [{"path": "/a", "weight": 1.0}],
        ),
        ("data.train", ["/a", "/a2"], ["/b", "/b2"], ["/a"]),
        ("data.stages", [{"train": "/a", "tokens": 1}], [{"train": "/b", "tokens": 1}], [{"train": "/a", "tokens": 2}]),
        ("eval.tasks", [{"data": "/a", "limit": 5}], [{"data": "/b", "limit": 5}], [{"data": "/a", "limit": 6}]),
    ],
)
def test_names_of_files_are_not_compared_and_what_else_is_set_of_them_is(
    key: str, value: Any, elsewhere: Any, otherwise: Any
):
    assert agreement._comparable(key, elsewhere) == agreement._comparable(key, value)
    assert agreement._comparable(key, otherwise) != agreement._comparable(key, value)


def test_the_model_may_lie_elsewhere_and_the_output_folder_may_not():
    assert agreement._comparable("model.path", "/a") == agreement._comparable("model.path", "/b")
    assert agreement._comparable("train.output_dir", "/a") != agreement._comparable("train.output_dir", "/b")


def test_clocks_that_differ_are_named_and_those_that_agree_are_not():
    assert agreement.clock_lines([("node1", 100.0), ("node2", 104.9)]) == []
    assert agreement.clock_lines([("node1", 100.0), ("node2", 190.0), ("node3", 101.0)]) == [
        "the clock of node2 is 90 s ahead of that of node1: times in logs and of files cannot be compared; training "
        "does not depend on them"
    ]


@pytest.mark.parametrize(
    ("rates", "contexts", "expected"),
    [
        ((1e-3, 1e-3), (1, 1), []),
        ((1e-3, 2e-3), (1, 1), ["train.learning_rate is 0.002 for process 1 on"]),
        ((1e-3, 1e-3), (2, 4), ["the number of processes that compute a row is 4 for process 1 on"]),
    ],
)
def test_processes_of_other_rates_or_groups_are_refused_together_and_equal_ones_are_not(
    rates: Any, contexts: Any, expected: Any, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(model_folder, conversations, tmp_path)
    found = ranks(2).run(agreed_on, config, rates, contexts, strategy="ddp")
    assert [said["world_size"] for said in found] == [2, 2]
    for said in found:
        assert len(said["refused"]) == len(expected)
        assert all(sentence.startswith(start) for sentence, start in zip(said["refused"], expected))


def agreed_on(config: Any, rates: tuple[float, ...], contexts: tuple[int, ...]) -> dict[str, Any]:
    from accelerate import Accelerator

    from finetune.distributed import Strategy
    from finetune.errors import InputError

    Accelerator(cpu=True)
    launch = Strategy.from_environment()
    launch = replace(launch, context=contexts[launch.rank])
    train = config.train.model_copy(update={"learning_rate": rates[launch.rank]})
    refused = []
    try:
        assert agreement.agree(config.model_copy(update={"train": train}), launch, {"train": "1a"}) == []
    except InputError as error:
        refused.append(str(error))
    return {"world_size": launch.world_size, "refused": refused}
