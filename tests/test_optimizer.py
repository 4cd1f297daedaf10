"""Optimizers: which parameters decay, and AdamW without master weights."""

import os
import socket
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.trainer_pt_utils import get_parameter_names

from finetune.distributed import Strategy
from finetune.optim import rounded_adamw
from finetune.optim.optimizer import build_optimizer, state_of
from finetune.optim.rounded_adamw import StochasticRoundingAdamW
from finetune.optim.rounding import round_stochastically
from finetune.run import opening


def build(model, **changes):
    settings = {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "weights": "fp32_master"}
    return build_optimizer(model, **settings | {"fused": False, "rounding_seed": 0} | changes)


def rounded(values, seed: int = 0):
    return round_stochastically(values, torch.Generator().manual_seed(seed))


def test_decayed_parameters_are_those_that_transformers_decays():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config)
    norms = [type(m) for m in model.modules() if "Norm" in type(m).__name__]
    expected = {name for name in get_parameter_names(model, norms) if "bias" not in name}
    optimizer = build(model)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert {name for name, p in model.named_parameters() if id(p) in decayed} == expected
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_that_do_not_decay_keep_their_state_in_8_bits(tied: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, tie_word_embeddings=tied))
    groups = build(model, decay_embeddings=False).param_groups
    (kept,) = [g for g in groups if g["weight_decay"] == 0 and g["state_bits"] == 8]
    assert [id(p) for p in kept["params"]] == [id(model.get_input_embeddings().weight)]
    head = id(model.get_output_embeddings().weight)
    assert tied != (head in {id(p) for g in groups if g["weight_decay"] for p in g["params"]})
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out():
    layer = torch.nn.Linear(2, 2)
    layer.bias.requires_grad = False
    assert sum(len(g["params"]) for g in build(layer).param_groups) == 1


def test_stochastic_adamw_equals_torch_adamw_on_fp32_weights():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))
    optimizers = [
        StochasticRoundingAdamW([ours], lr=1e-2, weight_decay=0.1),
        torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1),
    ]
    for _ in range(20):
        ours.grad = theirs.grad = torch.randn(64)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_rounding_depends_on_seed_and_step_alone(name: str):
    """So that a run that is taken up again goes on to the bit, without a generator's state."""

    def after(steps: int, *, seed: int = 0, others: int = 0) -> torch.Tensor:
        """Weights after the step that follows ``steps``, from the same weights and no moments."""
        layer = torch.nn.Linear(256, 8, bias=False, dtype=torch.bfloat16)
        optimizer = build(layer, name=name, weights="bf16", rounding_seed=seed)
        for number in [1] * others + [steps]:
            torch.nn.init.ones_(layer.weight)
            layer.weight.grad = torch.zeros_like(layer.weight)
            optimizer.step()  # makes state
            torch.nn.init.ones_(layer.weight)
            layer.weight.grad = torch.full_like(layer.weight, 1e-3)
            state = state_of(optimizer, layer.weight)
            state["step"] = number
            for key in state.keys() - {"step", "qmap1", "qmap2"}:
                state[key].zero_()
            optimizer.step()
        return layer.weight.detach()

    assert torch.equal(after(5), after(5, others=3))
    assert not torch.equal(after(5), after(6))
    assert not torch.equal(after(5), after(5, seed=1))
    assert not torch.equal(after(5, seed=1), after(6))  # the sum of seed and step is no seed


def test_stochastic_rounding_keeps_the_expectation_and_rounds_to_neighbours_only():
    torch.manual_seed(0)
    value = torch.tensor(1.0 + 0.3 * 2**-7)  # 0.3 of the way from 1 to the next bf16 number
    found = rounded(value.expand(100_000).contiguous()).float()
    assert set(found.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert found.mean().item() == pytest.approx(value.item(), abs=6e-5)  # 5 standard errors


@pytest.mark.parametrize("special", [0.0, float("inf"), -float("inf"), 1.5, -2.0])
def test_numbers_that_bf16_holds_are_not_changed(special: float):
    assert rounded(torch.full((1000,), special)).float().unique().tolist() == [special]


def test_small_updates_of_bf16_weights_survive_where_rounding_to_nearest_loses_them():
    torch.manual_seed(0)
    layer = torch.nn.Linear(1, 4096, bias=False, dtype=torch.bfloat16)
    ours = layer.weight
    torch.nn.init.ones_(ours)
    nearest = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    reference = torch.nn.Parameter(torch.ones(4096))
    optimizers = [
        build(layer, weights="bf16", learning_rate=1e-5, weight_decay=0.0),
        torch.optim.AdamW([nearest], lr=1e-5, weight_decay=0.0),
        torch.optim.AdamW([reference], lr=1e-5, weight_decay=0.0),
    ]
    for _ in range(100):
        gradient = torch.randn(4096) + 1
        nearest.grad = gradient.bfloat16()
        ours.grad = nearest.grad[:, None]
        reference.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    moved = 1 - reference.mean().item()
    assert 1 - nearest.float().mean().item() == 0  # every update was lost
    assert 1 - ours.float().mean().item() == pytest.approx(moved, rel=0.1)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_every_chunk_of_a_bf16_weight_is_updated_as_fp32_would_be_but_for_rounding(
    is_transposed: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rounded_adamw, "CHUNK_ELEMENTS", 100)
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 7, bias=False, dtype=torch.bfloat16)
    if is_transposed:
        layer.weight = torch.nn.Parameter(torch.randn(64, 7, dtype=torch.bfloat16).t())
        assert not layer.weight.is_contiguous()
    reference = torch.nn.Parameter(layer.weight.detach().float())
    ours = build(layer, weights="bf16", learning_rate=1e-2, weight_decay=0.0)
    exact = torch.optim.AdamW([reference], lr=1e-2, weight_decay=0.0)
    for _ in range(5):
        layer.weight.grad = torch.randn(7, 64).bfloat16()
        reference.grad = layer.weight.grad.float()
        ours.step()
        exact.step()
    assert torch.allclose(layer.weight.float(), reference, rtol=2**-5, atol=2e-3)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -0x400000])
