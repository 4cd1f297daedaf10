"""Norms and gated products in one operation compute what transformers' modules do, and keep less."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from finetune.compat import liger_private as liger
from finetune.config import sections
from finetune.models import adapter as adapters
from finetune.models import fused, rotary

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLPS, ROTATIONS = {"gated MLP": 2}, {"rotary embedding": 2}
NORMS, ALL = {"RMSNorm": 5, **ROTATIONS}, {"RMSNorm": 5, **MLPS, **ROTATIONS}
FAMILIES: dict[str, dict[str, int]] = {
    "llama": ALL,
    "mistral": ALL,
    "qwen2": ALL,
    "granite": ALL,
    "smollm3": ALL,
    "gemma": ALL,  # weights that are added to 1, and GELU
    "gemma2": ALL | {"RMSNorm": 9},
    "gemma3_text": ALL | {"RMSNorm": 13},  # also of each head's queries and keys
    "qwen3": ALL | {"RMSNorm": 9},
    "olmo2": ALL | {"RMSNorm": 9},  # weights multiplied before the result is rounded
    "mixtral": NORMS,  # experts stay as they are
    "phi3": NORMS,  # gate and up in one matrix
    "phi": ROTATIONS,  # of a part of each head
    "seed_oss": NORMS,  # an MLP that drops numbers in training
    "cohere": MLPS,  # norms that take the mean away, and pairs that lie side by side
    "gpt2": {},
}


def model_of(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).train()


def step(model: PreTrainedModel) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    tokens = torch.randint(97, (2, 17)).to(model.device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers_modules(family: str) -> None:
    plain, model = model_of(family), model_of(family)
    fused.fuse(model)

    assert fused.known_in(plain) == FAMILIES[family]
    loss, gradients = step(model)
    expected_loss, expected = step(plain)
    assert loss == expected_loss
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gemma", "olmo2", "qwen3"])
def test_in_bf16_the_loss_is_the_same_and_gradients_are_no_further_from_those_in_fp32(family: str) -> None:
    plain, model, whole = model_of(family, torch.bfloat16), model_of(family, torch.bfloat16), model_of(family)
    whole.load_state_dict(model.state_dict())
    fused.fuse(model)

    loss, gradients = step(model)
    plain_loss, of_plain = step(plain)
    _, exact = step(whole)
    assert loss == plain_loss

    def distance(found: dict[str, torch.Tensor]) -> float:
        return float(sum((found[name].float() - each).norm() ** 2 for name, each in exact.items())) ** 0.5

    assert distance(gradients) < 1.1 * distance(of_plain)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_an_adapter_learns_the_same(targets: Any) -> None:
    section = sections.Adapter(type="lora", rank=4, targets=targets, modules_to_save=["input_layernorm"])
    models = [model_of("llama"), model_of("llama")]
    for model in models:
        adapters.attach(model, section, base="", revision=None, dtype=torch.float32, seed=3)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(4))
    fused.fuse(models[0])

    (loss, gradients), (expected_loss, expected) = map(step, models)
    assert loss == expected_loss
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=3e-6 * float(gradient.abs().max()))


def test_heads_are_turned_in_the_dtype_of_the_angles_and_rounded_once() -> None:
    """transformers leaves the rounding to attention, under autocast for example."""
    q, k = (torch.randn(2, heads, 5, 8).bfloat16().requires_grad_() for heads in (4, 2))
    cos, sin = (torch.randn(1, 5, 4).repeat(1, 1, 2) for _ in range(2))
    of_turned = torch.randn(2, 6, 5, 8).bfloat16()
    expected = torch.cat(apply_rotary_pos_emb(q.float(), k.float(), cos, sin), 1).bfloat16()
    found = torch.cat(rotary._Rotated.apply(q, k, cos, sin), 1)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, *(torch.autograd.grad(each, (q, k), of_turned) for each in (found, expected))))


def kept_bytes(compute: Callable[[], torch.Tensor], *known: torch.Tensor) -> int:
    """What autograd keeps of a computation, beside tensors that are there anyway."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    there = {each.untyped_storage().data_ptr() for each in (*known, result)}
    return sum(size for place, size in kept.items() if place not in there)


def test_a_norm_keeps_its_input_and_a_number_for_each_row() -> None:
    norm = LlamaRMSNorm(64).bfloat16()
    x = torch.randn(3, 50, 64, dtype=torch.bfloat16, requires_grad=True)
    plain = kept_bytes(lambda: norm(x), x, norm.weight)
    fused.fuse(norm)

    assert kept_bytes(lambda: norm(x), x, norm.weight) == 150 * 4
    assert plain > 6 * 150 * 64


