"""Runs whose rows are spread over processes that split the layers, too, train as one process does."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import scenarios
import sharing
import splitting
import tiny
import yaml
from alike import (
    assert_alike_in_16_bits,
    assert_answers_alike,
    assert_goes_on,
    assert_pretrains_alike,
    assert_trains_alike,
)
from test_part_shards import RUNS as OF_SHARDS
from test_tensor_runs import GOES_ON, IN_BF16
from transformers import AutoConfig

PROVEN = pytest.mark.prove
BOTH: Any = {"strategy": "cp_tp"}


@pytest.fixture(scope="module")
def tuned(ranks: Any, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> splitting.Tuned:
    return splitting.Tuned(ranks, conversations, held_out, tmp_path_factory.mktemp("tuned"))


OF_WHOLE_ROWS = ("padded rows, plain kernels", "noise on embeddings")
"""Refused under it, as under cp."""
RUNS = {name: changes for name, changes in OF_SHARDS.items() if name not in OF_WHOLE_ROWS}
SHOWN = ["averages, the best kept, layers computed again"]


@pytest.mark.parametrize("name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in RUNS if each not in SHOWN)])
def test_tuning_its_held_out_loss_and_its_answers_are_those_of_one_process(name: str, tuned: Any):
    assert_trains_alike(tuned, 4, 2, RUNS[name], **BOTH)


@PROVEN
@pytest.mark.parametrize("processes", [4, 8])
def test_questions_are_answered_and_choices_scored_as_by_one_process(processes: int, tuned: Any, tmp_path: Path):
    """Each whole by the processes that split the layers."""
    assert_answers_alike(tuned, processes, 2, tmp_path, **BOTH)


@PROVEN
@pytest.mark.parametrize("name", GOES_ON)
def test_a_run_goes_on_under_other_strategies_as_one_that_was_not_interrupted(name: str, tuned: Any):
    others = {"tp": (4, 2), "cp": (2, 1), "single": (1, 1), "fsdp2_tp": (4, 2), "cp_tp": (4, 2)}
    pairs = [*product(others, ["cp_tp"]), *product(["cp_tp"], [*others][:-1])]
    assert_goes_on(tuned, others, pairs, GOES_ON[name])


@PROVEN
@pytest.mark.parametrize("name", IN_BF16)
def test_computing_in_16_bits_trains_as_on_one_process(name: str, tuned: Any):
    settings: dict[str, Any] = {"precision": "bf16"} | IN_BF16[name]
    found, expected = tuned("shared", 4, 2, **BOTH, **settings), tuned("alone", 1, 1, **settings)
    assert_alike_in_16_bits(found, expected)


@PROVEN
def test_pretraining_and_the_figures_of_its_held_out_sources_are_those_of_one_process(
    ranks: Any, model_folder: Path, tmp_path: Path
):
    assert_pretrains_alike(ranks, "cp_tp", 8, model_folder, tmp_path)


COMMON = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3_text", "phi3"]


@pytest.mark.parametrize("kinds", [COMMON, pytest.param(None, marks=PROVEN)], ids=["common", "every model"])
def test_models_have_the_loss_and_the_gradients_of_whole_rows_and_layers(kinds: list[str] | None, ranks: Any):
    asked = kinds and [type(AutoConfig.for_model(name)) for name in kinds]
    for processes, found in ranks(4).run(splitting.errors_of_models, asked, 2, strategy="ddp", timeout=600):
        assert processes == 4
        assert max(found.values()) < 1e-4, found
        assert len(found) >= (len(COMMON) if kinds else 20)


@pytest.mark.parametrize("mutation", ["copied", "own keys only", "own gradients only"])
def test_a_sum_or_a_key_that_is_left_out_is_seen(mutation: str, ranks: Any):
    kinds = [type(AutoConfig.for_model("llama"))]
    everyone = ranks(4).run(splitting.errors_of_models, kinds, 2, mutation, strategy="ddp")
    assert [processes for processes, _ in everyone] == [4] * 4
    assert max(error for _, found in everyone for error in found.values()) > 1e-3


def test_a_process_holds_its_shard_of_its_part_of_each_layer_and_computes_its_positions(
    ranks: Any, conversations: Path, tmp_path: Path
):
    """Of rows of two processes, four of which hold the shards of each part."""
    model = tiny.build_model_folder(tmp_path / "model", tied=False)
    changes = {"train__steps": 2, "train__micro_batch_size": 2, "train__weights": "bf16"}
    config = scenarios.configuration(model, conversations, tmp_path / "run", **changes)
    found = ranks(8).run(splitting.held_in, config, 2, strategy="cp_tp", mixed_precision="bf16")
    assert [each["world_size"] for each in found] == [8] * 8
    for each in found:
        shapes = each["shapes"]
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (8, 64)  # a quarter of half of 64 rows
        assert shapes["model.layers.1.mlp.down_proj.weight"] == (16, 64)  # of 64 rows, half of 128 columns
        assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (64, 64)
        assert 0.125 < each["bytes"]["held_bytes"] / each["bytes"]["total_bytes"] < 0.13
    recorded = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["strategy"]
    assert (recorded["processes_of_a_row"], recorded["processes_of_a_layer"]) == (2, 2)
    assert (recorded["name"], recorded["sharding"]["cuts"]) == ("cp_tp", 4)
    changes = {"train__steps": 1, "train__micro_batch_size": 2}
    config = scenarios.configuration(model, conversations, tmp_path / "positions", **changes)
    for seen in ranks(4).run(sharing.heaviest_of_a_run, config, {}, strategy="cp_tp"):
        [(own, whole)] = seen
        assert own == whole / 2


CONTEXT, TENSOR = "MEGATRON_LM_CONTEXT_PARALLEL_SIZE", "MEGATRON_LM_TP_DEGREE"
STAGES, SHARDS = "MEGATRON_LM_PP_DEGREE", "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER"
ACCELERATES = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
REFUSED: dict[str, sharing.Refused] = {
    "two processes": (2, {}, {}, "2 GPUs for each row and 2 GPUs for each layer, but with 2 processes; launch a m"),
    "whole parts": (4, {SHARDS: "false"}, {}, "but not megatron_lm_use_distributed_optimizer to true, without which"),
    "rows alone": (
        4,
        {TENSOR: "1"},
        {},
        "parallel_size to 2, for which there is no strategy; use the strategy file cp.",
    ),
    "stages": (8, {TENSOR: "1", STAGES: "2"}, {}, "for which there is no strategy; use the strategy file fsdp2_pp."),
    "all three": (8, {STAGES: "2"}, {}, "there is no strategy; use the strategy file fsdp2_tp_pp or cp_tp."),
    "Accelerate's key for rows": (
        4,
        {"PARALLELISM_CONFIG_CP_SIZE": "2"},
        {},
        "use the strategy file cp or cp_tp, or set",
    ),
    "Accelerate's keys": (
        *(4, ACCELERATES | {"PARALLELISM_CONFIG_TP_SIZE": "2", "PARALLELISM_CONFIG_CP_SIZE": "2"}, {}),
        "set it to 1, or use the strategy file cp_tp.",
    ),
    "noise": (4, {}, {"train__neftune_alpha": 5.0}, "set it to 0, or use the strategy file fsdp2_tp."),
    "attention": (4, {}, {"model__attention": "sdpa"}, "set model.attention to auto, or use the strategy file fsdp2"),
    "whole layers beside adapters": (
        *(4, {}, {"adapter__type": "lora", "adapter__modules_to_save": ["o_proj"]}),
        "adapter.modules_to_save names o_proj, of which cp_tp gives each process a part; train adapters on them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launches_and_settings_that_do_not_go_with_shared_rows_and_split_layers_are_refused(
    name: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    sharing.assert_refused(ranks, REFUSED[name], model_folder, conversations, tmp_path / "run", "cp_tp")
