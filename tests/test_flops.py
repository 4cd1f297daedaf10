"""Counted FLOPs against PyTorch's own counter."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from finetune.config import sections
from finetune.models import adapter
from finetune.models import loading as models
from finetune.models.flops import training_flops


def test_flops_of_a_training_step_are_those_that_pytorch_counts():
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        attn_implementation="eager",  # the counter sees its matrix products
    )
    model, length = LlamaForCausalLM(config), 48
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(3, length, dtype=torch.int64)).logits.sum().backward()
    shape = models.shape(model)
    ours = training_flops(**shape, mean_row_length=length).of(1, 1)
    skipped_half = 6 * shape["layers"] * shape["heads"] * shape["head_dim"] * length  # above the diagonal
    assert (ours + skipped_half) * 3 * length == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("family", ["mixtral", "gpt2"])
def test_flops_are_those_of_the_experts_that_a_token_meets_and_of_gpt2s_own_layers(family: str):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    mixture = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96, "num_key_value_heads": 4}
    kinds = {"mixtral": sizes | mixture, "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **kinds[family]))
    found = models.shape(model)
    attention = 4 * 64 * 64
    inner = {"mixtral": 2 * 3 * 64 * 96, "gpt2": 2 * 64 * 256}[family]  # of two of the eight experts
    assert found["matrix_parameters"] == found["trained_matrix_parameters"] == 2 * (attention + inner)
    assert found["head_parameters"] == 64 * 512


def test_flops_of_layers_that_differ_are_those_of_their_heads_and_of_the_experts_that_a_token_meets():
    mixture = {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 32}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "vocab_size_per_layer_input": 512}

    def shape(**changes: Any) -> dict[str, Any]:
        with torch.device("meta"):
            config = AutoConfig.for_model("gemma4_text", **sizes, **heads, **layers, **mixture | changes)
            return models.shape(AutoModelForCausalLM.from_config(config))

    found = shape()
    assert found["head_dim"] == 24
    of_an_expert = 2 * 3 * 64 * 32  # in two layers
    assert found["matrix_parameters"] - shape(top_k_experts=1)["matrix_parameters"] == of_an_expert


def test_a_head_that_an_adapter_saves_whole_counts_once():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=512))
    section = sections.Adapter(type="lora", rank=2, targets=["q_proj"], modules_to_save=["lm_head"])
    shape = models.shape(adapter.on_a_copy(model, section))
    assert shape["head_parameters"] == shape["trained_head_parameters"] == 64 * 512
