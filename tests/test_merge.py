"""A merged model is base and adapter in one: the same function, measured, and complete or absent."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scenarios
import tiny
import tiny_types
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from finetune.cli import commands
from finetune.data.encoding import Settings
from finetune.data.sources import Source
from finetune.errors import InputError, RunStopped
from finetune.export import adapted_model, adapter_source, comparison, new_folder
from finetune.export import merge as merging
from finetune.export.merge import merge
from finetune.models import loading, quantization
from recipes import sft

VARIANTS: dict[str, dict[str, bool]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are multiplied faster by one thread than shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build_base(folder: Path, *, tied: bool) -> Path:
    """The tiny model with weights, large enough that its probabilities are far from equal."""
    tiny.build_model_folder(folder, tied=tied)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.1
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def build_adapter(folder: Path, base: Path, size: float = 0.1, **changes: Any) -> Path:
    """An adapter that PEFT itself made and saved, with random values in each of its tensors."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**settings))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=size)
        elif parameter.requires_grad and "lora_A" not in name:  # magnitudes, modules saved whole
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("base") / request.param, tied=request.param == "tied")


@pytest.fixture(scope="module")
def tied_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("base") / "tied", tied=True)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, tied_base: Path) -> Path:
    return build_adapter(tmp_path_factory.mktemp("adapter") / "lora", tied_base)


@pytest.fixture(scope="module")
def train(
    tmp_path_factory: pytest.TempPathFactory, tied_base: Path, conversations: Path, held_out: Path
) -> Callable[..., Path]:
    """Runs of the recipe that train an adapter in fp32, each made once."""
    runs: dict[str, Path] = {}

    def run(precision: str = "no", **changes: Any) -> Path:
        values = {"train__steps": 2, "train__global_batch_size": 2, "train__learning_rate": 5e-2}
        values |= {"adapter__type": "lora", "adapter__rank": 4, "data__eval": str(held_out), **changes}
        model = values.pop("model", tied_base)
        key = json.dumps([precision, str(model), sorted(values.items())])
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("runs") / "run"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ACCELERATE_MIXED_PRECISION", precision)
                sft.main(scenarios.configuration(model, conversations, runs[key], **values))
        return runs[key]

    return run


@pytest.fixture
def rows(held_out: Path) -> list[list[int]]:
    tokenizer = tiny.build_tokenizer()
    return [row.tokens.tolist() for row in tiny.read_rows(held_out, tokenizer)]


def logits(model: Any, rows: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in rows])


