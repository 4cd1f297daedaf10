"""Runs whose layers are split over processes train as one process does."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import splitting
from alike import (
    assert_alike,
    assert_alike_in_16_bits,
    assert_answers_alike,
    assert_pretrains_alike,
    assert_trains_alike,
)

PROVEN = pytest.mark.prove
LORA: dict[str, Any] = {"adapter__type": "lora", "adapter__rank": 4}
SETTINGS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "four processes": (4, 4, {}),
    "fewer heads of keys than processes": (4, 4, {"model__path": "few_keys"}),
    "fewer heads of keys than processes, lora": (4, 4, LORA | {"model__path": "few_keys"}),
    "replicas, lora": (4, 2, LORA),
    "tied embeddings, biases": (4, 4, {"model__path": "biased"}),
    "averages, the best kept, layers computed again": (
        *(2, 2),
        {"train__ema_decay": 0.5, "eval__keep_best": True, "train__activation_checkpointing": "full"},
    ),
    "lora, one layer computed again": (2, 2, LORA | {"train__activation_checkpointing": 1}),
    "lora on all but the experts": (4, 4, LORA | {"model__path": "experts"}),
    "qlora, packed, replicas": (
        *(4, 2),
        LORA | {"model__path": "wide", "quantization__bits": 4, "data__packing": True},
    ),
    "qlora, fewer heads of keys than processes": (4, 4, LORA | {"model__path": "wide_few", "quantization__bits": 4}),
    "packed": (4, 2, {"data__packing": True}),
    "padded rows, plain kernels": (2, 2, {"model__attention": "sdpa", "model__kernels": "plain"}),
    "a last step of fewer rows": (4, 2, {"train__steps": None, "train__epochs": 0.25, "train__global_batch_size": 8}),
    "streamed": (2, 2, {"data__streaming": True}),
    "an embedding that is trained beside adapters": (2, 2, LORA | {"adapter__modules_to_save": ["embed_tokens"]}),
    "adapters of the head": (2, 2, LORA | {"adapter__targets": ["lm_head", "o_proj"]}),
    "rates by layer": (4, 2, {"train__layer_decay": 0.5, "train__decay_embeddings": False}),
    "an adapter that starts with the weights": (4, 2, LORA | {"adapter__init": "pissa"}),
    "noise on embeddings": (4, 2, {"train__neftune_alpha": 5.0}),
}
"""Processes, and of each layer."""
SHOWN = ["fewer heads of keys than processes", "qlora, packed, replicas"]


@pytest.fixture(scope="module")
def tuned(ranks: Any, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> splitting.Tuned:
    return splitting.Tuned(ranks, conversations, held_out, tmp_path_factory.mktemp("tuned"))


@pytest.mark.parametrize(
    "name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in SETTINGS if each not in SHOWN)]
)
def test_tuning_its_held_out_loss_and_its_answers_are_those_of_one_process(name: str, tuned: Any):
    processes, size, changes = SETTINGS[name]
    assert_trains_alike(tuned, processes, size, changes)


@pytest.mark.parametrize(("processes", "size"), [pytest.param(4, each, marks=PROVEN) for each in (2, 4)])
def test_questions_are_answered_and_choices_scored_as_by_one_process(
    processes: int, size: int, tuned: Any, tmp_path: Path
):
    assert_answers_alike(tuned, processes, size, tmp_path)


GOES_ON: dict[str, dict[str, Any]] = {
    "full": {"model__path": "few_keys"},
    "8-bit state": {"model__path": "wide", "train__optimizer": "adamw_8bit"},
    "averages": {"train__ema_decay": 0.5},
    "qlora": LORA | {"model__path": "wide", "quantization__bits": 4},
    "experts": {"model__path": "experts"},
}


@PROVEN
@pytest.mark.parametrize("name", GOES_ON)
def test_a_run_goes_on_over_other_processes_as_one_that_was_not_interrupted(name: str, tuned: Any):
    changes = GOES_ON[name] | {"train__steps": 6}
    expected = tuned("alone", 1, 1, **changes)
    launches = [(4, 4), (4, 2), (2, 2), (1, 1), (4, 4)]
    if "bits" in "".join(changes) or name == "8-bit state":
        launches = [(4, 2), (2, 2), (1, 1), (2, 2)]  # 4 would cut through blocks
    for number, (before, after) in enumerate(itertools.pairwise(launches)):
        tuned(f"before-{number}", *before, **changes, checkpoint__every=3, checkpoint__keep=5)
        step = tuned.folder / f"before-{number}" / "checkpoints" / "step-00000003"
        found = tuned(f"after-{number}", *after, **changes, checkpoint__resume=str(step))
        assert_alike(found, expected[3:])


IN_BF16: dict[str, dict[str, Any]] = {
    "weights in bf16": {"train__weights": "bf16"},
    "masters in fp32": {},
    "lora, activations in host memory": LORA | {"train__activation_checkpointing": "offload"},
    "qlora": LORA | {"model__path": "wide", "quantization__bits": 4},
}


@pytest.mark.parametrize(
    "name", ["weights in bf16", *(pytest.param(each, marks=PROVEN) for each in IN_BF16 if each[0] != "w")]
)
def test_computing_in_16_bits_trains_as_on_one_process(name: str, tuned: Any):
    settings: dict[str, Any] = {"precision": "bf16"} | IN_BF16[name]
    found, expected = tuned("shared", 4, 2, **settings), tuned("alone", 1, 1, **settings)
    assert_alike_in_16_bits(found, expected)


@PROVEN
def test_pretraining_and_the_figures_of_its_held_out_sources_are_those_of_one_process(
    ranks: Any, model_folder: Path, tmp_path: Path
):
    assert_pretrains_alike(ranks, "tp", 4, model_folder, tmp_path)
