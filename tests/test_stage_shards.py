"""Pipelines whose stages are sharded train as one process does, and each process holds its shard alone."""

import copy
from pathlib import Path
from typing import Any

import pipelines
import pytest
import scenarios
import sharing
import splitting
import tiny
import torch
import torch.distributed as dist
import yaml
from alike import assert_alike_in_16_bits
from test_pipeline import IN_BF16, SETTINGS
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.distributed.part_shards import shard_part
from finetune.models.recomputation import recompute_activations
from finetune.training.loss import next_token_loss_sum, take_losses

PROVEN = pytest.mark.prove
SHARDED = {name: changes for name, (*_, changes) in SETTINGS.items() if name != "8 bits"}  # which are refused
SHARDED["two parts of each stage"] = {"train__pipeline_parts": 2, "train__micro_batch_size": 1}
SHOWN = ["an adapter that starts with the weights"]


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, and an embedding that is not the head."""
    return tiny.build_model_folder(tmp_path_factory.mktemp("deep"), tied=False, layers=6)


@pytest.fixture(scope="module")
def tuned(
    ranks: Any, deep_folder: Path, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = tmp_path_factory.mktemp("tuned")
    return pipelines.Tuned(ranks, deep_folder, conversations, held_out, folder, strategy="fsdp2_pp")


@pytest.mark.parametrize("name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in SHARDED if each not in SHOWN)])
def test_tuning_its_held_out_loss_and_its_answers_are_those_of_one_process(name: str, tuned: Any):
    tuned.assert_alike(4, 2, **SHARDED[name])


@pytest.mark.parametrize(
    "name", ["weights in bf16", *(pytest.param(each, marks=PROVEN) for each in IN_BF16 if each[0] != "w")]
)
def test_computing_in_16_bits_trains_as_on_one_process(name: str, tuned: Any):
    settings: dict[str, Any] = {"precision": "bf16"} | IN_BF16[name][2]
    found, expected = tuned("shared", 4, 2, **settings), tuned("alone", 1, 1, **settings)
    assert_alike_in_16_bits(found, expected)


@pytest.mark.parametrize("weights", ["fp32_master", pytest.param("bf16", marks=PROVEN)])
def test_an_embedding_that_is_the_head_too_stays_the_same_in_both_stages(
    weights: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    changes = {"train__weights": weights, "train__layer_decay": 0.9, "train__micro_batch_size": 2, "train__steps": 4}
    config = scenarios.configuration(model_folder, conversations, tmp_path, **changes)
    found = ranks(4).run(pipelines.embedding_of, config, strategy="fsdp2_pp", mixed_precision="bf16")
    assert len(found) == 4
    assert (found[0], found[1]) == (found[2], found[3])  # two shards, each in the first and in the last stage
    assert found[0] != found[1]


def test_a_process_holds_its_shard_of_its_own_layers_alone(
    ranks: Any, deep_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(deep_folder, conversations, tmp_path, train__steps=2, train__micro_batch_size=2)
    found = ranks(4).run(pipelines.held_in, config, 2, strategy="fsdp2_pp")
    assert [each["stage"] for each in found] == [0, 0, 1, 1]
    assert [each["stepped"] for each in found] == [each["held"] for each in found]
    of_layers = [{name.split(".")[2] for name in each["held"] if ".layers." in name} for each in found]
    assert of_layers == [{"0", "1", "2"}] * 2 + [{"3", "4", "5"}] * 2
    total = found[0]["bytes"]["total_bytes"]
    assert sum(each["bytes"]["held_bytes"] for each in found) == total  # each element in one process
    assert max(each["bytes"]["held_bytes"] for each in found) < total / 3
    recorded = yaml.safe_load((tmp_path / "run.yaml").read_text())["strategy"]
    assert (recorded["name"], recorded["stages"], recorded["sharding"]["cuts"]) == ("fsdp2_pp", 2, 2)


REFUSED: dict[str, tuple[int, dict[str, str], dict[str, Any], str]] = {
    "stages that nobody shares": (
        *(2, {}, {}),
        "each of the 2 processes has another one; launch 4 or more, or use the strategy file pp.",
    ),
    # which come when the shards of a layer's gradients have been added up
    "gradients that come later": (
        *(4, {}, {"train__pipeline_schedule": "zero_bubble"}),
        "train.pipeline_schedule is zero_bubble, but fsdp2_pp adds up the gradients of a layer's weights before it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launches_and_settings_that_do_not_go_with_shards_of_stages_are_refused(
    name: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    sharing.assert_refused(ranks, REFUSED[name], model_folder, conversations, tmp_path / "run", "fsdp2_pp")


@pytest.mark.parametrize("recomputes", [False, True])
def test_micro_batches_that_are_on_their_way_together_have_the_gradients_of_weights_that_are_not_sharded(
    recomputes: bool,
):
    """Weights are freed with each backward pass, while another micro-batch waits for its own."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **splitting.SIZES), dtype=torch.float32)
        sharded = copy.deepcopy(plain)
        for model in (plain, sharded):
            if recomputes:
                recompute_activations(model)
            take_losses(model)
            model.train()
        known = {"device": torch.device("cpu"), "dtype": torch.float32}
        shard_part(sharded, torch.optim.SGD(sharded.parameters()), dist.group.WORLD, lambda _: None, **known)
        rows = torch.randint(0, 64, (3, 1, 24))
        micro_batches = [(row.roll(-1, 1), {"input_ids": row}) for row in rows]
        for model in (plain, sharded):
            first, second = (next_token_loss_sum(model, each) for each in micro_batches[:2])
            first.backward()
            third = next_token_loss_sum(model, micro_batches[2])
            second.backward()
            third.backward()
        expected = {name: each.grad for name, each in plain.named_parameters()}
        assert len(expected) > 10
        for name, each in sharded.named_parameters():
            assert torch.equal(each.grad.to_local(), expected[name])
    finally:
        dist.destroy_process_group()