def saved(folder: Path) -> PreTrainedModel:
    """The merged model as a stranger loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def with_peft(base: Path, adapter: Path) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)


def assert_nothing_left(folder: Path) -> None:
    assert not folder.exists()
    assert not new_folder.temporary_of(folder).exists()


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_merge_is_peft_model_and_its_merge_and_unload(
    variant: str, base: Path, tmp_path: Path, rows: list[list[int]]
):
    adapter = build_adapter(tmp_path / "adapter", base, **VARIANTS[variant])
    result = merge(adapter, tmp_path / "merged", dtype="fp32")
    merged, reference = saved(tmp_path / "merged"), with_peft(base, adapter)
    assert (logits(merged, rows) - logits(reference, rows)).abs().max() < 1e-5
    assert result["difference"]["largest_logit"] < 1e-5
    theirs = reference.merge_and_unload().state_dict()
    ours = merged.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6) for name in ours)
    stored = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (logits(stored, rows) - logits(merged, rows)).abs().max() > 1  # the adapter does something
    assert merged.config.tie_word_embeddings is (base.name == "tied")


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_layer_follows_the_published_formula(variant: str, tied_base: Path, tmp_path: Path):
    adapter = build_adapter(tmp_path / "adapter", tied_base, **VARIANTS[variant])
    merge(adapter, tmp_path / "merged", dtype="fp32")
    stored, state = load_file(tied_base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    checked = 0
    for name, merged in load_file(tmp_path / "merged" / "model.safetensors").items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" not in state:
            assert torch.equal(merged, stored[name])
            continue
        product = state[f"{prefix}.lora_B.weight"].double() @ state[f"{prefix}.lora_A.weight"].double()
        weight = stored[name].double() + product * 8 / (math.sqrt(4) if variant == "rslora" else 4)
        if variant == "dora":
            magnitude = state[f"{prefix}.lora_magnitude_vector"].double()
            weight = magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True)
        assert (merged.double() - weight).abs().max() < 1e-6
        checked += 1
    assert checked == 14


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_merge_rounds_the_fp32_merge_once_and_stays_within_a_thousandth_of_a_nat(
    variant: str, tied_base: Path, tmp_path: Path
):
    adapter = build_adapter(tmp_path / "adapter", tied_base, **VARIANTS[variant])
    merge(adapter, tmp_path / "fp32", dtype="fp32")
    result = merge(adapter, tmp_path / "bf16")
    exact = load_file(tmp_path / "fp32" / "model.safetensors")
    rounded = load_file(tmp_path / "bf16" / "model.safetensors")
    assert exact.keys() == rounded.keys()
    assert all(torch.equal(rounded[name], exact[name].to(torch.bfloat16)) for name in exact)
    assert 0 < result["difference"]["mean_kl"] < 1e-3
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_transformers_keeps_in_fp32_beside_a_16_bit_model_is_not_rounded(
    tied_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"norm"})
    base = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(tied_base, dtype=torch.bfloat16)
    model.model.norm.weight.data += 1e-4
    model.save_pretrained(base)
    tiny.build_tokenizer().save_pretrained(base)
    merge(build_adapter(tmp_path / "adapter", base), tmp_path / "merged")
    state = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(state["model.norm.weight"], model.model.norm.weight)
    assert state["model.norm.weight"].dtype == torch.float32
    assert {value.dtype for name, value in state.items() if not name.endswith("norm.weight")} == {torch.bfloat16}


def test_fp32_values_of_an_adapter_are_not_rounded_to_the_dtype_of_a_bf16_base(tied_base: Path, tmp_path: Path):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tied_base, dtype=torch.bfloat16).save_pretrained(base)
    tiny.build_tokenizer().save_pretrained(base)
    settings = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    adapter = build_adapter(tmp_path / "adapter", base, **settings)
    merge(adapter, tmp_path / "merged", dtype="fp32")
    stored, merged = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    state = {
        n.removeprefix("base_model.model."): v for n, v in load_file(adapter / "adapter_model.safetensors").items()
    }
    assert torch.equal(merged["model.embed_tokens.weight"], state["model.embed_tokens.weight"])
    name = "model.layers.1.mlp.up_proj"
    product = state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"] * 2
    assert torch.allclose(merged[f"{name}.weight"], stored[f"{name}.weight"].float() + product, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ensure", [True, False])
def test_embedding_trained_on_a_tied_model_is_merged_and_tied_only_if_head_and_embedding_are_equal(
    ensure: bool, tied_base: Path, tmp_path: Path, rows: list[list[int]]
):
    settings = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": ensure}
    adapter = build_adapter(tmp_path / "adapter", tied_base, **settings)
    merge(adapter, tmp_path / "merged", dtype="fp32")
    merged = saved(tmp_path / "merged")
    assert (logits(merged, rows) - logits(with_peft(tied_base, adapter), rows)).abs().max() < 1e-5
    trained = load_file(adapter / "adapter_model.safetensors")["base_model.model.model.embed_tokens.weight"]
    assert torch.equal(merged.get_input_embeddings().weight, trained)
    assert merged.config.tie_word_embeddings is ensure
    assert torch.equal(merged.get_output_embeddings().weight, trained) is ensure
    names = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) is not ensure


def test_embedding_and_head_that_were_trained_apart_to_the_same_values_are_tied_again(tied_base: Path, tmp_path: Path):
    adapter = build_adapter(tmp_path / "adapter", tied_base, modules_to_save=["embed_tokens", "lm_head"])
    path, prefix = adapter / "adapter_model.safetensors", "base_model.model."
    state = load_file(path)
    assert not torch.equal(state[f"{prefix}lm_head.weight"], state[f"{prefix}model.embed_tokens.weight"])
    merge(adapter, tmp_path / "apart", dtype="fp32")
    assert not saved(tmp_path / "apart").config.tie_word_embeddings
    save_file({**state, f"{prefix}lm_head.weight": state[f"{prefix}model.embed_tokens.weight"].clone()}, path)
    merge(adapter, tmp_path / "equal", dtype="fp32")
    assert saved(tmp_path / "equal").config.tie_word_embeddings
    assert "lm_head.weight" not in load_file(tmp_path / "equal" / "model.safetensors")


def test_head_trained_on_an_untied_model_is_merged(tmp_path: Path, rows: list[list[int]]):
    base = build_base(tmp_path / "base", tied=False)
    adapter = build_adapter(tmp_path / "adapter", base, modules_to_save=["lm_head"])
    merge(adapter, tmp_path / "merged", dtype="fp32")
    assert (logits(saved(tmp_path / "merged"), rows) - logits(with_peft(base, adapter), rows)).abs().max() < 1e-5


def test_adapter_of_a_tied_head_leaves_the_embedding_as_it_was(tied_base: Path, tmp_path: Path, rows: list[list[int]]):
    adapter = build_adapter(tmp_path / "adapter", tied_base, target_modules=["lm_head", "q_proj"])
    merge(adapter, tmp_path / "merged", dtype="fp32")
    merged = saved(tmp_path / "merged")
    stored = load_file(tied_base / "model.safetensors")
    assert torch.equal(merged.get_input_embeddings().weight, stored["model.embed_tokens.weight"])
    assert not merged.config.tie_word_embeddings
    assert (logits(merged, rows) - logits(with_peft(tied_base, adapter), rows)).abs().max() < 1e-5


def test_run_with_trained_embedding_of_a_tied_model_is_merged(train: Callable[..., Path], tmp_path: Path):
    run = train(adapter__modules_to_save=["embed_tokens"])
    result = merge(run, tmp_path / "merged", dtype="fp32")
    assert result["difference"]["largest_logit"] < 1e-5
    merged = saved(tmp_path / "merged")
    trained = load_file(run / "final" / "adapter_model.safetensors")["base_model.model.model.embed_tokens.weight"]
    assert torch.equal(merged.get_input_embeddings().weight, trained)
    assert merged.config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_fp32_merge_of_a_4_bit_run_is_the_quantised_model_with_its_adapter(
    kind: str, train: Callable[..., Path], tied_base: Path, tmp_path: Path, rows: list[list[int]]
):
    run = train(adapter__type=kind, quantization__bits=4)
    result = merge(run, tmp_path / "merged", dtype="fp32")
    assert (result["bits"], result["onto"]) == (4, "dequantized")
    assert result["difference"]["largest_logit"] < 1e-5
    config = AutoConfig.from_pretrained(tied_base)
    quantised = loading.load_model(
        str(tied_base),
        config,
        revision=None,
        trust_remote_code=False,
        attention="auto",
        dtype=torch.float32,
        seed=0,
        bits=4,
        device=torch.device("cpu"),
    )
    reference = PeftModel.from_pretrained(quantised, run / "final")
    assert (logits(saved(tmp_path / "merged"), rows) - logits(reference, rows)).abs().max() < 1e-5
    assert not any("absmax" in name or "quant" in name for name in load_file(tmp_path / "merged" / "model.safetensors"))
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


def test_4_bit_run_merges_onto_the_original_weights_and_tells_the_quantisation_error(
    train: Callable[..., Path], tied_base: Path, tmp_path: Path
):
    run = train(quantization__bits=4)
    result = merge(run, tmp_path / "merged", base="original", dtype="fp32")
    theirs = with_peft(tied_base, run / "final").merge_and_unload().state_dict()
    ours = saved(tmp_path / "merged").state_dict()
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6) for name in theirs)
    assert result["difference"]["mean_kl"] > 1e-4
    assert "includes the error of the base's 4-bit weights" in merging.describe(result)
    assert "The merged model answers as the adapter did: " in merging.describe(result)


def test_8_bit_run_is_merged_onto_weights_within_half_a_step_of_the_original_ones(
    train: Callable[..., Path], tied_base: Path, tmp_path: Path
):
    run = train(quantization__bits=8)
    merge(run, tmp_path / "merged", dtype="fp32")
    stored, merged = load_file(tied_base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    state = load_file(run / "final" / "adapter_model.safetensors")
    checked = 0
    for name in (name for name in merged if "_proj" in name):
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        base = merged[name] - state[f"{prefix}.lora_B.weight"] @ state[f"{prefix}.lora_A.weight"] * 32 / 4
        step = stored[name].abs().amax(dim=1, keepdim=True) / 127
        error = (base - stored[name]).abs() / step
        assert error.max() < 0.6  # half a step, and a little because bitsandbytes rounds to fp16 before
        assert 0.2 < error.mean() < 0.3
        checked += 1
    assert checked == 14


@pytest.mark.parametrize("bits", [4, 8])
def test_bf16_merge_of_a_quantised_bf16_run_stays_within_the_bound(
    bits: int, train: Callable[..., Path], tmp_path: Path
):
    run = train("bf16", quantization__bits=bits)
    result = merge(run, tmp_path / "merged")
    assert result["bits"] == bits
    assert result["difference"]["mean_kl"] < 1e-3
    assert saved(tmp_path / "merged").dtype == torch.bfloat16


@pytest.fixture(scope="module")
def base_in_bf16(tmp_path_factory: pytest.TempPathFactory, tied_base: Path) -> Path:
    """As models are published."""
    folder = tmp_path_factory.mktemp("base") / "bf16"
    AutoModelForCausalLM.from_pretrained(tied_base, dtype=torch.bfloat16).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bits", ["none", 4])
def test_fp32_merge_of_a_bf16_run_is_equal_and_a_bf16_merge_is_rounded(
    bits: str | int, train: Callable[..., Path], base_in_bf16: Path, tmp_path: Path
):
    """The difference is that of the weights alone: what bf16 makes of each product is not in it."""
    run = train("bf16", model=base_in_bf16, quantization__bits=bits)
    exact, rounded = (merge(run, tmp_path / dtype, dtype=dtype) for dtype in ("fp32", "bf16"))
    assert exact["difference"]["largest_logit"] < 1e-5 < 1e-3 < rounded["difference"]["largest_logit"]
    assert (exact["verdict"], exact["rounding_kl"]) == ("equal", None)
    assert rounded["rounding_kl"] == pytest.approx(rounded["difference"]["mean_kl"], rel=1e-3)
    assert "The merged model answers as the adapter did: " in merging.describe(exact)
    assert "of which bf16 rounding alone makes" in " ".join(merging.describe(rounded).split())
    assert "includes" not in merging.describe(exact)


@pytest.mark.parametrize(("model_type", "expected"), [("gemma2", "eager"), ("llama", None)])
def test_a_merged_model_is_read_back_with_the_attention_that_it_was_trained_with(
    model_type: str, expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Which caps scores in Gemma 2, and in versions of transformers does not where nobody asks for it."""
    asked = dict[str, Any]()
    monkeypatch.setattr(merging.AutoModelForCausalLM, "from_pretrained", lambda _, **how: asked.update(how))
    source: Any = SimpleNamespace(config=AutoConfig.for_model(model_type), trust_remote_code=False)
    merging._read_back(tmp_path, torch.float32, source)
    assert asked["attn_implementation"] == expected


