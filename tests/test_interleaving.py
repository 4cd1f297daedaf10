"""A pipeline whose stages have several parts of the layers trains as one process does."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corpora
import pipelines
import pytest
import scenarios
import sharing
import tiny
import yaml
from alike import FIGURES, assert_alike, texts_in
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from finetune.models.pipeline_order import Order
from finetune.output.run_reading import read_run
from finetune.run.opening import bubble_line

PROVEN = pytest.mark.prove
LAYERS = 8


def order_of(rank: int, stages: int, parts: int, micro_batches: int) -> list[str]:
    """Of PyTorch's schedule: F for each forward pass of a part, B for each backward pass."""
    count = stages * parts
    known = {"num_stages": count, "group_size": stages, "group_rank": rank}
    own: Any = [
        SimpleNamespace(stage_index=number, is_first=number == 0, is_last=number == count - 1, **known)
        for number in range(rank, count, stages)
    ]
    schedule = ScheduleInterleaved1F1B(own, micro_batches, loss_fn=lambda loss, _: loss)
    actions = (each for each in schedule.pipeline_order[rank] if each is not None)
    return [each.computation_type.value for each in actions]


@pytest.mark.parametrize(("stages", "parts"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 4)])
def test_any_number_of_micro_batches_is_filled_up_and_keeps_as_many_passes_as_is_said(stages: int, parts: int):
    order = Order(stages, parts)
    for given in range(1, 3 * stages + 1):
        computed = order.computed(given)
        assert given <= computed < given + stages
        short = order.shortest_alike(given)
        for rank, micro_batches in itertools.product((0, stages - 1), (computed, short)):
            kept = list(
                itertools.accumulate(1 if each == "F" else -1 for each in order_of(rank, stages, parts, micro_batches))
            )
            assert (kept[-1], max(kept)) == (0, order.ahead(rank, given))


def test_stages_are_idle_for_as_much_less_as_they_have_parts():
    # of 8 micro-batches on 4 stages, 3 passes of one micro-batch are waited for; of halves of the layers 3 halves
    assert Order(4).idle_share(8) == pytest.approx(3 / 11)
    assert Order(4, parts=2).idle_share(8) == pytest.approx(1.5 / 9.5)
    assert Order(2, parts=2).idle_share(5) == pytest.approx(1.5 / 6.5)  # one of which trains nothing


