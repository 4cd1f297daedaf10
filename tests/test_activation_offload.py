"""Activation offloading: nothing changes but where what recomputed layers keep waits for their backward pass."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from test_recomputation import LAYERS, model_of
from transformers import PreTrainedModel

from finetune.compat.torch_private import DispatchMode
from finetune.models import activation_offload, fused, lora_forward, recomputation

Live = list[int]
LONG = 32768
"""Tokens of a row of which a GPU computes a layer in a hundred times the time of a kernel's launch."""
TOKENS = torch.arange(200).view(2, 100) % 101


def adapted() -> PreTrainedModel:
    model = model_of()
    torch.manual_seed(1)
    inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False), model)
    return model


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "full": model_of,
    "mixture": lambda: model_of("mixtral", num_local_experts=4),
    "lora": adapted,
}


def prepared(kind: str, *, offloads: bool, fuses: bool = True) -> PreTrainedModel:
    model = KINDS[kind]()
    recomputation.recompute_activations(model, offloads=offloads)
    if fuses:
        fused.fuse(model)
        lora_forward.write_once(model)
    return model


def step(model: PreTrainedModel) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.detach(), [each.grad for each in model.parameters() if each.grad is not None]


def watched(model: PreTrainedModel) -> Callable[[], Live]:
    """Which layers' inputs, as they were in the forward pass, are alive."""
    seen: dict[int, Any] = {}

    def enters(place: int, hidden: torch.Tensor) -> None:
        seen[place] = weakref.ref(hidden.untyped_storage())

    for place, layer in enumerate(recomputation.layers_of(model)):
        layer.register_forward_pre_hook(lambda _, args, place=place: enters(place, args[0]))
    return lambda: [place for place, storage in seen.items() if storage() is not None]


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_full_recomputation_to_the_bit(kind: str, fuses: bool) -> None:
    expected = step(prepared(kind, offloads=False, fuses=fuses))
    torch.testing.assert_close(step(prepared(kind, offloads=True, fuses=fuses)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_but_the_last_layers_is_on_the_device_between_its_forward_and_its_backward_pass(kind: str) -> None:
    for offloads, expected in ((False, list(range(LAYERS))), (True, [LAYERS - 1])):
        model = prepared(kind, offloads=offloads)
        live = watched(model)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        assert live() == expected
    loss.backward()
    assert live() == []


def test_at_most_two_inputs_are_on_the_device_and_the_next_comes_back_while_a_layer_is_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = prepared("full", offloads=True)
    live, back, seen = watched(model), list[tuple[int, Any]](), list[tuple[list[int], list[int]]]()
    own = activation_offload.Offload._bring_back

    def watched_back(offload: Any, layer: Any) -> None:
        own(offload, layer)
        back.append((layer.place, weakref.ref(layer.hidden.here.untyped_storage())))

    monkeypatch.setattr(activation_offload.Offload, "_bring_back", watched_back)
    for layer in recomputation.layers_of(model):
        layer.self_attn.register_forward_pre_hook(
            lambda *_: seen.append((live(), [place for place, storage in back if storage() is not None]))
        )
    step(model)
    forward, backward = seen[:LAYERS], seen[LAYERS:]
    assert forward == [([0], []), ([0, 1], []), ([0, 2], []), ([0, 3], [])]  # 0 by the model's own forward
    assert [sorted({*on_device}) for _, on_device in backward] == [[2, 3], [1, 2], [0, 1], [0]]
    assert [original for original, _ in backward] == [[3], [], [], []]


def test_the_passes_of_two_micro_batches_may_alternate_as_in_a_pipeline() -> None:
    """Each gets its own inputs back, whichever was computed last."""
    expected = prepared("full", offloads=False)
    for tokens in (TOKENS, TOKENS.flip(1)):
        expected(input_ids=tokens, labels=tokens).loss.backward()
    model = prepared("full", offloads=True)
    losses = [model(input_ids=tokens, labels=tokens).loss for tokens in (TOKENS, TOKENS.flip(1))]
    for loss in losses:
        loss.backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


def test_attention_is_not_computed_again() -> None:
    for offloads, expected in ((False, 2 * LAYERS), (True, LAYERS)):
        model = prepared("full", offloads=offloads)
        with Counting() as counting:
            step(model)
        assert counting.attention == expected


def test_attention_that_draws_random_numbers_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(range(100))
    expected = step(prepared("full", offloads=False))
    monkeypatch.setattr(activation_offload, "drawn_on", lambda _: next(drawn))
    with Counting() as counting:
        found = step(prepared("full", offloads=True))
    assert counting.attention == 2 * LAYERS
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Counting(DispatchMode):
    attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.attention += func.name() in activation_offload.ATTENTION
        return func(*args, **(kwargs or {}))


def test_without_gradients_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "in_host_memory", lambda _: pytest.fail("sent"))
    with torch.no_grad():
        prepared("full", offloads=True)(input_ids=TOKENS)


def test_a_layer_that_does_not_keep_its_input_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with another version of PyTorch's checkpoint."""
    monkeypatch.setattr(activation_offload, "checkpoint", lambda function, given, **_: function(given))
    inputs = activation_offload.Offload()
    with pytest.raises(RuntimeError, match=r"Layer 2 did not keep its input, .* set it to full"):
        inputs.checkpoint(2, torch.nn.Identity(), torch.ones(1, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_copies_run_beside_kernels_and_memory_does_not_grow_with_layers() -> None:
    """Losses and gradients are those of full recomputation to the bit."""
    found = {}
    for offloads in (False, True):
        large: Any = model_of("llama", width=1024, max_position_embeddings=LONG)
        model = large.bfloat16().cuda()
        recomputation.recompute_activations(model, offloads=offloads)
        fused.fuse(model)
        tokens = torch.arange(LONG, device="cuda")[None] % 101
        for _ in range(2):  # the first takes host memory
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                hidden = model.base_model(input_ids=tokens).last_hidden_state
                kept = torch.cuda.memory_allocated()
                hidden.float().square().mean().backward()
                torch.cuda.synchronize()
        found[offloads] = kept, [each.grad for each in model.base_model.parameters()], profile
    (kept, gradients, _), (kept_offloaded, gradients_offloaded, profile) = found[False], found[True]
    torch.testing.assert_close(gradients_offloaded, gradients, rtol=0, atol=0)
    input_bytes = LONG * 1024 * 2
    # the last layer's input and what its attention returned have not left
    assert kept - kept_offloaded > (LAYERS - 2.5) * input_bytes
    copies, kernels = list[tuple[float, float]](), list[tuple[float, float]]()
    for event in profile.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            is_copy = event.name.startswith("Memcpy") and "Pinned" in event.name
            (copies if is_copy else kernels).append((event.time_range.start, event.time_range.end))
    assert len(copies) >= 2 * (LAYERS - 1)
    beside = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in kernels)
    assert beside > 0.8 * sum(end - start for start, end in copies)