@pytest.mark.parametrize(
    ("kl", "bits", "onto", "rounding", "verdict"),
    [
        (1e-6, None, "original", None, "equal"),
        (9e-5, None, "original", None, "rounded"),  # in fp32, by the order of sums
        (2e-4, None, "original", None, "different"),
        (1.9e-3, 4, "dequantized", 1e-3, "rounded"),
        (2.1e-3, 4, "dequantized", 1e-3, "different"),  # more than rounding makes
        (0.051, 4, "dequantized", 0.05, "different"),  # rounding alone makes it another model
        (0.049, 4, "original", 1e-3, "rounded"),
        (0.051, 4, "original", 1e-3, "different"),
        (0.2, 8, "dequantized", None, "rounded"),
        (0.26, 8, "dequantized", None, "different"),
        (math.nan, None, "original", 1e-3, "different"),
    ],
)
def test_verdict_says_what_a_difference_means(
    kl: float, bits: int | None, onto: str, rounding: float | None, verdict: str
):
    limit = merging.largest_kl(SimpleNamespace(bits=bits), onto, rounding)  # type: ignore[arg-type]
    assert merging.verdict(comparison.Difference(1, 0.0, 0.0, kl, 1.0), limit) == verdict


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_merge_in_fp32_is_no_worse_than_one_in_bf16_where_the_base_is_stored_in_fp32(
    kind: str, train: Callable[..., Path], tmp_path: Path
):
    run = train("bf16", adapter__type=kind, adapter__modules_to_save=["embed_tokens"])
    exact, rounded = (merge(run, tmp_path / dtype, dtype=dtype) for dtype in ("fp32", "bf16"))
    assert exact["verdict"] == "equal"
    assert rounded["rounding_kl"] == pytest.approx(rounded["difference"]["mean_kl"], rel=1e-3)
    assert rounded["difference"]["mean_kl"] > 10 * exact["difference"]["mean_kl"]