def test_nan_stays_nan_in_bf16_weights(bits: int):
    """CUDA writes NaN as 0x7FFFFFFF: what is added to it would carry into the sign."""
    values = torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)
    assert rounded(values).isnan().all()


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_groups_that_are_stepped_one_at_a_time_round_with_noise_of_their_own(name: str):
    """As DeepSpeed steps them."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(256, 64, bias=False, dtype=torch.bfloat16) for _ in range(2))
    model[1].load_state_dict(model[0].state_dict())
    optimizer = build(model, name=name, weights="bf16", weight_decay=0.0)
    (group,) = optimizer.param_groups
    groups = [group | {"params": [parameter]} for parameter in group["params"]]
    gradient = torch.randn(64, 256).bfloat16()
    for _ in range(2):
        for each in groups:
            each["params"][0].grad = gradient.clone()
            optimizer.param_groups = [each]
            optimizer.step()
    moved = [layer.weight.float() for layer in model]
    assert 0.2 < (moved[0] != moved[1]).float().mean() < 0.9


def given_kernel(monkeypatch: pytest.MonkeyPatch, launch: Any) -> None:
    """Have bf16 weights on the CPU stepped by this."""
    module: Any = types.ModuleType("finetune.optim.adamw_kernel")
    module.launch = launch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def test_triton_without_a_compiler_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    def launch(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    given_kernel(monkeypatch, launch)
    (problem,) = rounded_adamw.kernel_problems(torch.device("cpu"))
    assert problem == (
        f"Triton cannot make kernels on {socket.gethostname()} (RuntimeError: Failed to find C compiler. Please "
        "specify via CC environment variable.). It needs a C compiler and Python's headers: install gcc and "
        "python3-dev, or name a compiler in the variable CC. Or set model.kernels to plain and model.fp8 to "
        "false, which do without it."
    )


def test_triton_that_makes_its_kernel_is_not_refused_and_has_launched_it(monkeypatch: pytest.MonkeyPatch):
    launched = []
    given_kernel(monkeypatch, lambda *arguments: launched.append(arguments))
    assert rounded_adamw.kernel_problems(torch.device("cpu")) == []
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("strategy", "kernels", "weights", "has_triton", "expected"),
    [
        ("single", "auto", "bf16", True, True),
        ("zero3", "auto", "bf16", True, True),
        ("single", "plain", "bf16", True, False),
        ("single", "auto", "fp32_master", True, False),
        ("fsdp2_offload", "auto", "bf16", True, False),
        ("single", "auto", "bf16", False, False),
    ],
)
def test_bf16_weights_on_a_gpu_are_stepped_by_the_kernel_unless_it_is_plain_or_not_there(
    strategy: str, kernels: Any, weights: Any, has_triton: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rounded_adamw, "has_kernel", lambda: has_triton)
    cfg: Any = SimpleNamespace(
        model=SimpleNamespace(kernels=kernels), train=SimpleNamespace(weights=weights, optimizer="adamw")
    )
    launch = Strategy(strategy, 0, 1, 1, "bf16", rehearsal=False)
    assert opening.steps_in_one_kernel(cfg, launch) == expected
    assert not opening.steps_in_one_kernel(cfg, replace(launch, rehearsal=True))


def run_kernel(device: str, **environment: str) -> None:
    """In a process of its own: the interpreter has to be chosen before anything imports Triton."""
    command = [sys.executable, str(Path(__file__).parent / "interpreted_adamw.py"), device]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "as AdamW"


@pytest.mark.slow
@pytest.mark.skipif(not rounded_adamw.has_kernel(), reason="needs Triton: pip install triton")
def test_the_kernel_of_bf16_weights_is_adamw_but_for_rounding_in_tritons_interpreter():
    run_kernel("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_of_bf16_weights_is_adamw_but_for_rounding_on_a_gpu():
    run_kernel("cuda")


@pytest.mark.parametrize("family", ["gpt_oss", "mamba2"])
def test_vectors_and_stacked_biases_do_not_decay(family: str):
    sizes: dict[str, Any] = {
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "num_attention_heads": 4},
        "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    }[family]
    sizes |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    optimizer = build(model)
    decayed = {id(each) for group in optimizer.param_groups if group["weight_decay"] for each in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
    assert not [name for name in names if name.endswith(("bias", "sinks", "A_log", ".D"))]
    assert any("proj" in name for name in names)