@pytest.mark.parametrize(("recomputes", "kept"), [(False, 2), (True, 3)])
def test_a_gated_mlp_keeps_both_projections_and_not_their_product(recomputes: bool, kept: int) -> None:
    config = AutoConfig.for_model("llama", **SMALL)
    mlp = LlamaMLP(config)
    x = torch.randn(3, 50, 32, requires_grad=True)
    weights = [each.weight for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    plain = kept_bytes(lambda: mlp(x), x, *weights)
    inside = GradientCheckpointingLayer()
    inside.mlp, inside.gradient_checkpointing = mlp, recomputes
    fused.fuse(inside)

    def compute() -> torch.Tensor:
        result: torch.Tensor = mlp(x)
        return result

    of_one = 150 * 48 * 4
    assert plain == 4 * of_one
    # hooks do not nest: those of the product stand before these, which see the projections alone
    assert kept_bytes(compute, x, *weights) == kept * of_one


def test_a_second_backward_pass_is_refused_and_not_wrong() -> None:
    """The projections' gradients stand in their places after the first."""
    mlp = LlamaMLP(AutoConfig.for_model("llama", **SMALL))
    fused.fuse(mlp)
    loss = mlp(torch.randn(3, 32, requires_grad=True)).sum()
    loss.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class _Centred(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class _OtherEpsilon(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states.float() / (variance.sqrt() + self.variance_epsilon)).to(hidden_states.dtype)


class _GateAlsoAdded(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(silu(gate) * self.up_proj(x) + gate)


class _LimitsLargeNumbers(LlamaMLP):
    limit = 10.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=self.limit)) * self.up_proj(x))


class _DropsInTraining(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(x))


class _ReturnsAnotherDtype(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).float()


class _FailsOnAnotherWidth(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states.shape[-1] == 32
        return super().forward(hidden_states)


OTHERS: list[Any] = [_Centred, _OtherEpsilon, _ReturnsAnotherDtype, _FailsOnAnotherWidth]
OTHERS += [_GateAlsoAdded, _LimitsLargeNumbers, _DropsInTraining]


def made(kind: Any) -> torch.nn.Module:
    module: torch.nn.Module = kind(AutoConfig.for_model("llama", **SMALL) if issubclass(kind, LlamaMLP) else 32)
    return module.eval()


@pytest.mark.parametrize("kind", OTHERS)
def test_a_module_that_computes_something_else_stays_as_it_is(kind: Any) -> None:
    module = made(kind)
    fused.fuse(module)

    assert "forward" not in vars(module)
    assert fused.known_in(module) == {}


def test_of_two_modules_of_a_class_one_has_a_limit() -> None:
    free, limited = made(_LimitsLargeNumbers), made(_LimitsLargeNumbers)
    free.limit = float("inf")
    assert fused.known_in(torch.nn.ModuleList([free, limited])) == {"gated MLP": 1}


def test_asking_draws_no_random_numbers_and_leaves_modules_in_their_mode() -> None:
    module = torch.nn.ModuleList([made(_DropsInTraining), made(_DropsInTraining).train(), made(LlamaRMSNorm)])
    modes, state = [each.training for each in module.modules()], torch.get_rng_state()
    fused.fuse(module)

    assert [each.training for each in module.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_a_copy_of_a_fused_module_computes_with_its_own_weights() -> None:
    norm = LlamaRMSNorm(8)
    fused.fuse(norm)
    other = copy.deepcopy(norm)
    other.weight.data.mul_(2)
    x = torch.randn(3, 8)

    assert torch.equal(other(x), 2 * norm(x))


@pytest.mark.gpu  # it needs none, but a machine with one has Triton
@pytest.mark.skipif(not liger.is_installed(), reason="needs liger-kernel and triton: pip install 'finetune[kernels]'")
def test_ligers_kernels_are_called_as_they_expect() -> None:
    """In Triton's interpreter, which has to be chosen before anything imports Triton."""
    script = Path(__file__).parent / "interpreted_liger.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "10 alike"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma", "olmo2", "qwen3"])
def test_on_a_gpu_gradients_in_bf16_are_no_further_from_those_in_fp32(family: str) -> None:
    """By Liger's kernels where they are installed, else by PyTorch's."""
    plain, model, whole = (model_of(family, each) for each in (torch.bfloat16, torch.bfloat16, torch.float32))
    whole.load_state_dict(model.state_dict())
    fused.fuse(model)
    (_, gradients), (_, of_plain), (_, exact) = (step(each.cuda()) for each in (model, plain, whole))
    distances = [
        float(sum((found[name].float() - each).norm() ** 2 for name, each in exact.items())) ** 0.5
        for found in (gradients, of_plain)
    ]

    assert distances[0] < 1.2 * distances[1]