def test_a_model_that_was_rounded_while_it_computed_is_as_before(lora: Path, rows: list[list[int]]):
    source = adapter_source.read(lora, base_model=None, bits=None)
    model, text = adapted_model.load_as_trained(source), comparison.Text("rows", rows)
    before = list(comparison.logits(model, text))
    with adapted_model.rounding_to(model, torch.bfloat16):
        rounded = list(comparison.logits(model, text))
    assert not all(map(torch.equal, before, rounded))
    assert all(map(torch.equal, before, comparison.logits(model, text)))


def test_layers_around_layers_are_rounded_and_restored_too(tmp_path: Path):
    """PEFT adapts each parameter of a module of experts by a layer around the one before."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_types.described("ernie4_5_moe")))
    named = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    peft = get_peft_model(model.bfloat16(), LoraConfig(r=2, target_parameters=named, init_lora_weights=False))
    text = comparison.Text("any", [[5, 6, 7, 8]])
    before = {name: each.clone() for name, each in peft.named_parameters()}
    with adapted_model.rounding_to(peft, torch.bfloat16):
        list(comparison.logits(peft, text))
    assert all(before[name].equal(each) for name, each in peft.named_parameters())


def test_models_are_compared_in_fp32_and_keep_their_weights(base_in_bf16: Path, monkeypatch: pytest.MonkeyPatch):
    """One module at a time is in fp32, so that no more memory than the weights' own is needed."""
    text = comparison.Text("any", [[5, 6, 7, 8]])
    model = AutoModelForCausalLM.from_pretrained(base_in_bf16, dtype=torch.bfloat16)
    wide = 0

    def computed(layer: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
        nonlocal wide
        wide = max(wide, len({id(p) for p in model.parameters() if p.dtype == torch.float32}))
        return torch.nn.functional.linear(values, layer.weight, layer.bias)

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Linear, "forward", computed)
        (found,) = comparison.logits(model, text)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert wide == 1
    (expected,) = comparison.logits(model.float(), text)
    assert torch.equal(found, expected)


