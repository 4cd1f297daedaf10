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
import torch
from alike import assert_alike
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.models import interleaving
from finetune.output.run_reading import read_run

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
    for given in range(1, 3 * stages + 1):
        computed = interleaving.filled(given, stages)
        assert given <= computed < given + stages
        short = interleaving.shortest_alike(stages, parts, given)
        for rank, micro_batches in itertools.product((0, stages - 1), (computed, short)):
            kept = list(
                itertools.accumulate(1 if each == "F" else -1 for each in order_of(rank, stages, parts, micro_batches))
            )
            assert (kept[-1], max(kept)) == (0, interleaving.ahead(rank, stages, parts, given))


def test_stages_are_idle_for_as_much_less_as_they_have_parts():
    # of 8 micro-batches on 4 stages, 3 passes of one micro-batch are waited for; of halves of the layers 3 halves
    assert interleaving.idle_share(4, 1, 8) == pytest.approx(3 / 11)
    assert interleaving.idle_share(4, 2, 8) == pytest.approx(1.5 / 9.5)
    assert interleaving.idle_share(2, 2, 5) == pytest.approx(1.5 / 6.5)  # one of which trains nothing


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
        in_parts(2, train__global_batch_size=10, train__activation_checkpointing="full"),
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
SHOWN = ["four stages", "a micro-batch that trains nothing", "lora, replicas, one layer computed again"]


@pytest.mark.parametrize(
    "name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in SETTINGS if each not in SHOWN)]
)
def test_tuning_its_held_out_loss_and_its_answers_are_those_of_one_process(name: str, tuned: Any):
    processes, stages, changes = SETTINGS[name]
    expected = tuned("alone", 1, 1, **changes)
    assert_alike(tuned("shared", processes, stages, **changes), expected)
    answers = [read_run(tuned.folder / each)["answers"] for each in ("shared", "alone")]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 3
