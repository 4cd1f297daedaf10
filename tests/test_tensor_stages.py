"""Pipelines whose layers are split train as one process does, with whole parts and with shards of them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pipelines
import pytest
import scenarios
import sharing
import splitting
import tiny
import yaml
from alike import assert_alike, assert_answers_alike

PROVEN = pytest.mark.prove
LORA: dict[str, Any] = {"adapter__type": "lora", "adapter__rank": 4}
IN_TURN: dict[str, Any] = {"train__pipeline_parts": 2, "train__micro_batch_size": 1}


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, of which half can be quantised to 4 bits, and an embedding that is not the head."""
    folder = tiny.build_model_folder(tmp_path_factory.mktemp("deep"), tied=False, layers=6, intermediate_size=512)
    described = json.loads((folder / "config.json").read_text()) | {"head_dim": 64}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def tuned_by(
    ranks: Any, deep_folder: Path, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, pipelines.Tuned]:
    """What trains under each strategy, in one folder."""
    known = ranks, deep_folder, conversations, held_out, tmp_path_factory.mktemp("tuned")
    return {name: pipelines.Tuned(*known, strategy=name) for name in ("tp_pp", "fsdp2_tp_pp")}


SETTINGS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "all weights": ("tp_pp", 4, 2, {}),
    "replicas": ("tp_pp", 8, 2, {}),
    "three stages": ("tp_pp", 6, 3, {}),
    "replicas, lora": ("tp_pp", 8, 2, LORA),
    "averages, the best kept, layers computed again": (
        *("tp_pp", 4, 2),
        {"train__ema_decay": 0.5, "eval__keep_best": True, "train__activation_checkpointing": "full"},
    ),
    "lora, one layer computed again": ("tp_pp", 4, 2, LORA | {"train__activation_checkpointing": 1}),
    "qlora, packed": ("tp_pp", 4, 2, LORA | {"quantization__bits": 4, "data__packing": True}),
    "padded rows, plain kernels": ("tp_pp", 4, 2, {"model__attention": "sdpa", "model__kernels": "plain"}),
    "two parts of each stage": ("tp_pp", 4, 2, IN_TURN),
    "deferred gradients": ("tp_pp", 4, 2, {"train__pipeline_schedule": "zero_bubble"}),
    "an embedding that is trained beside adapters": (
        *("tp_pp", 4, 2),
        LORA | {"adapter__modules_to_save": ["embed_tokens"]},
    ),
    "rates by layer": ("tp_pp", 4, 2, {"train__layer_decay": 0.5, "train__decay_embeddings": False}),
    "an adapter that starts with the weights": ("tp_pp", 4, 2, LORA | {"adapter__init": "pissa"}),
    "adapters in one stage alone": ("tp_pp", 4, 2, LORA | {"adapter__targets": ["lm_head"]}),
    "shards": ("fsdp2_tp_pp", 8, 2, {}),
    "shards, qlora": ("fsdp2_tp_pp", 8, 2, LORA | {"quantization__bits": 4}),
    "shards, two parts of each stage": ("fsdp2_tp_pp", 8, 2, IN_TURN),
}
"""Strategy, processes, of which two split each layer, and stages."""
SHOWN = ["qlora, packed"]


@pytest.mark.parametrize(
    "name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in SETTINGS if each not in SHOWN)]
)
def test_tuning_its_held_out_loss_and_its_answers_are_those_of_one_process(name: str, tuned_by: Any):
    strategy, processes, stages, changes = SETTINGS[name]
    tuned_by[strategy].assert_alike(processes, stages, **changes)


@pytest.mark.parametrize(("strategy", "processes"), [pytest.param("tp_pp", 4, marks=PROVEN)])
def test_questions_are_answered_and_choices_scored_as_by_one_process(
    strategy: str, processes: int, tuned_by: Any, tmp_path: Path
):
    assert_answers_alike(tuned_by[strategy], processes, 2, tmp_path)


IN_BF16: dict[str, tuple[str, int, dict[str, Any]]] = {
    "masters in fp32": ("tp_pp", 4, {}),
    "weights in bf16": ("tp_pp", 4, {"train__weights": "bf16"}),
    "shards": ("fsdp2_tp_pp", 8, {}),
}


@PROVEN
@pytest.mark.parametrize("name", IN_BF16)
def test_computing_in_16_bits_trains_as_on_one_process(name: str, tuned_by: Any):
    strategy, processes, changes = IN_BF16[name]
    tuned, settings = tuned_by[strategy], {"precision": "bf16"} | changes
    found, expected = tuned("shared", processes, 2, **settings), tuned("alone", 1, 1, **settings)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], abs=3e-3)
    assert [line["grad_norm"] for line in found] == pytest.approx([line["grad_norm"] for line in expected], rel=5e-3)