def test_bare_adapter_of_a_quantised_base_is_merged_with_bits_and_refused_a_wrong_number(
    train: Callable[..., Path], tmp_path: Path
):
    run = train(quantization__bits=4)
    shutil.copytree(run / "final", tmp_path / "adapter")
    (tmp_path / "adapter" / "run.yaml").unlink()
    merge(run, tmp_path / "of_run", dtype="fp32")
    merge(tmp_path / "adapter", tmp_path / "of_adapter", dtype="fp32", bits=4)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("of_run", "of_adapter"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    shutil.copytree(tmp_path / "adapter", tmp_path / "run" / "final")
    shutil.copy(run / "run.yaml", tmp_path / "run" / "run.yaml")
    merge(tmp_path / "run" / "final", tmp_path / "of_final", dtype="fp32")  # run.yaml above final/ is found
    third = load_file(tmp_path / "of_final" / "model.safetensors")
    assert all(torch.equal(first[name], third[name]) for name in first)
    with pytest.raises(InputError, match="was trained on 4-bit weights; leave --bits out"):
        merge(run, tmp_path / "wrong", bits=8)


def test_model_published_in_4_bits_is_merged_dequantised_and_has_no_original_weights(tied_base: Path, tmp_path: Path):
    published, adapter = tmp_path / "published", tmp_path / "adapter"
    AutoModelForCausalLM.from_pretrained(
        tied_base, quantization_config=quantization.bitsandbytes_config(4, torch.float32), device_map="cpu"
    ).save_pretrained(published)
    tiny.build_tokenizer().save_pretrained(published)
    build_adapter(adapter, tied_base)
    result = merge(adapter, tmp_path / "merged", base_model=str(published), dtype="fp32")
    assert (result["bits"], result["onto"]) == (4, "dequantized")
    assert result["difference"]["largest_logit"] < 1e-5
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    with pytest.raises(InputError, match="published in 4 bits, without its original weights"):
        merge(adapter, tmp_path / "original", base_model=str(published), base="original")


def test_run_of_random_weights_is_merged_with_those_of_its_seed(
    train: Callable[..., Path], model_folder: Path, tmp_path: Path
):
    run = train(model=model_folder, train__seed=3)
    assert merge(run, tmp_path / "merged", dtype="fp32")["difference"]["largest_logit"] < 1e-5
    torch.manual_seed(3)
    drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.float32)
    assert torch.equal(saved(tmp_path / "merged").get_input_embeddings().weight, drawn.get_input_embeddings().weight)


def test_merged_folder_is_a_complete_model_with_tokenizer_template_card_and_safetensors_only(
    train: Callable[..., Path], tied_base: Path, held_out: Path, tmp_path: Path
):
    run = train(quantization__bits=4)
    result = merge(run, tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template == tiny.CHATML
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "the house"}], return_tensors="pt")
    answer = saved(tmp_path / "merged").generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]
    card = (tmp_path / "merged" / "README.md").read_text()
    for part in (str(tied_base), str(run / "final"), f"{result['difference']['mean_kl']:.2e}", str(held_out)):
        assert part in card
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {name for name in names if name.endswith((".bin", ".pt")) or name.startswith("adapter")}
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_moved_base_is_found_by_its_flag_and_asked_for_without(lora: Path, tied_base: Path, tmp_path: Path):
    adapter = shutil.copytree(lora, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"no folder .*gone.*--base-model"):
        merge(adapter, tmp_path / "merged")
    result = merge(adapter, tmp_path / "merged", base_model=str(tied_base), dtype="fp32")
    assert result["difference"]["largest_logit"] < 1e-5


