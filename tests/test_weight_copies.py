"""One process and DDP compute with copies of fp32 weights in bf16, which leave nothing behind but gradients in fp32."""

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.distributed.weight_copies import compute_with_copies

TOKENS = torch.arange(24).view(2, 12) % 31


def model_of(*, tied: bool = False, recomputes: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, tie_word_embeddings=tied, **sizes))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def in_bf16(model: Any) -> Any:
    """With its parameters in bf16, and its buffers as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    return loss


def copies_in(model: torch.nn.Module) -> list[str]:
    return [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, _ in module.named_parameters(recurse=False)
        if key in vars(module)
    ]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_losses_and_gradients_are_those_of_the_same_model_in_bf16(tied: bool, recomputes: bool):
    ours, reference = (model_of(tied=tied, recomputes=recomputes) for _ in range(2))
    in_bf16(reference)
    compute_with_copies(ours, torch.bfloat16)
    found, expected = loss_of(ours), loss_of(reference)
    assert torch.equal(found, expected)
    found.backward()
    expected.backward()
    for (name, parameter), other in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert torch.equal(parameter.grad, other.grad.float()), name
    assert copies_in(ours) == []


def test_without_copies_autocast_keeps_sums_between_layers_in_fp32():
    plain, ours = model_of(), model_of()
    compute_with_copies(ours, torch.bfloat16)
    kinds = []
    for model in (plain, ours):
        model.model.layers[1].register_forward_hook(lambda module, given, made: kinds.append(made.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model).backward()
    assert kinds == [torch.float32, torch.bfloat16]


def test_gradients_of_several_micro_batches_are_added_in_fp32():
    ours, reference = model_of(), in_bf16(model_of())
    compute_with_copies(ours, torch.bfloat16)
    sums = [torch.zeros_like(parameter) for parameter in ours.parameters()]
    for _ in range(3):
        loss_of(ours).backward()
        reference.zero_grad()
        loss_of(reference).backward()
        for total, parameter in zip(sums, reference.parameters(), strict=True):
            total += parameter.grad.float()
    assert all(torch.equal(p.grad, total) for p, total in zip(ours.parameters(), sums, strict=True))


def test_each_pass_computes_with_the_weights_as_they_are_by_then():
    model = model_of()
    compute_with_copies(model, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    before = loss_of(model)
    before.backward()
    optimizer.step()
    loss_of(model)  # of which no backward pass comes
    optimizer.step()
    expected = model_of()
    expected.load_state_dict(model.state_dict())
    assert torch.equal(loss_of(model), loss_of(in_bf16(expected)))
    assert not torch.equal(loss_of(model), before)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_pass_without_gradients_between_a_pass_and_its_backward_pass_changes_nothing(recomputes: bool):
    model, other = (model_of(recomputes=recomputes) for _ in range(2))
    for each in (model, other):
        compute_with_copies(each, torch.bfloat16)
    loss = loss_of(model)
    with torch.no_grad():
        assert torch.equal(loss_of(model), loss)
    loss.backward()
    loss_of(other).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert copies_in(model) == []


def test_nothing_is_left_of_a_pass_without_gradients_or_of_one_that_failed():
    model = model_of()
    compute_with_copies(model, torch.bfloat16)
    with torch.no_grad():
        assert loss_of(model).isfinite()
    assert copies_in(model) == []
    with pytest.raises(IndexError):
        model(input_ids=TOKENS + 31)
    assert copies_in(model) == []


def test_frozen_weights_have_no_copy():
    model = in_bf16(model_of())
    trained = model.model.layers[0].mlp.up_proj.weight
    model.requires_grad_(requires_grad=False)
    trained.requires_grad_()
    trained.data = trained.data.float()
    compute_with_copies(model, torch.bfloat16)
    loss = loss_of(model)
    assert copies_in(model) == ["model.layers.0.mlp.up_proj.weight"]
    loss.backward()
    assert trained.grad.dtype == torch.float32


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_copy_goes_when_its_weight_has_its_gradient_and_not_with_the_end_of_the_backward_pass(recomputes: bool):
    """Else a step would hold the copies and the gradients of all weights in bf16 as well."""
    model = model_of(recomputes=recomputes)
    compute_with_copies(model, torch.bfloat16)
    first, *_, last = (layer.mlp for layer in model.model.layers)
    own = last.up_proj.weight
    seen = []
    first.register_full_backward_hook(lambda *_: seen.append((copy() is None, own.grad is not None)))
    loss = loss_of(model)
    copy = weakref.ref(last.up_proj.weight)
    assert copy().dtype == torch.bfloat16
    loss.backward()
    assert seen == [(True, True)]


def test_weights_and_gradients_go_with_their_model_though_hooks_are_out_of_the_garbage_collectors_sight():
    model = model_of()
    compute_with_copies(model, torch.bfloat16)
    loss_of(model).backward()
    known = [weakref.ref(parameter) for parameter in model.parameters()]
    assert all(each() is not None for each in known)
    del model
    gc.collect()
    assert all(each() is None for each in known)
