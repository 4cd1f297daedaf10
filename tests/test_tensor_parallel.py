"""Layers that are split over processes compute what whole ones do; what cannot be split is refused."""

from pathlib import Path
from typing import Any

import pytest
import scenarios
import sharing
import splitting
import tiny
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from finetune.config.compatibility import split_problems
from finetune.models import tensor_plan
from finetune.models.loading import without_weights
from finetune.models.tensor_plan import Split

PROVEN = pytest.mark.prove
SIZE = "MEGATRON_LM_TP_DEGREE"


@given(
    shape=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    dim=st.integers(0, 2),
    parts=st.integers(1, 4),
    bundles=st.integers(1, 2),
)
def test_parts_of_a_tensor_put_together_are_the_tensor(shape: list[int], dim: int, parts: int, bundles: int):
    shape[dim] *= parts * bundles
    whole, split = torch.arange(float(torch.Size(shape).numel())).view(shape), Split(dim, parts, bundles)
    stretches = split.stretches(shape)
    every = [split.take(whole, part) for part in range(parts)]
    assert {each.numel() for each in every} == {whole.numel() // parts}
    flat = [each.reshape(-1) for each in every]
    assert tensor_plan.join_flat(flat, stretches).tolist() == whole.view(-1).tolist()
    for part, each in enumerate(flat):
        assert tensor_plan.take_flat(whole.view(-1), part, parts, stretches).tolist() == each.tolist()
    for each in flat:  # as many ranges of elements that follow one another, or fewer, where some touch
        breaks = [1 for one, other in zip(each.tolist(), each.tolist()[1:]) if other != one + 1]
        assert len(breaks) < stretches


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases, no tied embeddings": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "norms of heads": ("qwen3", {}),
    "embeddings that are scaled, and norms after layers": ("gemma3_text", {}),
    "norms of all heads together": ("olmo2", {}),
    "packed projections": ("phi3", {}),
    "one head of keys": ("llama", {"num_key_value_heads": 1}),
    "a vocabulary that cannot be divided": ("llama", {"vocab_size": 63}),
    "experts": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
}
SHOWN = ["biases, no tied embeddings", "norms of heads", "packed projections", "experts"]


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in MODELS if each not in SHOWN)])
def test_loss_and_gradients_are_those_of_the_whole_model(name: str, adapted: bool, ranks: Any):
    for processes in (2, 4):
        asked = splitting.errors_of, *MODELS[name]
        for size, loss, gradients in ranks(processes).run(*asked, adapted, strategy="ddp"):
            assert size == processes
            assert loss < (1e-4 if name == "experts" else 1e-6)
            assert gradients < (1e-4 if name == "experts" else 1e-6)


@PROVEN
@pytest.mark.parametrize("processes", [2, 4])
def test_every_model_that_can_be_split_has_the_loss_and_the_gradients_of_the_whole_one(processes: int, ranks: Any):
    for size, found in ranks(processes).run(splitting.errors_of_models, strategy="ddp"):
        assert size == processes
        assert max(found.values()) < 1e-4, found
        assert len(found) >= 25


def test_a_weight_has_a_gradient_where_some_process_has_one_and_none_where_none_has(ranks: Any):
    """Zeros in the place of none would have the optimizer decay what no step changes under other strategies."""
    assert ranks(2).run(splitting.gradients_beside_the_loss, strategy="ddp") == [(2, False, [2.0, 2.0, 2.0])] * 2


@pytest.mark.parametrize("mutation", ["copied", "partial"])
def test_a_sum_that_is_left_out_is_seen(mutation: str, ranks: Any):
    asked = splitting.errors_of, *MODELS["norms of heads"]
    found = ranks(2).run(*asked, True, mutation, strategy="ddp")
    assert max(gradients for _, _, gradients in found) > 1e-3