@pytest.fixture
def no_weights_may_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(adapted_model.models, "load_model", load)


def refused(path: Path, folder: Path, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        merge(path, folder, **options)
    assert not new_folder.temporary_of(folder).exists()
    return str(error.value)


@pytest.mark.usefixtures("no_weights_may_load")
class TestRefusedBeforeWeightsLoad:
    def test_unknown_folder(self, tmp_path: Path):
        assert "There is no folder" in refused(tmp_path / "nothing", tmp_path / "merged")

    def test_folder_that_is_neither_run_nor_adapter(self, tmp_path: Path):
        assert "neither run.yaml nor adapter_config.json" in refused(tmp_path, tmp_path / "merged")

    def test_run_without_a_result(self, tmp_path: Path):
        (tmp_path / "run.yaml").touch()
        assert "final/ is missing" in refused(tmp_path, tmp_path / "merged")

    def test_run_of_full_fine_tuning(self, tied_base: Path, tmp_path: Path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run.yaml").touch()
        shutil.copytree(tied_base, tmp_path / "run" / "final")
        assert "is a full model" in refused(tmp_path / "run", tmp_path / "merged")

    def test_run_yaml_that_is_no_record(self, lora: Path, tmp_path: Path):
        shutil.copytree(lora, tmp_path / "run" / "final")
        (tmp_path / "run" / "run.yaml").write_text("config: {}\n")
        assert "is not the record of a run" in refused(tmp_path / "run", tmp_path / "merged")

    def test_other_methods_than_lora(self, lora: Path, tmp_path: Path):
        adapter = shutil.copytree(lora, tmp_path / "adapter")
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
        assert "of type IA3" in refused(adapter, tmp_path / "merged")

    def test_pickled_adapter(self, lora: Path, tmp_path: Path):
        adapter = shutil.copytree(lora, tmp_path / "adapter")
        (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
        assert "pickle files are not read" in refused(adapter, tmp_path / "merged")

    def test_damaged_adapter(self, lora: Path, tmp_path: Path):
        adapter = shutil.copytree(lora, tmp_path / "adapter")
        path = adapter / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        assert "cannot be read" in refused(adapter, tmp_path / "merged")

    def test_output_that_is_not_empty_stays_as_it_is(self, lora: Path, tmp_path: Path):
        (tmp_path / "merged").mkdir()
        (tmp_path / "merged" / "mine.txt").write_text("precious")
        assert "already exists" in refused(lora, tmp_path / "merged")
        assert [path.name for path in tmp_path.rglob("*")] == ["merged", "mine.txt"]

    def test_output_that_another_merge_is_writing(self, lora: Path, tmp_path: Path):
        (tmp_path / "merged.tmp").mkdir()
        with pytest.raises(InputError, match="from a command that was killed"):
            merge(lora, tmp_path / "merged")
        assert (tmp_path / "merged.tmp").is_dir()

    def test_output_that_no_finished_folder_can_take_the_place_of(
        self, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        (tmp_path / "here").mkdir()
        (tmp_path / "volume").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "volume")
        (tmp_path / "broken").symlink_to(tmp_path / "gone")
        monkeypatch.chdir(tmp_path / "here")
        monkeypatch.setattr(new_folder.os.path, "ismount", lambda path: Path(path).name == "volume")
        there = sorted(tmp_path.rglob("*"))
        for name, told in (
            (tmp_path / "link", rf"link is a link, .* for example {tmp_path / 'link' / 'model'}\."),
            (tmp_path / "broken", r"broken is a link, .* give a new folder\."),
            (tmp_path / "volume", "volume is a mount point"),
            (Path(), r"--output \. is the current folder, .* for example model\."),
            (tmp_path / "new" / "..", "is a way back to another folder"),
        ):
            with pytest.raises(InputError, match=told):
                merge(lora, name)
        assert sorted(tmp_path.rglob("*")) == there

    def test_full_disk(self, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        asked = []

        def usage(path: Path) -> Any:
            asked.append(path)
            return shutil._ntuple_diskusage(2**40, 2**40, 200_000)  # type: ignore[attr-defined]

        monkeypatch.setattr(merging.shutil, "disk_usage", usage)
        assert "are free on its disk; free some space" in refused(lora, tmp_path / "new" / "merged")
        assert asked == [tmp_path]
        assert not (tmp_path / "new").exists()

    def test_dequantised_base_of_an_adapter_that_saw_none(self, lora: Path, tmp_path: Path):
        assert "--base dequantized: this adapter has no record" in refused(
            lora, tmp_path / "merged", base="dequantized"
        )

    def test_bits_that_contradict_the_run(self, train: Callable[..., Path], tmp_path: Path):
        text = refused(train(adapter__modules_to_save=["embed_tokens"]), tmp_path / "merged", bits=4)
        assert "was trained on unquantised weights" in text

    def test_base_without_weights_and_without_a_seed(self, lora: Path, model_folder: Path, tmp_path: Path):
        assert "has no weights" in refused(lora, tmp_path / "merged", base_model=str(model_folder))

    def test_base_of_an_unknown_type(self, lora: Path, tmp_path: Path):
        (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
        save_file({"unread": torch.zeros(1)}, tmp_path / "model.safetensors")
        text = refused(lora, tmp_path / "merged", base_model=str(tmp_path))
        assert text.startswith("The adapter's base model cannot be read")
        assert text.endswith("give its folder with --base-model.")

    def test_base_of_another_size(self, lora: Path, tmp_path: Path):
        other = tiny.write_weights(tiny.build_model_folder(tmp_path / "base", hidden_size=32))
        assert "has shape" in refused(lora, tmp_path / "merged", base_model=str(other))

    def test_adapter_with_a_tensor_too_few_or_too_many(self, lora: Path, tmp_path: Path):
        adapter = shutil.copytree(lora, tmp_path / "adapter")
        state = load_file(lora / "adapter_model.safetensors")
        name, value = next(iter(state.items()))
        save_file({**state, "base_model.model.other": value.clone()}, adapter / "adapter_model.safetensors")
        assert "base_model.model.other is unexpected" in refused(adapter, tmp_path / "merged")
        del state[name]
        save_file(state, adapter / "adapter_model.safetensors")
        assert f"{name} is missing" in refused(adapter, tmp_path / "merged")

    def test_text_that_cannot_be_read(self, train: Callable[..., Path], tmp_path: Path):
        run = train(quantization__bits=4)
        assert "cannot be read as text" in refused(run, tmp_path / "merged", text_file=tmp_path / "nothing.txt")
        (tmp_path / "empty.txt").write_text("\n")
        assert "it contains no text" in refused(run, tmp_path / "merged", text_file=tmp_path / "empty.txt")


@pytest.fixture(params=["scaling", "layer", "not_a_number"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the merge: the wrong scale, one layer left out, or an overflow."""
    merge_layer, seen = adapted_model._merge_layer, []

    def wrong(layer: Any, dtype: torch.dtype) -> None:
        seen.append(layer)
        if request.param == "scaling":
            layer.scaling["default"] *= 1.5
        if request.param == "layer" and len(seen) == 5:
            return
        merge_layer(layer, dtype)
        if request.param == "not_a_number" and len(seen) == 5:
            layer.get_base_layer().weight.data[0, 0] = math.nan

    monkeypatch.setattr(adapted_model, "_merge_layer", wrong)


@pytest.mark.usefixtures("broken")
def test_wrong_merge_is_refused_by_its_divergence_and_leaves_nothing(tied_base: Path, tmp_path: Path):
    adapter = build_adapter(tmp_path / "adapter", tied_base)
    with pytest.raises(
        RunStopped, match=r"does not answer as .* nats per token apart, of which .* Nothing was"
    ) as error:
        merge(adapter, tmp_path / "merged")
    assert "--dtype fp32" in str(error.value)
    assert_nothing_left(tmp_path / "merged")


def test_merge_that_breaks_while_it_writes_leaves_nothing(
    lora: Path, tied_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def save(model: PreTrainedModel, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)
    with pytest.raises(KeyboardInterrupt):
        merge(lora, tmp_path / "merged", text_file=tied_base / "config.json")
    assert_nothing_left(tmp_path / "merged")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")], ids=repr)
def test_merge_that_cannot_be_written_is_a_sentence_and_leaves_nothing(
    error: Exception, lora: Path, tied_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def save(model: PreTrainedModel, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)
    with pytest.raises(RunStopped, match=r"merged could not be written \(.*\); free some space"):
        merge(lora, tmp_path / "merged", text_file=tied_base / "config.json")
    assert_nothing_left(tmp_path / "merged")


def test_divergence_is_that_of_torch_and_zero_for_equal_models():
    torch.manual_seed(0)
    first, second = torch.randn(300, 50), torch.randn(300, 50)
    found = comparison.compare([first[:200], first[200:]], iter([second[:200], second[200:]]))
    log_p, log_q = first.double().log_softmax(-1), second.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    assert found.mean_kl == pytest.approx(expected.item(), rel=1e-9)
    assert found.largest_logit == pytest.approx((first - second).abs().max().item())
    assert found.mean_logit == pytest.approx((first - second).abs().mean().item(), rel=1e-5)
    assert found.agreement == (first.argmax(-1) == second.argmax(-1)).double().mean().item()
    assert comparison.compare([first], iter([first])) == comparison.Difference(300, 0.0, 0.0, 0.0, 1.0)


def test_text_is_the_given_file_else_the_runs_data_else_samples_and_always_bounded(held_out: Path, tmp_path: Path):
    options: dict[str, Any] = {"settings": Settings(2048), "vocabulary": 512}
    tokenizer = tiny.build_tokenizer()
    (tmp_path / "long.txt").write_text("the house walks " * 20_000)
    text = comparison.choose_text(
        tokenizer, text_file=tmp_path / "long.txt", entries=[Source(str(held_out))], **options
    )
    assert text.name.endswith("long.txt")
    assert len(text.rows) <= 16
    assert max(map(len, text.rows)) == 512
    assert text.tokens == 4096
    text = comparison.choose_text(tokenizer, text_file=None, entries=[Source(str(held_out))], **options)
    assert (text.name, len(text.rows)) == (str(held_out), 11)
    for entries in ([], [Source(str(tmp_path / "gone.jsonl"))]):  # as a dataset of the hub without a network
        text = comparison.choose_text(tokenizer, text_file=None, entries=entries, **options)
        assert (text.name, len(text.rows)) == ("sample texts", 3)
    with pytest.raises(InputError, match="the base model only knows 100 tokens"):
        comparison.choose_text(tokenizer, text_file=None, entries=[], settings=Settings(1), vocabulary=100)


def test_run_is_compared_on_its_held_out_rows_else_on_its_training_rows_else_on_samples(
    train: Callable[..., Path], conversations: Path, held_out: Path, tmp_path: Path
):
    run = shutil.copytree(train(adapter__modules_to_save=["embed_tokens"]), tmp_path / "run")
    record = yaml.safe_load((run / "run.yaml").read_text())
    for files, name in (
        ({}, str(held_out)),
        ({"eval": str(tmp_path / "gone.jsonl")}, str(conversations)),
        ({"eval": None, "train": [str(tmp_path / "gone.jsonl")]}, "sample texts"),
    ):
        record["config"]["data"] |= files
        (run / "final" / "run.yaml").write_text(yaml.safe_dump(record))
        assert merge(run, tmp_path / "merged", dtype="fp32")["text"] == name
        shutil.rmtree(tmp_path / "merged")


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    capsys.readouterr()
    return lambda: capsys.readouterr().out


def test_command_prints_a_table_within_80_columns_or_json(lora: Path, tmp_path: Path, output: Callable[[], str]):
    assert commands.main(["merge", str(lora), "--output", str(tmp_path / "a"), "--dtype", "fp32"]) == 0
    lines = output().splitlines()
    assert lines[0] == f"Merged model: {tmp_path / 'a'}"
    assert max(len(line) for line in lines[1:]) <= 80
    assert "mean KL divergence, nats per token" in "\n".join(lines)
    assert commands.main(["merge", str(lora), "--output", str(tmp_path / "b"), "--json"]) == 0
    result = json.loads(output())
    assert result["dtype"] == "bf16"
    assert set(result["difference"]) == {"tokens", "largest_logit", "mean_logit", "mean_kl", "agreement"}


def test_command_ends_with_2_for_wrong_input_and_with_1_for_a_wrong_merge(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert commands.main(["merge", str(tmp_path / "no"), "--output", str(tmp_path / "merged")]) == 2
    assert capsys.readouterr().err.startswith("error: There is no folder")
    monkeypatch.setattr(merging, "LARGEST_KL", 0.0)  # whatever a merge does is too much
    assert commands.main(["merge", str(lora), "--output", str(tmp_path / "merged")]) == 1
    assert "error: The merged model does not answer as the adapter did" in capsys.readouterr().err
    assert_nothing_left(tmp_path / "merged")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bits", ["none", 8, 4])
def test_run_on_a_gpu_is_merged_and_compared_there(bits: str | int, train: Callable[..., Path], tmp_path: Path):
    result = merge(train("bf16", quantization__bits=bits), tmp_path / "merged")
    assert result["difference"]["mean_kl"] < 0.02
