"""Runs whose parts of layers are sharded train as one process does, and each process holds its shard alone."""

from itertools import product
from pathlib import Path
from typing import Any

import balancing
import pytest
import scenarios
import sharing
import splitting
import tiny
import yaml
from alike import assert_alike_in_16_bits, assert_goes_on, assert_trains_alike
from test_tensor_runs import GOES_ON, IN_BF16, LORA, SETTINGS

PROVEN = pytest.mark.prove
SHARDED: Any = {"strategy": "fsdp2_tp"}


@pytest.fixture(scope="module")
def tuned(ranks: Any, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> splitting.Tuned:
    return splitting.Tuned(ranks, conversations, held_out, tmp_path_factory.mktemp("tuned"))


RUNS: dict[str, dict[str, Any]] = {name: changes for name, (*_, changes) in SETTINGS.items()} | {
    # of three rows one shard has two; of one, the second has none
    "shards of unequal size": LORA | {"adapter__rank": 3, "adapter__rank_pattern": {"q_proj": 1, "down_proj": 1}},
    "lora on all but the experts": LORA | {"model__path": "experts", "adapter__targets": ["q_proj", "o_proj"]},
}
SHOWN = ["shards of unequal size"]


@pytest.mark.parametrize("name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in RUNS if each not in SHOWN)])
def test_tuning_its_held_out_loss_and_its_answers_are_those_of_one_process(name: str, tuned: Any):
    assert_trains_alike(tuned, 4, 2, RUNS[name], **SHARDED)


@PROVEN
@pytest.mark.parametrize("name", GOES_ON)
def test_a_run_goes_on_under_other_strategies_as_one_that_was_not_interrupted(name: str, tuned: Any):
    others = {"tp": (4, 2), "fsdp2": (2, 1), "single": (1, 1), "fsdp2_tp": (4, 2)}
    pairs = [*product(others, ["fsdp2_tp"]), *product(["fsdp2_tp"], [*others][:-1])]
    assert_goes_on(tuned, others, pairs, GOES_ON[name])


@PROVEN
@pytest.mark.parametrize("name", IN_BF16)
def test_computing_in_16_bits_trains_as_on_one_process(name: str, tuned: Any):
    settings: dict[str, Any] = {"precision": "bf16"} | IN_BF16[name]
    found, expected = tuned("shared", 4, 2, **SHARDED, **settings), tuned("alone", 1, 1, **settings)
    assert_alike_in_16_bits(found, expected)


def test_a_process_holds_its_shard_of_its_part_of_each_layer(ranks: Any, conversations: Path, tmp_path: Path):
    model = tiny.build_model_folder(tmp_path / "model", tied=False)
    changes = {"train__steps": 2, "train__micro_batch_size": 2, "train__weights": "bf16"}
    config = scenarios.configuration(model, conversations, tmp_path / "run", **changes)
    found = ranks(4).run(splitting.held_in, config, 2, strategy="fsdp2_tp", mixed_precision="bf16")
    assert [each["world_size"] for each in found] == [4] * 4
    for each in found:
        shapes = each["shapes"]
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (16, 64)  # half of half of 64 rows
        assert shapes["model.layers.1.mlp.down_proj.weight"] == (32, 64)  # half of 64 rows, half of 128 columns
        assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (128, 64)
        assert shapes["model.norm.weight"] == (32,)
        assert 0.25 < each["bytes"]["held_bytes"] / each["bytes"]["total_bytes"] < 0.26
    digests = [each["whole"] for each in found]  # of the shards of whole weights, to the bit
    assert (digests[0], digests[2]) == (digests[1], digests[3])
    recorded = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["strategy"]
    assert (recorded["name"], recorded["processes_of_a_layer"], recorded["sharding"]["cuts"]) == ("fsdp2_tp", 2, 2)


@pytest.mark.parametrize("strategy", ["fsdp2_tp", "fsdp2_pp"])
def test_a_part_that_is_not_sharded_ends_the_run(
    strategy: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", train__micro_batch_size=2)
    for said in ranks(4).run(splitting.not_sharded, config, strategy=strategy):
        assert said.startswith(f"The launch asked for {strategy} with 4 processes, but {strategy[6:]} with 4 is active")


REFUSED: dict[str, tuple[int, dict[str, str], dict[str, Any], str]] = {
    "two processes": (
        2,
        {},
        {},
        "each of the 2 processes has another one; launch 4 or more, or use the strategy file tp.",
    ),
    "three processes": (3, {}, {}, "fsdp2_tp was launched with 2 GPUs for each layer, but with 3 processes; launch a"),
    "shards of experts": (
        *(4, {"MEGATRON_LM_TP_DEGREE": "1", "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE": "2"}, {}),
        "megatron_lm_use_distributed_optimizer to true, but ep does not shard what processes hold; set it to false",
    ),
    "Accelerate's key": (
        *(4, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "PARALLELISM_CONFIG_TP_SIZE": "2"}, {}),
        "sets parallelism_config_tp_size, by which layers are not split here; set it to 1, or use the strategy file",
    ),
    "whole layers beside adapters": (
        *(4, {}, {"adapter__type": "lora", "adapter__modules_to_save": ["o_proj"]}),
        "adapter.modules_to_save names o_proj, of which fsdp2_tp gives each process a part; train adapters on them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launches_and_settings_that_do_not_go_with_shards_of_parts_are_refused(
    name: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    sharing.assert_refused(ranks, REFUSED[name], model_folder, conversations, tmp_path / "run", "fsdp2_tp")


def test_adapters_of_experts_are_refused(ranks: Any, conversations: Path, tmp_path: Path):
    model = balancing.mixture_folder(tmp_path / "mixture", "mixtral", architectures=["MixtralForCausalLM"])
    config = scenarios.configuration(model, conversations, tmp_path / "run", train__micro_batch_size=1, **LORA)
    for said in ranks(4).run(sharing.refused_by_a_run, "recipes.sft", config.model_dump(), {}, strategy="fsdp2_tp"):
        assert "fsdp2_tp does not shard adapters of experts (" in said
        assert "set adapter.targets to other layers, or use the strategy file tp." in said
    assert not (tmp_path / "run").exists()