REFUSED: dict[str, tuple[int, dict[str, str], dict[str, Any], str]] = {
    "three processes": (
        3,
        {},
        {},
        "tp was launched with 2 GPUs for each layer, but with 3 processes; launch a multiple",
    ),
    "no split": (
        2,
        {SIZE: "1"},
        {},
        "asks for a pipeline of one stage; set megatron_lm_pp_degree (strategy file pp) or",
    ),
    "shards of split layers": (
        *(2, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "PARALLELISM_CONFIG_TP_SIZE": "2"}, {}),
        "sets parallelism_config_tp_size, by which layers are not split here; set it to 1, or use",
    ),
    "heads": (
        3,
        {SIZE: "3"},
        {},
        "cannot be divided by 3 (the model has 8 attention heads, 4 of keys and values); use",
    ),
    "whole layers beside adapters": (
        *(2, {}, {"adapter__type": "lora", "adapter__modules_to_save": ["o_proj", "lm_head"]}),
        "adapter.modules_to_save names o_proj, of which tp gives each process a part; train adapters on them instead",
    ),
    "blocks in 4 bits": (
        *(4, {SIZE: "4"}, {"adapter__type": "lora", "quantization__bits": 4}),
        "cannot be cut in 4 bits, where 64 weights of a row share a scale; use the strategy file fsdp2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launches_and_settings_that_do_not_go_with_split_layers_are_refused(
    name: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    sharing.assert_refused(ranks, REFUSED[name], model_folder, conversations, tmp_path / "run", "tp")


def test_models_without_a_plan_or_with_one_that_is_not_known_are_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    opt = AutoConfig.for_model("opt", **sizes, ffn_dim=64, word_embed_proj_dim=32)
    (clause,) = tensor_plan.why_not(without_weights(opt, False), 2, bits=None)
    assert clause == "OPTForCausalLM has no plan for tensor parallelism in transformers"
    assert split_problems("tp", [clause], []) == [
        f"{clause}; use the strategy file fsdp2, or another --megatron_lm_tp_degree."
    ]
    normed = AutoConfig.for_model("cohere", **sizes, intermediate_size=64, use_qk_norm=True)
    (clause,) = tensor_plan.why_not(without_weights(normed, False), 2, bits=None)
    assert clause.endswith("has weights among split layers (k_norm, q_norm) of which its plan says nothing")
    few = AutoConfig.for_model("llama", **sizes, intermediate_size=64, num_key_value_heads=2)
    assert list(tensor_plan.why_not(without_weights(few, False), 4, bits=None)) == []
    (clause,) = tensor_plan.why_not(without_weights(few, False), 8, bits=None)
    assert clause.startswith("q_proj cannot be divided by 8 (the model has 4 attention heads, 2 of keys and values)")
    packed = AutoConfig.for_model("gpt_neox", **sizes | {"hidden_size": 24, "num_attention_heads": 3})
    (clause,) = tensor_plan.why_not(without_weights(packed, False), 2, bits=None)  # though 3 * 24 outputs could be
    assert clause.startswith("query_key_value cannot be divided by 2 (the model has 3 attention heads")
    shared = {"num_key_value_heads": 1, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2}
    gemma = AutoConfig.for_model("gemma4_text", **sizes | shared, intermediate_size=64, eos_token_id=2)
    (clause,) = tensor_plan.why_not(without_weights(gemma, False), 2, bits=None)
    assert clause.endswith("take the keys of another layer, of which there are fewer heads than 2")
    latent = AutoConfig.for_model("deepseek_v2", **sizes, num_key_value_heads=4)
    (clause,) = tensor_plan.why_not(without_weights(latent, False), 2, bits=None)
    assert "has layers that are split in a way" in clause


def test_a_process_holds_its_part_of_each_layer_and_whole_weights_stay_the_same(
    ranks: Any, conversations: Path, tmp_path: Path
):
    model = tiny.build_model_folder(tmp_path / "model", tied=False)
    changes = {"train__steps": 2, "train__micro_batch_size": 2, "train__weights": "bf16"}
    config = scenarios.configuration(model, conversations, tmp_path / "run", **changes)
    found = ranks(4).run(splitting.held_in, config, 4, strategy="tp", mixed_precision="bf16")
    assert [each["world_size"] for each in found] == [4] * 4
    for each in found:
        shapes = each["shapes"]
        assert shapes["model.layers.0.self_attn.q_proj.weight"] == (16, 64)
        assert shapes["model.layers.0.self_attn.k_proj.weight"] == (8, 64)
        assert shapes["model.layers.0.self_attn.o_proj.weight"] == (64, 16)
        assert shapes["model.layers.1.mlp.down_proj.weight"] == (64, 32)
        assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (128, 64)
        assert shapes["model.norm.weight"] == (64,)
        assert 0.25 < each["bytes"]["held_bytes"] / each["bytes"]["total_bytes"] < 0.26
    assert len({each["whole"] for each in found}) == 1  # to the bit
    recorded = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["strategy"]
    assert (recorded["name"], recorded["processes_of_a_layer"], recorded["sharding"]["shards"]) == ("tp", 4, 4)


def test_a_layer_that_is_not_split_as_planned_ends_the_run(
    ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", train__micro_batch_size=2)
    for said in ranks(2).run(splitting.held_too_much, config, strategy="tp"):
        assert said.startswith("Under tp, weights take")
        assert "nothing was trained" in said
