"""Adapters join products of a matrix: no routers, grouped products, or weights that a kernel reads by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
from parity import FP32_TOLERANCE, assert_parity
from safetensors.torch import load_file

from finetune.errors import InputError
from recipes import sft

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 512, "pad_token_id": 1, "eos_token_id": 1, "bos_token_id": None}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "head_dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "llama4_text": SIZES | MIXTURE,
    "phimoe": SIZES | {"num_local_experts": 4, "max_position_embeddings": 256},
    "nemotron_h": {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
    | {"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1}
    | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16}
    | {"layers_block_type": ["mamba", "attention", "moe"]},
    "deepseek_v4": SIZES
    | {"num_key_value_heads": 1, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "num_local_experts": 4}
    | {"head_dim": 16, "moe_intermediate_size": 32, "index_n_heads": 2, "index_head_dim": 16}
    | {"num_experts_per_tok": 2, "mlp_layer_types": ["moe"] * 2, "layer_types": ["sliding_attention"] * 2},
}
NONE = {"llama4_text": "router", "phimoe": "router", "deepseek_v4": "o_a_proj", "nemotron_h": "out_proj"}
"""Last names of layers that get no adapter."""


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / request.param
    tiny.build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": request.param, **KINDS[request.param]}))
    return folder


def test_all_linear_layers_are_those_whose_product_an_adapter_can_join(
    model: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    lora = {"adapter__type": "lora", "adapter__rank": 4, "train__steps": 2}
    sft.main(scenarios.configuration(model, conversations, tmp_path / "run", **lora))
    saved = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    assert any(f".{name}." in each for name in ("o_b_proj", "o_proj") for each in saved)
    assert model.name != "nemotron_h" or any(".mixer.in_proj." in name for name in saved)
    assert not [name for name in saved if f".{NONE[model.name]}." in name]
    last = scenarios.read_metrics(tmp_path / "run")[-1]
    assert last["grad_norm"] > 0


def test_such_a_layer_named_as_a_target_is_refused_before_weights_load(
    model: Path, conversations: Path, tmp_path: Path
):
    lora = {"adapter__type": "lora", "adapter__targets": [NONE[model.name]]}
    with pytest.raises(InputError, match=f"adapter.targets: .*{NONE[model.name]}"):
        sft.main(scenarios.configuration(model, conversations, tmp_path / "run", **lora))


def test_adapters_of_experts_learn_under_zero3_what_they_learn_on_one_process(
    ranks: Any, conversations: Path, tmp_path: Path
):
    """PEFT hides the weights of experts while they compute, from modules that DeepSpeed would gather one by one."""
    folder = tmp_path / "ernie"
    tiny.build_tokenizer().save_pretrained(folder)
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 1}
    experts |= {"moe_intermediate_size": 32}
    (folder / "config.json").write_text(json.dumps({"model_type": "ernie4_5_moe", **SIZES, **experts}))
    metrics = []
    for strategy, processes in (("single", 1), ("zero3", 2)):
        lora = {"adapter__type": "lora", "adapter__rank": 4, "train__steps": 3, "train__micro_batch_size": 2}
        config = scenarios.configuration(folder, conversations, tmp_path / strategy, **lora)
        for seen in ranks(processes).run(scenarios.train, config, strategy=strategy):
            assert seen["world_size"] == processes
        metrics.append(scenarios.read_metrics(tmp_path / strategy))
    saved = load_file(tmp_path / "zero3" / "final" / "adapter_model.safetensors")
    assert any(".experts." in name for name in saved)
    assert_parity(metrics[1], metrics[0], FP32_TOLERANCE)
