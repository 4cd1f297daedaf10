"""LoRA whose output is written once learns what PEFT's own forward learns."""

from typing import Any

import bitsandbytes
import pytest
import torch
import torch.nn.functional as F
from test_fused import model_of, step
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from finetune.config import sections
from finetune.models import adapter as adapters
from finetune.models import quantization
from finetune.models.lora_forward import _is_one_operation, write_once
from finetune.models.recomputation import recompute_activations


def adapted(bits: int | None, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    model = model_of("llama", dtype)
    if bits:
        quantization.quantize(model, bits, dtype, torch.device("cpu"))
        vars(model).update(is_loaded_in_4bit=bits == 4, is_loaded_in_8bit=bits == 8)
        quantization.settle(model, dtype)
    section = sections.Adapter(**{"type": "lora", "rank": 4, "alpha": 6} | changes)
    adapters.attach(model, section, base="", revision=None, dtype=dtype, seed=3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(4))
    return model


def counted(model: PreTrainedModel) -> int:
    return sum("lora_A" in dir(module) and "forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_loss_and_gradients_are_those_of_peft(bits: int | None) -> None:
    models = [adapted(bits, torch.float32), adapted(bits, torch.float32)]
    write_once(models[0])

    assert counted(models[0]) == 14
    (loss, gradients), (expected_loss, expected) = map(step, models)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert gradients.keys() == expected.keys()
    assert len(expected) == 28
    # 8-bit layers round their inputs to 127 steps: one that is rounded the other way is a step away
    bound = 2e-2 if bits == 8 else 2e-6
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=bound * float(gradient.abs().max()))


def test_a_base_in_4_bits_is_read_again_for_the_backward_pass_as_zero_3_has_to_gather_it_again() -> None:
    model, expecting = adapted(4, torch.float32), adapted(4, torch.float32)
    quantization.keep_partitioned(model)
    layers = [each for each in model.modules() if isinstance(each, bitsandbytes.nn.Linear4bit)]

    def replace_values(*_: Any) -> None:
        for layer in layers:
            passed = layer.weight.data
            layer.weight.data = passed.clone()
            passed.zero_()  # what is kept of the forward pass is worth nothing

    model.register_forward_hook(replace_values)
    (loss, gradients), (expected_loss, expected) = map(step, (model, expecting))
    assert len(layers) == 14
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert len(expected) == 28
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=2e-6 * float(gradient.abs().max()))


class Sums(TorchDispatchMode):
    """Counts the additions of tensors as large as a hidden state."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_sum = func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_)
        self.count += is_sum and found.numel() == self.size
        return found


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_gradients_of_an_input_are_summed_by_the_products_that_make_them(bits: int | None, recomputes: bool) -> None:
    """Autograd makes 9 of them in a layer: each of 6 is summed with its adapter's, those of queries, keys and values
    with one another, and that of an MLP's gate with the one of its fellow. (The input of the last product is wider, and
    not counted.) The first layer's input has no gradient, because the embedding is frozen: 5 less. But it has one where
    layers are recomputed, and there PEFT's forward sums once more, of queries and of attention's output."""
    models = [adapted(bits, torch.float32), adapted(bits, torch.float32)]
    write_once(models[0])
    found = []
    for model in models:
        if recomputes:
            recompute_activations(model)
        torch.manual_seed(1)
        tokens = torch.randint(97, (2, 17))
        loss = model(input_ids=tokens, labels=tokens).loss
        with Sums(2 * 17 * 32) as sums:
            loss.backward()
        found.append(sums.count)
        assert all(each.grad is not None for each in model.parameters() if each.requires_grad)
    assert found[1] - found[0] == 9 + (9 + 4 if recomputes else 4)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=2e-6 * float(other.grad.abs().max()))


def test_a_backward_pass_that_ends_within_a_layer_leaves_nothing_to_the_next_one() -> None:
    model, plain = adapted(None, torch.float32), adapted(None, torch.float32)
    write_once(model)
    tokens = torch.arange(17)[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    last: Any = model.get_submodule("model.layers.1.mlp.up_proj")
    torch.autograd.grad(loss, last.lora_A["default"].weight, retain_graph=True)
    loss.backward()
    plain(input_ids=tokens, labels=tokens).loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=2e-6 * float(other.grad.abs().max()))


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bf16_gradients_are_no_further_from_those_in_fp32_than_pefts(autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    model, plain, whole = (adapted(None, each) for each in (dtype, dtype, torch.float32))
    for each in (model, plain, whole):
        each.load_state_dict({name: value.bfloat16() for name, value in whole.state_dict().items()})
    write_once(model)
    _, exact = step(whole)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (loss, gradients), (plain_loss, of_plain) = map(step, (model, plain))

    def distance(found: dict[str, torch.Tensor]) -> float:
        return float(sum((found[name].float() - each).norm() ** 2 for name, each in exact.items())) ** 0.5

    assert loss == pytest.approx(plain_loss, abs=2e-3)
    assert distance(gradients) < 1.1 * distance(of_plain)


def test_dora_and_a_disabled_adapter_are_left_to_peft() -> None:
    dora = adapted(None, torch.float32, type="dora")
    write_once(dora)
    assert counted(dora) == 0

    model = adapted(None, torch.float32)
    write_once(model)
    learnt, _ = step(model)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.enable_adapters(False)
    base = model_of("llama")
    tokens = torch.arange(17)[None]
    assert torch.equal(model(tokens).logits, base(tokens).logits)
    assert learnt != step(base)[0]


def test_dropout_draws_the_numbers_that_pefts_draws() -> None:
    models = [adapted(None, torch.float32, dropout=0.5), adapted(None, torch.float32, dropout=0.5)]
    write_once(models[0])
    (loss, _), (expected, _) = map(step, models)

    assert loss == pytest.approx(expected, abs=1e-6)
    models[0].eval()
    assert step(models[0])[0] != pytest.approx(loss, abs=1e-6)


def test_product_of_a_weight_that_zero_3_partitions_is_one_that_deepspeed_replaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would stay gathered for the backward pass otherwise. Small weights are never partitioned."""
    model = adapted(None, torch.float32)
    write_once(model)
    layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    last, seen = layer.lora_B["default"], []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: seen.append(weight) or linear(x, weight, bias))
    x = torch.randn(3, 48)
    expected = layer(x)
    assert not any(each is last.weight for each in seen)

    for persists, replaced in ((True, 0), (False, 1)):
        seen.clear()
        last.weight.ds_id, last.weight.ds_persist = 0, persists
        torch.testing.assert_close(layer(x), expected)
        assert sum(each is last.weight for each in seen) == replaced


def test_a_layer_that_zero_3_partitions_is_known_without_reading_a_weight_by_its_name() -> None:
    """DeepSpeed gathers a weight that is read so, at once, and from then on in every pass of the layer above."""
    model = adapted(None, torch.float32)
    layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    read: list[str] = []

    class Noting(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            read.append(name)
            return super().__getitem__(name)

    for part in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]):
        part._parameters = Noting(part._parameters)
    assert _is_one_operation(layer, torch.randn(3, 48), "default")
    assert "weight" in read

    read.clear()
    for weight in layer.parameters():
        weight.ds_id = 0
    assert not _is_one_operation(layer, torch.randn(3, 48), "default")
    assert read == []
