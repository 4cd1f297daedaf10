"""What a model has beside the weights that a run trains: in results, in a pipeline too, and known by checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
import torch
from parity import BF16_TOLERANCE, FP32_TOLERANCE, assert_parity
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.errors import InputError
from finetune.export.checkpoint_export import export
from finetune.models import text_part
from recipes import sft

SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 512}
KINDS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "afmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2},
}
"""Whose routers choose experts by a bias, which is a buffer in the first and a frozen weight in the second."""


def biases(model: Any) -> dict[str, torch.Tensor]:
    return {name: each for name, each in model.state_dict().items() if name.endswith("_bias")}


@pytest.fixture(scope="module", params=KINDS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.build_model_folder(tmp_path_factory.mktemp(request.param) / "base")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **SIZES, **KINDS[request.param]))
    (bias,) = biases(model).values()
    with torch.no_grad():
        bias.copy_(torch.tensor([0.1, -0.2, 0.3, -0.4]))
    model.save_pretrained(folder)
    return folder


def assert_has_the_bias(result: Path, base: Path) -> None:
    model, told = AutoModelForCausalLM.from_pretrained(result, output_loading_info=True)
    assert not {name for kind in told.values() for name in kind}
    ((name, bias),) = biases(model).items()
    assert torch.equal(bias, biases(AutoModelForCausalLM.from_pretrained(base))[name])


@pytest.fixture
def trained(base: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    sft.main(scenarios.configuration(base, conversations, tmp_path / "run", train__steps=2, checkpoint__every=1))
    return tmp_path / "run"


def test_results_have_what_stays_as_it_was(trained: Path, base: Path, tmp_path: Path):
    assert_has_the_bias(trained / "final", base)
    export(trained, tmp_path / "exported")
    assert_has_the_bias(tmp_path / "exported", base)


@pytest.fixture(scope="module")
def ernie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose routers are in fp32 beside bf16: a matrix that is trained, and a bias that is not."""
    folder = tiny.build_model_folder(tmp_path_factory.mktemp("ernie") / "base")
    sizes = SIZES | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 1}
    torch.manual_seed(0)
    described = AutoConfig.for_model("ernie4_5_moe", **sizes, dtype="bfloat16")
    AutoModelForCausalLM.from_config(described).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    biases = {name: torch.full_like(each, 0.1) for name, each in stored.items() if name.endswith("_bias")}
    save_file(stored | biases, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("strategy", ["single", "fsdp2", "zero2", "zero3", "pp"])
def test_what_a_model_keeps_in_fp32_beside_bf16_is_not_rounded_in_results(
    strategy: str, ranks: Any, ernie: Path, conversations: Path, tmp_path: Path
):
    stored = load_file(ernie / "model.safetensors")
    config = scenarios.configuration(ernie, conversations, tmp_path / "run", train__steps=2, checkpoint__every=2)
    processes = 1 if strategy == "single" else 2
    for seen in ranks(processes).run(scenarios.train, config, strategy=strategy):
        assert seen["world_size"] == processes
    export(tmp_path / "run", tmp_path / "exported")
    for folder in (tmp_path / "run" / "final", tmp_path / "exported"):
        result = load_file(folder / "model.safetensors")
        assert {name: each.dtype for name, each in result.items()} == {n: each.dtype for n, each in stored.items()}
        frozen = [name for name in result if name.endswith("_bias")]
        assert frozen
        assert all(torch.equal(result[name], stored[name]) for name in frozen)
        routers = [each for name, each in result.items() if name.endswith("gate.weight")]
        assert routers
        assert not any(torch.equal(each, each.bfloat16().float()) for each in routers)


def test_weights_in_bf16_are_the_same_under_fsdp2_which_takes_trained_ones_of_one_dtype(
    ranks: Any, ernie: Path, conversations: Path, tmp_path: Path
):
    for processes, strategy in ((1, "single"), (2, "fsdp2")):
        output = tmp_path / strategy
        config = scenarios.configuration(ernie, conversations, output, train__steps=2, train__weights="bf16")
        for seen in ranks(processes).run(scenarios.train, config, strategy=strategy, mixed_precision="bf16"):
            assert seen["world_size"] == processes
    metrics = [scenarios.read_metrics(tmp_path / strategy) for strategy in ("fsdp2", "single")]
    assert_parity(*metrics, BF16_TOLERANCE)


@pytest.fixture(scope="module")
def single(base: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("single") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCELERATE_MIXED_PRECISION", "no")
        sft.main(scenarios.configuration(base, conversations, output, train__steps=3))
    return output


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2_offload", "zero3", "pp"])
def test_two_processes_compute_with_it_and_their_result_has_it(
    strategy: str, ranks: Any, single: Path, base: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(base, conversations, tmp_path / "run", train__steps=3)
    for seen in ranks(2).run(scenarios.train, config, strategy=strategy):
        assert seen["world_size"] == 2
    assert_parity(scenarios.read_metrics(tmp_path / "run"), scenarios.read_metrics(single), FP32_TOLERANCE)
    assert_has_the_bias(tmp_path / "run" / "final", base)


def test_a_run_is_not_resumed_with_that_of_another_base(base: Path, conversations: Path, tmp_path: Path):
    mine = shutil.copytree(base, tmp_path / "mine")
    changes = {"train__steps": 2, "checkpoint__every": 1, "train__overwrite": False}
    sft.main(scenarios.configuration(mine, conversations, tmp_path / "run", **changes))
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    stored = load_file(mine / "model.safetensors")
    save_file({name: each * 2 for name, each in stored.items()}, mine / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"model\.path"):
        sft.main(scenarios.configuration(mine, conversations, tmp_path / "run", **changes, checkpoint__resume="auto"))


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("phi4_multimodal", ["model.embed_tokens_extend"]), ("git", ["git.image_encoder", "git.visual_projection"])],
)
def test_encoders_within_the_decoder_are_no_text(kind: str, parts: list[str]):
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
    assert text_part.unreached(model) == parts
