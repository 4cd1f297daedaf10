"""Gradients of weights that are computed later are those that autograd computes at once."""

from functools import partial
from typing import Any

import pytest
import torch
from test_fused import model_of, step
from test_lora_forward import adapted
from transformers import PreTrainedModel

from finetune.distributed.weight_copies import compute_with_copies
from finetune.models import fp8, fused
from finetune.models.deferred_gradients import DeferredGradients, deferring_layers, share_of, width_of
from finetune.models.pipeline_stages import costs_of
from finetune.models.recomputation import recompute_activations

KINDS = {"plain": [], "fused": [fused.fuse], "recomputed": [recompute_activations, fused.fuse]}
FAMILIES = {"llama": 7, "qwen2": 7, "gemma": 7, "mixtral": 4}
"""With the linear layers of each of their layers. One family has biases, one norms whose weights differ from 1, and one
experts."""


def ready(family: str, kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = model_of(family, dtype)
    for change in KINDS[kind]:
        change(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_two_micro_batches_are_those_of_autograd(family: str, kind: str):
    expected = ready(family, kind)
    for _ in range(2):
        of_autograd = step(expected)[1]
    model = ready(family, kind)
    layers = {f"{name}.weight" for name, each in model.named_modules() if each in set(deferring_layers(model))}
    deferred = DeferredGradients(deferring_layers(model))
    with deferred.collected():
        of_inputs = step(model)[1]
        first = deferred.take()
        assert {name for name, _ in model.named_parameters()} - of_inputs.keys() == layers
        step(model)
        second = deferred.take()
        second()
        first()
    assert len(layers) == FAMILIES[family] * len(model.model.layers)
    found = {name: each.grad for name, each in model.named_parameters()}
    assert found.keys() == of_autograd.keys()
    for name, gradient in of_autograd.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=2e-6 * float(gradient.abs().max()))


def test_weights_get_them_in_fp32_where_copies_in_16_bits_are_computed_with():
    found = []
    for defers in (False, True):
        model = ready("llama", "fused")
        layers = deferring_layers(model)
        deferred = DeferredGradients(layers if defers else [])
        with compute_with_copies(model, torch.bfloat16)(), deferred.collected():
            for _ in range(2):
                step(model)
                deferred.take()()
        found.append({name: each.grad for name, each in model.named_parameters()})
        assert {each.weight.dtype for each in layers} == {torch.float32}
    expected, gradients = found
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


def test_outside_of_a_schedule_autograd_computes_them_at_once():
    expected, model = step(ready("llama", "fused"))[1], ready("llama", "fused")
    DeferredGradients(deferring_layers(model))
    found = step(model)[1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_what_was_deferred_is_forgotten_where_a_step_ends_in_an_error():
    model = ready("llama", "plain")
    deferred = DeferredGradients(deferring_layers(model))
    model.model.norm.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError), deferred.collected():
        step(model)
    assert all(each.weight.grad is None for each in deferring_layers(model))
    model.model.norm.weight.requires_grad_(False)
    with deferred.collected():
        deferred.take()()
    assert all(each.weight.grad is None for each in deferring_layers(model))


def test_what_a_product_was_made_of_goes_with_it():
    model = ready("llama", "recomputed")
    width = width_of(model)
    deferred = DeferredGradients(deferring_layers(model))
    with deferred.collected():
        step(model)
        later: Any = deferred.take()
        assert isinstance(later, partial)
        (products,) = later.args
        kept = {each.x_TI.untyped_storage().data_ptr(): each.x_TI.numel() for each in products}
        kept |= {each.of_out_TO.untyped_storage().data_ptr(): each.of_out_TO.numel() for each in products}
        assert not any(each.requires_grad for product in products for each in product[1:])
        # queries, keys and values have one input, and so have the two projections that a gated product is made of
        positions, layers, shared = 2 * 17, len(model.model.layers), 3 * model.config.hidden_size
        assert sum(kept.values()) == positions * layers * (width - shared)
        later()
        assert not products


def test_heads_adapters_and_products_in_fp8_defer_nothing():
    model = model_of("llama")
    every = set(deferring_layers(model))
    assert model.lm_head not in every
    of_head = model.lm_head.weight.numel()
    assert share_of(model) == 1.0 == sum(each.weight.numel() for each in every) / (sum(costs_of(model)) - of_head)
    with_adapter = adapted(None, torch.float32, dropout=0.1)
    assert deferring_layers(with_adapter) == []
    in_fp8 = model_of("llama")
    in_8_bits = fp8.layers_of(in_fp8)
    assert len(in_8_bits) == len(deferring_layers(in_fp8)) > 10
    fp8.multiply_in_fp8(in_fp8)
    assert deferring_layers(in_fp8) == []


def test_experts_defer_nothing_but_attention_beside_them_does():
    model = model_of("mixtral")
    assert 0 < share_of(model) < 1
    of_attention = {id(each) for layer in model.model.layers for each in layer.self_attn.modules()}
    assert {id(each) for each in deferring_layers(model)} <= of_attention
