"""8-bit optimizer state: what is in 8 bits, that it follows fp32 state, and that a shard has the state of the whole."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune.optim import eight_bit
from finetune.optim.optimizer import EIGHT_BIT, build_optimizer

ROWS, COLUMNS = 8, 256


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(COLUMNS, ROWS)
        self.norm = torch.nn.RMSNorm(COLUMNS)


class LargestOf32Bits(TorchDispatchMode):
    """Sees results of 4 bytes an element, which nothing that is kept has but scales of blocks."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.element_size() == 4:
                self.elements = max(self.elements, tensor.numel())
        return result


def optimizer_of(model: torch.nn.Module, name: str, **changes: Any) -> Any:
    settings: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, "weights": "fp32_master", "fused": False}
    return build_optimizer(model, name=name, rounding_seed=0, **settings | changes)


def train(model: torch.nn.Module, optimizer: Any, steps: int = 8) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_matrices_have_8_bit_state_however_small_and_norms_and_biases_have_32_bits(name: str):
    model = Block()
    optimizer = optimizer_of(model, name)
    train(model, optimizer, steps=1)
    states = {tuple(p.shape): s["state1"].dtype for p, s in optimizer.state.items()}
    assert states == {(ROWS, COLUMNS): torch.uint8, (ROWS,): torch.float32, (COLUMNS,): torch.float32}


def test_weight_decay_is_decoupled_and_spares_norms_and_biases():
    model = Block()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model, "adamw_8bit")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model.linear.weight, before["linear.weight"] * (1 - 1e-2 * 0.1))
    assert torch.equal(model.linear.bias, before["linear.bias"])
    assert torch.equal(model.norm.weight, before["norm.weight"])


@pytest.mark.parametrize("weights", ["fp32_master", "bf16"])
def test_adamw_in_8_bits_follows_adamw_in_32(weights: str):
    torch.manual_seed(0)
    exact, rounded = Block(), Block()
    rounded.load_state_dict(exact.state_dict())
    start = exact.linear.weight.detach().clone()
    if weights == "bf16":
        rounded.to(torch.bfloat16)
    train(exact, optimizer_of(exact, "adamw"))
    train(rounded, optimizer_of(rounded, "adamw_8bit", weights=weights))
    way = (exact.linear.weight - start).norm()
    assert (rounded.linear.weight.float() - exact.linear.weight).norm() < 0.1 * way
    assert rounded.linear.weight.dtype == (torch.bfloat16 if weights == "bf16" else torch.float32)


def test_small_updates_of_bf16_weights_are_not_lost():
    """An update of 1/1000 of a weight: rounding to nearest would leave every weight as it was."""
    weight = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(weight.weight)
    optimizer = optimizer_of(weight, "adamw_8bit", weights="bf16", learning_rate=1e-3, weight_decay=0.0)
    for _ in range(8):
        weight.weight.grad = torch.ones_like(weight.weight)
        optimizer.step()
    assert weight.weight.float().mean().item() == pytest.approx(1 - 8e-3, abs=1e-3)


@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit"])
def test_two_shards_take_the_steps_of_the_whole_to_the_bit(name: str):
    """bitsandbytes' own rule gives 32-bit state to tensors below 4096 elements, which shards are and wholes are not."""
    torch.manual_seed(0)
    whole = torch.nn.Linear(COLUMNS, 32, bias=False)
    assert whole.weight.numel() >= 4096 > whole.weight.numel() // 4
    shards = torch.nn.ModuleList(torch.nn.Linear(COLUMNS, 8, bias=False) for _ in range(4))
    for shard, part in zip(shards, whole.weight.detach().chunk(4)):
        shard.weight.data = part.clone()
    together, apart = optimizer_of(whole, name), optimizer_of(shards, name)
    for step in range(8):
        gradient = torch.randn(whole.weight.shape, generator=torch.Generator().manual_seed(step))
        whole.weight.grad = gradient
        for shard, part in zip(shards, gradient.chunk(4)):
            shard.weight.grad = part.clone()
        together.step()
        apart.step()
    assert torch.equal(whole.weight, torch.cat([shard.weight for shard in shards]))


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_chunks_of_bf16_weights_take_the_steps_of_the_whole_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch):
    weights, states = [], []
    for elements in (2**24, 512):
        monkeypatch.setattr(eight_bit, "CHUNK_ELEMENTS", elements)
        torch.manual_seed(0)
        layer = torch.nn.Linear(100, 13, dtype=torch.bfloat16)  # five blocks and a part of one, in three chunks
        optimizer = optimizer_of(layer, name, weights="bf16")
        train(layer, optimizer)
        weights.append(layer.weight)
        states.append(optimizer.state_of(layer.weight))
    assert torch.equal(*weights)
    assert states[0]["step"] == states[1]["step"] == 8
    assert states[0]["absmax1"].all()
    for key in ("state1", "absmax1"):
        assert torch.equal(states[0][key], states[1][key])


def test_a_step_of_bf16_weights_takes_memory_for_a_chunk_and_not_for_a_matrix(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(eight_bit, "CHUNK_ELEMENTS", 2**16)
    layer = torch.nn.Linear(2**10, 2**12, bias=False, dtype=torch.bfloat16)
    optimizer = optimizer_of(layer, "adamw_8bit", weights="bf16")
    train(layer, optimizer, steps=1)
    layer.weight.grad = torch.ones_like(layer.weight)
    with LargestOf32Bits() as seen:
        optimizer.step()
    assert seen.elements == 2**16


def test_parameters_without_a_gradient_are_left_alone():
    model = Block()
    optimizer = optimizer_of(model, "adamw_8bit")
    before = model.linear.weight.detach().clone()
    model.norm.weight.grad = torch.ones_like(model.norm.weight)
    optimizer.step()
    assert torch.equal(model.linear.weight, before)
    assert len(optimizer.state) == 1


def test_frozen_parameters_are_not_given_to_the_optimizer():
    model = Block()
    model.linear.requires_grad_(False)
    assert [p.shape for g in optimizer_of(model, "adafactor").param_groups for p in g["params"]] == [(COLUMNS,)]


@pytest.mark.parametrize("weights", ["fp32_master", "bf16"])
def test_gradients_are_let_go_of_after_the_step(weights: str):
    model = Block().to(torch.bfloat16) if weights == "bf16" else Block()
    optimizer = optimizer_of(model, "adamw_8bit", weights=weights)
    train(model, optimizer, steps=2)
    gradient = weakref.ref(model.linear.weight.grad.untyped_storage())  # type: ignore[union-attr]
    optimizer.zero_grad()
    assert gradient() is None
