"""Activation checkpointing of some layers: which ones, what they keep, and that nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny_types
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.config.sections import Train
from finetune.errors import InputError
from finetune.models import fused, recomputation
from finetune.run.sizes import Sizes
from recipes import sft

LAYERS = 4


def model_of(model_type: str = "llama", *, width: int = 64, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(
        model_type,
        hidden_size=width,
        intermediate_size=5 * width // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=101,
        pad_token_id=0,
        **fields,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).train()
    return model


def step(model: PreTrainedModel) -> tuple[int, int, torch.Tensor, list[torch.Tensor]]:
    """How many layers were computed in the backward pass, bytes kept for it, the loss, and the gradients."""
    computed, kept = list[str](), dict[int, int]()
    for layer in recomputation.layers_of(model):
        layer.mlp.register_forward_pre_hook(lambda *_: computed.append("mlp"))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.arange(200).view(2, 100) % 101
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    assert len(computed) == LAYERS
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return len(computed) - LAYERS, sum(kept.values()), loss.detach(), gradients


@pytest.mark.parametrize(
    ("model_type", "fuses"),
    [("llama", False), ("llama", True), ("modernbert-decoder", False)],  # whose head is named decoder
)
def test_the_first_layers_are_recomputed_the_others_not_and_loss_and_gradients_stay(
    model_type: str, fuses: bool
) -> None:
    before, kept_before = None, None
    for layers in (0, 1, 3, None):
        model = model_of(model_type)
        if layers != 0:
            recomputation.recompute_activations(model, layers)
        if fuses:
            fused.fuse(model)
        again, kept, loss, gradients = step(model)
        assert again == (LAYERS if layers is None else layers)
        assert kept_before is None or kept < 0.9 * kept_before
        kept_before = kept
        before = before or (loss, gradients)
        torch.testing.assert_close((loss, gradients), before, rtol=0, atol=0)


def test_the_recomputed_layers_are_the_first_ones() -> None:
    """What the last ones keep is gone when the backward pass comes to the others."""
    model = model_of()
    recomputation.recompute_activations(model, 3)
    assert [layer.gradient_checkpointing for layer in recomputation.layers_of(model)] == [True, True, True, False]


def test_more_layers_than_the_model_has_are_refused_before_weights_load(
    model_folder: Path, conversations: Path, tmp_path: Path
) -> None:
    changes = {"train__activation_checkpointing": 3}
    with pytest.raises(
        InputError, match=r"checkpointing is 3, but the model has 2 layers; set it to full, or to a smaller"
    ):
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_number_of_layers_is_refused_where_the_decoder_recomputes_all_or_none() -> None:
    model = model_of()
    for name, module in list(model.named_modules()):
        if isinstance(module, GradientCheckpointingLayer):
            model.set_submodule(name, torch.nn.Identity())
    (problem,) = recomputation.problems(model, 2)
    assert "one by one; set it to none or full" in problem
    (problem,) = recomputation.problems(model, None, offloads=True)
    assert problem.startswith("train.activation_checkpointing is offload, but the layers of this model cannot")
    assert recomputation.problems(model, None) == recomputation.problems(model, 0) == []


@pytest.mark.parametrize("kind", ["openai-gpt", "ctrl"])
def test_a_model_that_cannot_recompute_is_refused_before_weights_load(kind: str) -> None:
    described = tiny_types.described(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described))
    assert recomputation.problems(model, 0) == []
    for layers in (1, None):
        (problem,) = recomputation.problems(model, layers)
        assert problem.endswith("cannot recompute activations; set train.activation_checkpointing to none.")
    with pytest.raises(ValueError, match="not support"):  # what the refusal spares
        recomputation.recompute_activations(model)


@pytest.mark.parametrize(
    ("everyone", "agreed"), [((0, 0), 0), ((0, 3), 3), ((4, 3), 4), ((0, None), None), ((None, 3), None)]
)
def test_unlike_processes_recompute_as_many_layers_as_the_smallest_gpu_needs(everyone: Any, agreed: int | None) -> None:
    sizes = [Sizes(1, layers, False, True) for layers in everyone]
    assert sizes[0].agreed(sizes).recomputed_layers == agreed


def test_unlike_processes_all_offload_where_one_of_them_must() -> None:
    sizes = [Sizes(1, 3, False, True), Sizes(1, None, True, True)]
    for each in sizes:
        assert each.agreed(sizes).written_into(Train(output_dir="run")).activation_checkpointing == "offload"