def test_a_run_says_how_long_stages_wait_and_what_trains_nothing():
    assert bubble_line(Order(4), 8).startswith(
        "8 micro-batches in a step for 4 stages: each is idle for 27% of it, less"
    )
    said = bubble_line(Order(2, parts=2), 5)
    assert said.startswith("5 micro-batches in a step for 2 stages of 2 parts: each is idle and computes 1 that trains")
    assert said.endswith("best a multiple of 2")


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding that is the head too: of the first part and the last."""
    return tiny.build_model_folder(tmp_path_factory.mktemp("deep"), layers=LAYERS)


@pytest.fixture(scope="module")
def tuned(
    ranks: Any, deep_folder: Path, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return pipelines.Tuned(ranks, deep_folder, conversations, held_out, tmp_path_factory.mktemp("tuned"))


def in_parts(parts: int, **changes: Any) -> dict[str, Any]:
    return {"train__pipeline_parts": parts} | changes


LORA: dict[str, Any] = {"adapter__type": "lora", "adapter__rank": 4}
SETTINGS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "four stages": (4, 4, in_parts(2, train__micro_batch_size=1)),
    "a micro-batch that trains nothing": (
        *(2, 2),
        in_parts(2, train__global_batch_size=10, train__activation_checkpointing="offload"),
    ),
    "lora, replicas, one layer computed again": (4, 2, in_parts(2, **LORA, train__activation_checkpointing=1)),
    "fewer micro-batches than stages": (4, 4, in_parts(2, train__micro_batch_size=4)),
    "four parts, packed, averages": (2, 2, in_parts(4, data__packing=True, train__ema_decay=0.5)),
    "qlora": (4, 4, in_parts(2, **LORA, quantization__bits=4)),
    "a last step of fewer rows": (
        *(2, 2),
        in_parts(2, train__steps=None, train__epochs=0.25, train__global_batch_size=12),
    ),
    "rates by layer": (2, 2, in_parts(3, train__layer_decay=0.5, train__decay_embeddings=False)),
    "stages in which nothing is trained": (3, 3, in_parts(2, **LORA, adapter__targets=["lm_head"])),
}
"""Processes and stages."""
SHOWN = ["a micro-batch that trains nothing"]


@pytest.mark.parametrize(
    "name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in SETTINGS if each not in SHOWN)]
)
def test_tuning_its_held_out_loss_and_its_answers_are_those_of_one_process(name: str, tuned: Any):
    processes, stages, changes = SETTINGS[name]
    tuned.assert_alike(processes, stages, **changes)


@PROVEN
def test_a_run_goes_on_with_other_parts_and_without_any_as_one_that_was_not_interrupted(tuned: Any):
    expected = tuned("alone", 1, 1, train__steps=6)
    launches = [(2, 2, 1), (2, 2, 4), (4, 4, 2), (1, 1, 1)]
    for number, (before, after) in enumerate(itertools.pairwise(launches)):
        kept = {"train__steps": 6, "checkpoint__every": 3, "checkpoint__keep": 5}
        tuned(f"before-{number}", *before[:2], **in_parts(before[2], **kept))
        step = tuned.folder / f"before-{number}" / "checkpoints" / "step-00000003"
        resumed = in_parts(after[2], train__steps=6, checkpoint__resume=str(step))
        assert_alike(tuned(f"after-{number}", *after[:2], **resumed), expected[3:])


@PROVEN
def test_questions_are_answered_and_choices_scored_as_by_one_process(tuned: Any, tmp_path: Path):
    rows = [{"question": f"the red {word}", "answer": word, "choices": [word, "green"]} for word in ("house", "tree")]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"name": name, "data": str(tmp_path / "task.jsonl"), "score": name} for name in ("exact_match", "choice")]
    changes = {"eval__tasks": tasks, "eval__exact_match": True, "train__steps": 2}
    expected, found = tuned("alone", 1, 1, **changes), tuned("shared", 4, 2, **in_parts(2, **changes))
    assert_alike(found, expected)
    for key in ("eval_exact_match", "eval_choice"):
        assert found[-1][key] == expected[-1][key]
    assert read_run(tuned.folder / "shared")["answers"] == read_run(tuned.folder / "alone")["answers"]


@PROVEN
def test_computing_in_16_bits_trains_as_on_one_process(tuned: Any):
    settings: dict[str, Any] = {"precision": "bf16", "train__activation_checkpointing": "full"}
    found, expected = tuned("shared", 2, 2, **in_parts(2, **settings)), tuned("alone", 1, 1, **settings)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=3e-3)
    assert [line["grad_norm"] for line in found] == pytest.approx([line["grad_norm"] for line in expected], abs=1e-2)


def test_each_stage_has_the_layers_of_its_parts_alone(
    ranks: Any, deep_folder: Path, conversations: Path, tmp_path: Path
):
    changes = in_parts(2, train__steps=2, train__micro_batch_size=2)
    config = scenarios.configuration(deep_folder, conversations, tmp_path, **changes)
    found = ranks(2).run(pipelines.held_in, config, 2, strategy="pp")
    assert [each["stage"] for each in found] == [0, 1]
    of_layers = [{int(name.split(".")[2]) for name in each["held"] if ".layers." in name} for each in found]
    assert of_layers == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert [each["stepped"] for each in found] == [each["held"] for each in found]
    assert [each["bytes"]["parts"] for each in found] == [2, 2]
    assert "lm_head.weight" in found[1]["held"]
    recorded = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert recorded["strategy"]["sharding"]["parts"] == 2


def test_parts_wait_for_one_another_in_the_order_that_keeps_stages_busy(
    ranks: Any, deep_folder: Path, conversations: Path, tmp_path: Path
):
    changes = in_parts(2, train__steps=1, train__micro_batch_size=2)
    config = scenarios.configuration(deep_folder, conversations, tmp_path, **changes)
    first, last = ranks(2).run(pipelines.passes_of, config, strategy="pp")
    # of 4 micro-batches, 2 at a time go through each part
    assert first == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert last == [(1, 0), (1, 1), (3, 0), (3, 1), (1, 2), (1, 3), (3, 2), (3, 3)]


@pytest.mark.parametrize("weights", ["fp32_master", pytest.param("bf16", marks=PROVEN)])
def test_an_embedding_that_is_the_head_too_stays_the_same_in_both_stages(
    weights: str, ranks: Any, deep_folder: Path, conversations: Path, tmp_path: Path
):
    changes = in_parts(2, train__weights=weights, train__micro_batch_size=2, train__steps=3)
    config = scenarios.configuration(deep_folder, conversations, tmp_path, **changes)
    found = ranks(2).run(pipelines.embedding_of, config, strategy="pp", mixed_precision="bf16")
    assert len(found) == 2
    assert len(set(found)) == 1


REFUSED: dict[str, tuple[str, int, int, str]] = {
    "more parts than layers": (
        "pp",
        2,
        5,
        "train.pipeline_parts is 5, which makes 10 parts, but the model has 8 layer",
    ),
    "no stages": ("ddp", 2, 2, "train.pipeline_parts is 2, but ddp has no stages; set it to 1, or use the strategy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_cannot_be_are_refused(
    name: str, ranks: Any, deep_folder: Path, conversations: Path, tmp_path: Path
):
    strategy, processes, parts, sentence = REFUSED[name]
    config = scenarios.configuration(deep_folder, conversations, tmp_path / "run", **in_parts(parts))
    for said in ranks(processes).run(
        sharing.refused_by_a_run, "recipes.sft", config.model_dump(), {}, strategy=strategy
    ):
        assert sentence in said
    assert not (tmp_path / "run").exists()


@PROVEN
def test_pretraining_and_the_figures_of_its_held_out_sources_are_those_of_one_process(
    ranks: Any, deep_folder: Path, tmp_path: Path
):
    found, texts = {}, texts_in(tmp_path)
    for strategy, processes, parts in (("single", 1, 1), ("pp", 2, 2)):
        changes = texts | in_parts(parts, eval__every=2, train__steps=4)
        values = corpora.values_of(deep_folder, Path(), tmp_path / strategy, **changes)
        assert ranks(processes).run(corpora.pretrain, values, strategy=strategy) == [processes] * processes
        found[strategy] = scenarios.read_metrics(tmp_path / strategy)
    for one, other in zip(found["pp"], found["single"], strict=True):
        compared = ["loss", "grad_norm", "tokens", *(FIGURES if "eval_loss" in other else [])]
        assert [one[key] for key in compared] == pytest.approx([other[key] for key in compared], rel=1e-5)
