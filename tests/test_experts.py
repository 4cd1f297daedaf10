"""Layers of experts that processes share compute what one process computes with all of them."""

from typing import Any

import experts
import pytest
import torch
from test_attention import small_model
from transformers import LlamaConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from finetune.config.compatibility import expert_problems, scaling_problems
from finetune.models.expert_layers import expert_modules, experts_of

KINDS = [MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig]


@pytest.mark.prove
@pytest.mark.parametrize("processes", [2, 4])
def test_every_model_whose_experts_can_be_shared_has_its_scores_and_gradients(processes: int, ranks: Any):
    everyone = ranks(processes).run(experts.errors_of_models, strategy="ep")
    for size, found in everyone:
        assert size == processes
        assert {each.__name__ for each in KINDS} < set(found)
        assert len(found) >= 25
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_a_process_without_tokens_passes_gradients_on(implementation: str, ranks: Any):
    for size, found in ranks(2).run(experts.errors_where_one_has_no_tokens, implementation, strategy="ep"):
        assert size == 2
        assert set(found) == {"output", "hidden states", "weights"}
        assert max(found.values()) < 1e-5


def test_experts_are_the_parameters_that_lie_one_after_another():
    model = small_model(MixtralConfig)
    assert [*expert_modules(model)] == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert experts_of(model) == 4
    assert experts_of(small_model(LlamaConfig)) == 0
    assert experts_of(torch.nn.Conv1d(3, 3, 3)) == 0


def test_what_cannot_be_shared_is_refused_in_a_sentence():
    assert expert_problems("LlamaForCausalLM", 0, 1) == []
    assert expert_problems("MixtralForCausalLM", 8, 4) == []
    (of_dense,) = expert_problems("LlamaForCausalLM", 0, 2)
    assert of_dense == (
        "ep shares the experts of each layer, and LlamaForCausalLM has none that can be shared; use the strategy file "
        "fsdp2."
    )
    (of_parts,) = expert_problems("MixtralForCausalLM", 8, 3)
    assert "shared by 3 processes, but each layer has 8 or a multiple of it; set --megatron_lm_expert_mod" in of_parts
    (of_scaling,) = scaling_problems("ep", precision="fp16")
    assert of_scaling.endswith("launch with --mixed_precision bf16 or no.")