@PROVEN
@pytest.mark.parametrize("changes", [{}, LORA | {"quantization__bits": 4}, {"train__optimizer": "adamw_8bit"}])
def test_a_run_goes_on_over_other_processes_as_one_that_was_not_interrupted(changes: dict[str, Any], tuned_by: Any):
    settings = changes | {"train__steps": 6}
    expected = tuned_by["tp_pp"]("alone", 1, 1, **settings)
    launches = [("tp_pp", 8, 2), ("fsdp2_tp_pp", 8, 2), ("tp_pp", 4, 2), ("tp_pp", 1, 1), ("fsdp2_tp_pp", 8, 2)]
    for (strategy, *before), (other, *after) in itertools.pairwise(launches):
        tuned_by[strategy]("before", *before, **settings, checkpoint__every=3, checkpoint__keep=5)
        step = tuned_by[strategy].folder / "before" / "checkpoints" / "step-00000003"
        found = tuned_by[other]("after", *after, **settings, checkpoint__resume=str(step))
        assert_alike(found, expected[3:])


@pytest.mark.parametrize("weights", ["fp32_master", pytest.param("bf16", marks=PROVEN)])
def test_an_embedding_that_is_the_head_too_stays_the_same_in_both_stages(
    weights: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    changes = {"train__weights": weights, "train__layer_decay": 0.9, "train__micro_batch_size": 2, "train__steps": 4}
    config = scenarios.configuration(model_folder, conversations, tmp_path, **changes)
    found = ranks(4).run(pipelines.embedding_of, config, strategy="tp_pp", mixed_precision="bf16")
    assert len(found) == 4
    assert (found[0], found[1]) == (found[2], found[3])  # the tokens of each place, in the first and in the last stage
    assert found[0] != found[1]


@pytest.mark.parametrize(("strategy", "processes"), [("tp_pp", 4), pytest.param("fsdp2_tp_pp", 8, marks=PROVEN)])
def test_a_process_holds_its_parts_of_its_own_layers_alone(
    strategy: str, processes: int, ranks: Any, deep_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(deep_folder, conversations, tmp_path, train__steps=2, train__micro_batch_size=2)
    found = ranks(processes).run(pipelines.held_in, config, 2, strategy=strategy)
    of_stage = processes // 2
    assert [each["stage"] for each in found] == [0] * of_stage + [1] * of_stage
    assert [each["stepped"] for each in found] == [each["held"] for each in found]
    of_layers = [{name.split(".")[2] for name in each["held"] if ".layers." in name} for each in found]
    assert of_layers == [{"0", "1", "2"}] * of_stage + [{"3", "4", "5"}] * of_stage
    total = found[0]["bytes"]["total_bytes"]
    held = sum(each["bytes"]["held_bytes"] for each in found)
    assert total < held < 1.01 * total  # norms are in two processes, and nothing else
    recorded = yaml.safe_load((tmp_path / "run.yaml").read_text())["strategy"]
    known = recorded["name"], recorded["stages"], recorded["processes_of_a_layer"], recorded["sharding"]["split"]
    assert known == (strategy, 2, 2, 2)
    assert recorded["sharding"].get("cuts") == (2 if strategy == "fsdp2_tp_pp" else None)


def test_a_layer_of_a_stage_that_is_not_split_ends_the_run(
    ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", train__micro_batch_size=2)
    for said in ranks(4).run(splitting.held_too_much, config, strategy="tp_pp"):
        assert said.startswith("Under tp_pp, weights take ")
        assert "of which a stage of 1 layers should hold" in said


@PROVEN
def test_a_part_that_is_not_sharded_ends_the_run(ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path):
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", train__micro_batch_size=2)
    for said in ranks(8).run(splitting.not_sharded, config, strategy="fsdp2_tp_pp"):
        assert said.startswith("The launch asked for fsdp2_tp_pp with 8 processes, but tp_pp with 8 is active")


REFUSED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "two processes": (
        *("tp_pp", 2, {}),
        "tp_pp was launched with 2 GPUs for each layer and 2 stages, but with 2 processes; launch a multiple of 4, or "
        "set --megatron_lm_tp_degree or --megatron_lm_pp_degree.",
    ),
    "parts that nobody shares": (
        *("fsdp2_tp_pp", 4, {}),
        "each of the 4 processes has another one; launch 8 or more, or use the strategy file tp_pp.",
    ),
    "gradients that come later": (
        *("fsdp2_tp_pp", 4, {"train__pipeline_schedule": "zero_bubble"}),
        "frees them; set it to 1f1b, or use the strategy file tp_pp.",
    ),
    "more stages than layers": (
        *("tp_pp", 4, {"train__pipeline_parts": 2}),
        "which makes 4 parts, but the model has 2 layers; set it to 1.",
    ),
    "whole layers beside adapters": (
        *("tp_pp", 4, {"adapter__type": "lora", "adapter__modules_to_save": ["o_proj"]}),
        "adapter.modules_to_save names o_proj, of which tp_pp gives each process a part; train adapters on them",
    ),
    "noise": ("tp_pp", 4, {"train__neftune_alpha": 5.0}, "tp_pp fills rows up to equal length, and train.neftune"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launches_and_settings_that_do_not_go_with_pipelines_of_split_layers_are_refused(
    name: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    strategy, processes, changes, sentence = REFUSED[name]
    changes = {"train__micro_batch_size": 1} | changes
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes)
    asked = sharing.refused_by_a_run, "recipes.sft", config.model_dump(), {}
    for said in ranks(processes).run(*asked, strategy=strategy):
        assert sentence in said
    assert not (tmp_path / "run").exists()
