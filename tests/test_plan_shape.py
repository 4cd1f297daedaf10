"""Shapes told from a config.json against the modules that transformers and PEFT make of it, on the meta device."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune.config import sections
from finetune.errors import InputError
from finetune.models import adapter as adapters
from finetune.models import loading as models
from finetune.planner.families import COMMON, FAMILIES, SIZES_OF_NESTED
from finetune.planner.model_config import read_config
from finetune.planner.shape import AdapterParameters, ModelShape, adapter_parameters, shape_of, trained_parameters
from finetune.trace.setting import Setting

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "model_configs.json").read_text())
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
}


def small(family: str, **changed: Any) -> dict[str, Any]:
    return {"model_type": family, **SMALL, **OF_FAMILY.get(family, {}), **changed}


def on_meta(config: dict[str, Any]) -> PreTrainedModel:
    known = AutoConfig.for_model(**config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(known)


def names_and_sizes(shape: ModelShape) -> dict[str, int]:
    """What the shape says of every parameter, under transformers' names."""
    found = {"model.embed_tokens.weight": shape.embedding_parameters, "model.norm.weight": shape.final_norm}
    if not shape.tied:
        found["lm_head.weight"] = shape.head_parameters
    for i in range(shape.layers):
        for linear in shape.linears:
            stacked = not linear.is_module and linear.inside == "mlp.experts"
            name = f"model.layers.{i}.{linear.path}"
            found[name if stacked else f"{name}.weight"] = linear.matrix_parameters
            if linear.bias:
                found[f"{name}.bias"] = linear.outputs
        found |= {f"model.layers.{i}.{norm.path}.weight": norm.elements for norm in shape.norms}
    return found


def test_there_are_published_models_and_families_to_check():
    assert len(PUBLISHED) == 34
    assert len(FAMILIES) == 14
    assert len({entry["config"]["model_type"] for entry in PUBLISHED.values()}) == 9


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models_are_exact(name: str):
    assert shape_of(PUBLISHED[name]["config"]).parameters == PUBLISHED[name]["parameters"]


@pytest.mark.parametrize("switches", [{}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 16}])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_the_name_and_size_that_transformers_gives_it(
    family: str, tied: bool, switches: dict[str, Any]
):
    config = small(family, tie_word_embeddings=tied, **switches)
    shape, model = shape_of(config), on_meta(config)
    assert names_and_sizes(shape) == {name: p.numel() for name, p in model.named_parameters()}
    assert shape.parameters == model.num_parameters()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_quantised_are_the_linear_layers_of_torch_but_the_head(family: str):
    model = on_meta(small(family))
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if type(m) is torch.nn.Linear and m is not head]
    assert shape_of(small(family)).quantised_linear_parameters == sum(m.weight.numel() for m in linear)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_field_means_what_it_means_to_transformers(family: str):
    defaults, theirs = {**COMMON, **FAMILIES[family].defaults}, CONFIG_MAPPING[family]()
    if FAMILIES[family].activation_field != "hidden_act":
        defaults.pop("hidden_act")
    for name, value in defaults.items():
        if name not in ("head_dim", "num_key_value_heads", "sliding_window", "sliding_window_pattern"):
            assert getattr(theirs, name) == value, name
    wide = small(family, num_attention_heads=32, hidden_size=512, num_key_value_heads=4)
    for name in ("head_dim", "num_key_value_heads", "tie_word_embeddings"):
        config = {key: value for key, value in wide.items() if key != name}
        assert names_and_sizes(shape_of(config)) == {n: p.numel() for n, p in on_meta(config).named_parameters()}, name


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": None},
    ],
)
@pytest.mark.parametrize("layers", [3, 13, 30])
@pytest.mark.parametrize("family", FAMILIES)
def test_windowed_layers_are_those_of_transformers(family: str, layers: int, given: dict[str, Any]):
    config = small(family, num_hidden_layers=layers, **given)
    theirs, shape = AutoConfig.for_model(**config), shape_of(config)
    known = "sliding_window" in FAMILIES[family].defaults
    window = theirs.sliding_window if known else None
    if "use_sliding_window" in FAMILIES[family].defaults and not theirs.use_sliding_window:
        window = None
    assert shape.sliding_window == window
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * layers
    assert shape.windowed_layers == (kinds.count("sliding_attention") if window else 0)


def test_layer_types_say_which_layers_are_windowed():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert shape_of(small("gemma2", layer_types=kinds)).windowed_layers == 1


def test_norms_of_queries_and_keys_are_of_each_head_or_of_all_together():
    def rows(family: str) -> list[tuple[int, int]]:
        return [(norm.elements, norm.rows_per_token) for norm in shape_of(small(family)).norms[-2:]]

    assert rows("olmo2") == [(48, 1), (16, 1)]
    assert rows("gemma3_text") == [(256, 6), (256, 2)]


def test_soft_caps_are_those_of_gemma_2_unless_they_are_switched_off():
    assert (shape_of(small("gemma2")).attention_softcap, shape_of(small("gemma2")).logits_softcap) == (True, True)
    off = shape_of(small("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (off.attention_softcap, off.logits_softcap) == (False, False)
    assert not shape_of(small("llama", attn_logit_softcapping=50.0)).attention_softcap


def test_a_token_meets_the_experts_chosen_for_it_and_all_else():
    mixtral = shape_of(PUBLISHED["mixtral-8x7b-v0.1"]["config"])
    assert (mixtral.experts, mixtral.experts_per_token) == (8, 2)
    assert mixtral.active_parameters == mixtral.parameters - 32 * 6 * 3 * 4096 * 14336
    assert 12.8e9 < mixtral.active_parameters < 12.95e9  # arXiv:2401.04088: 13B
    dense = shape_of(small("llama"))
    assert dense.active_parameters == dense.parameters


@pytest.mark.parametrize("outer", [{}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("inner", [{}, {"tie_word_embeddings": False}])
def test_the_language_model_of_a_multimodal_one_is_read_from_its_text_config(
    outer: dict[str, Any], inner: dict[str, Any]
):
    text = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 80, "vocab_size": 100, **inner}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": tower, "torch_dtype": "bfloat16", **outer}
    shape = shape_of(config)
    theirs = {
        name.replace("language_model.", ""): p.numel()
        for name, p in on_meta(config).named_parameters()
        if "vision" not in name and "multi_modal" not in name
    }
    assert names_and_sizes(shape) == theirs
    assert (shape.not_counted, shape.stored_dtype_bytes) == (("vision_config",), 2)


def test_sizes_that_a_text_config_leaves_out_are_those_of_transformers():
    theirs = CONFIG_MAPPING["gemma3_text"]()
    assert SIZES_OF_NESTED["gemma3_text"] == {key: getattr(theirs, key) for key in SIZES_OF_NESTED["gemma3_text"]}
    gemma_4b = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    shape = shape_of({"model_type": "gemma3", "text_config": gemma_4b})
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocabulary) == (8, 4, 256, 262208)
    assert shape.parameters == 3_880_263_168  # google/gemma-3-4b-it without its vision tower


sizes = st.integers(1, 5)


@settings(max_examples=15, deadline=None)
@given(sizes, sizes, sizes, st.integers(1, 4), st.integers(1, 16).map(lambda n: 2 * n), st.booleans(), st.booleans())
def test_any_llama_has_as_many_parameters_as_transformers_makes(
    layers: int, kv_heads: int, group: int, width: int, head_dim: int, tied: bool, bias: bool
):
    heads = kv_heads * group
    config = {
        "model_type": "llama",
        "hidden_size": heads * width,
        "intermediate_size": 7 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 11 * width,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
    }
    assert shape_of(config).parameters == on_meta({**config, "pad_token_id": None}).num_parameters()


# adapters


def trained_on_meta(config: dict[str, Any], kind: str, rank: int, targets: Any, saved: list[str]) -> AdapterParameters:
    """What is trained of the model that finetune.models.adapter attaches an adapter to, by PEFT's names."""
    model = on_meta(config)
    adapters.attach(
        model,
        sections.Adapter(type=kind, rank=rank, targets=targets, modules_to_save=saved),
        base="a/model",
        revision=None,
        dtype=torch.float32,
        seed=0,
    )
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    matrices = sum(n for name, n in trained.items() if ".lora_A." in name or ".lora_B." in name)
    magnitudes = sum(n for name, n in trained.items() if ".lora_magnitude_vector." in name)
    return AdapterParameters(matrices, magnitudes, sum(trained.values()) - matrices - magnitudes)


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_all_linear_layers_are_those_that_peft_attaches(family: str, kind: Any, rank: int):
    config = small(family)
    targets = ["q_proj", "o_proj"] if kind == "dora" and FAMILIES[family].is_mixture else "all-linear"
    ours = adapter_parameters(shape_of(config), kind=kind, rank=rank, targets=targets, modules_to_save=[])
    assert ours == trained_on_meta(config, kind, rank, targets, [])
    assert (ours.magnitudes > 0) == (kind == "dora")


@pytest.mark.parametrize(
    ("family", "tied", "targets", "saved"),
    [
        ("llama", False, ["q_proj", "v_proj"], ["embed_tokens", "lm_head"]),
        ("llama", True, ["q_proj", "v_proj"], ["embed_tokens", "lm_head"]),
        ("llama", True, "all-linear", ["lm_head"]),
        ("llama", True, "all-linear", ["embed_tokens"]),
        ("llama", True, ["down_proj", "lm_head"], []),
        ("llama", False, ["down_proj", "lm_head"], ["embed_tokens"]),
        ("qwen2", False, "all-linear", ["q_proj"]),  # its bias too
        ("qwen3", True, ["q_proj"], ["norm"]),  # every norm, of heads too
        ("olmo2", False, ["gate_proj"], ["q_norm", "post_attention_layernorm"]),
        ("gemma2", True, "all-linear", ["mlp"]),
        ("phi3", False, ["qkv_proj"], ["gate_up_proj"]),
        ("llama", False, ["up_proj"], ["self_attn", "k_proj"]),
        ("mixtral", False, ["q_proj"], ["experts", "mlp"]),
        ("mixtral", False, ["q_proj"], ["gate"]),
        ("mixtral", False, "all-linear", ["norm", "lm_head"]),
        ("mixtral", False, "all-linear", ["mlp"]),
    ],
)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_with_modules_trained_whole_are_those_that_peft_attaches(
    family: str, tied: bool, targets: Any, saved: list[str], kind: Any
):
    if kind == "dora" and FAMILIES[family].is_mixture and targets == "all-linear":
        kind = "lora"  # refused, see below
    config = small(family, tie_word_embeddings=tied)
    ours = adapter_parameters(shape_of(config), kind=kind, rank=4, targets=targets, modules_to_save=saved)
    assert ours == trained_on_meta(config, kind, 4, targets, saved)


def test_a_setting_without_an_adapter_trains_every_parameter():
    shape = shape_of(PUBLISHED["llama-3.1-8b"]["config"])
    assert trained_parameters(shape, Setting()) == 8_030_261_248
    assert trained_parameters(shape, Setting(adapter="lora", rank=16)) == 41_943_040
    assert trained_parameters(shape, Setting(adapter="dora", rank=16)) == 41_943_040 + 32 * (6144 + 4096 * 2 + 28672)


@pytest.mark.parametrize(
    ("family", "kind", "targets", "saved", "sentences"),
    [
        ("llama", "lora", ["w1"], [], ["no linear layer w1; it has down_proj"]),
        ("llama", "lora", [], [], ["no linear layer in an empty list"]),
        ("llama", "lora", ["w1"], ["wte"], ["no linear layer w1", "no module wte; it has down_proj, embed_tokens"]),
        ("llama", "lora", "q_proj", [], ["no linear layer q_proj"]),
        ("llama", "lora", ["q_proj"], ["q_proj"], ["q_proj is in both targets and modules_to_save"]),
        ("llama", "lora", ["q_proj"], ["self_attn"], ["covers every target"]),
        ("gemma", "lora", ["lm_head"], ["embed_tokens"], ["one weight"]),
        ("mixtral", "dora", "all-linear", [], ["DoRA cannot be had for experts"]),
        ("mixtral", "lora", ["gate"], [], ["no linear layer gate"]),
        ("mixtral", "lora", "all-linear", ["experts"], ["experts has an adapter by all-linear already"]),
    ],
)
def test_adapters_that_cannot_be_had_are_told_in_sentences(
    family: str, kind: Any, targets: Any, saved: list[str], sentences: list[str]
):
    with pytest.raises(InputError) as error:
        adapter_parameters(shape_of(small(family)), kind=kind, rank=4, targets=targets, modules_to_save=saved)
    assert len(error.value.problems) == len(sentences)
    for problem, sentence in zip(error.value.problems, sentences, strict=True):
        assert sentence in problem


# wrong input


@pytest.mark.parametrize(
    ("config", "sentences"),
    [
        ({"model_type": "gpt2"}, ["model_type is 'gpt2'; there are formulas for gemma"]),
        ({}, ["model_type is None"]),
        ({"model_type": "llava", "text_config": small("llama")}, ["model_type is 'llava'"]),
        ({"model_type": ["llama"]}, ["model_type is ['llama']"]),
        ({"model_type": "gemma3", "text_config": 3}, ["text_config is 3"]),
        (
            {"model_type": "llama"},
            [
                *(f"{name} is missing" for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")),
                *(f"{name} is missing" for name in ("vocab_size", "intermediate_size")),
            ],
        ),
        (
            small("llama", hidden_size=0, num_hidden_layers=2.5, vocab_size="100", tie_word_embeddings=1),
            ["hidden_size is 0", "num_hidden_layers is 2.5", "vocab_size is '100'", "tie_word_embeddings is 1"],
        ),
        (small("llama", num_attention_heads=True), ["num_attention_heads is True"]),
        (small("llama", num_key_value_heads=4), ["num_attention_heads 6 is not a multiple of num_key_value_heads 4"]),
        (
            small("llama", num_key_value_heads=4, vocab_size=0),
            ["vocab_size is 0", "num_attention_heads 6 is not a multiple of num_key_value_heads 4"],
        ),
        (small("llama", hidden_size=50), ["hidden_size 50 is not a multiple of num_attention_heads 6"]),
        (small("gemma2", layer_types=["full_attention"]), ["layer_types must be a list of 3 strings"]),
        (small("gemma3_text", sliding_window_pattern=0), ["sliding_window_pattern is 0"]),
        (small("mixtral", num_experts_per_tok=9), ["9 exceeds the 8 experts"]),
        (small("qwen3_moe", mlp_only_layers=[0]), ["mlp_only_layers"]),
        (small("llama", torch_dtype="int3"), ["dtype is 'int3'; it must be one of float32"]),
        (small("llama", quantization_config={"quant_method": "gptq"}), ["quantised with gptq"]),
    ],
)
def test_every_wrong_field_is_told_at_once(config: dict[str, Any], sentences: list[str]):
    with pytest.raises(InputError) as error:
        shape_of(config)
    assert len(error.value.problems) == len(sentences)
    for problem, sentence in zip(error.value.problems, sentences, strict=True):
        assert problem.startswith("config.json: ")
        assert sentence in problem


FIELDS = [*SMALL, "head_dim", "dtype", "torch_dtype", "layer_types", "quantization_config", "use_sliding_window"]
JSON = st.none() | st.booleans() | st.integers(max_value=10**6) | st.floats() | st.text() | st.lists(st.text())


@given(st.sampled_from([*FAMILIES, "gemma3"]), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_no_configuration_ends_in_anything_but_a_shape_or_sentences(family: str, values: dict[str, Any]):
    config = {"model_type": family, "text_config": values} if family == "gemma3" else {**small(family), **values}
    try:
        counted = shape_of(config).parameters
    except InputError as error:
        counted = len(error.problems)
    assert counted > 0


@pytest.mark.parametrize(
    ("stored", "bits", "dtype_bytes"),
    [
        ({}, None, 4),
        ({"torch_dtype": "float16"}, None, 2),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, None, 2),
        ({"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}, 4, 4),
        ({"quantization_config": {"load_in_8bit": True}}, 8, 4),
    ],
)
def test_dtype_and_bits_are_those_that_the_recipe_reads(stored: dict[str, Any], bits: int | None, dtype_bytes: int):
    shape, theirs = shape_of(small("llama", **stored)), CONFIG_MAPPING["llama"].from_dict(small("llama", **stored))
    assert (shape.published_bits, shape.stored_dtype_bytes) == (bits, dtype_bytes)
    assert shape.stored_dtype_bytes == models.stored_dtype(theirs).itemsize


# the file


def test_a_config_is_read_from_a_folder_and_from_a_file_of_any_name(tmp_path: Path):
    for name in ("config.json", "qwen.json"):
        (tmp_path / name).write_text(json.dumps({"name": name}))
    assert read_config(str(tmp_path)) == {"name": "config.json"}
    assert read_config(str(tmp_path / "qwen.json")) == {"name": "qwen.json"}


def test_a_config_of_the_hub_is_read_from_its_cache_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commit, repository = "0" * 40, tmp_path / "models--owner--name"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit / "config.json").write_text('{"model_type": "llama"}')
    program = "from finetune.planner.model_config import read_config; print(read_config('owner/name'))"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "{'model_type': 'llama'}"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("./nowhere", "There is no file or folder ./nowhere"),
        ("/no/such/config.json", "There is no file or folder /no/such/config.json"),
        ("llama", "There is no file or folder llama"),
        ("owner/model name", "owner/model name is neither a local folder nor a hub id"),
    ],
)
def test_a_path_that_leads_nowhere_is_told_in_a_sentence(path: str, sentence: str):
    with pytest.raises(InputError, match=sentence):
        read_config(path)


def test_a_hub_that_cannot_be_reached_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="owner/name is not in the cache, and HF_HUB_OFFLINE prevents"):
        read_config("owner/name", "v1")


@pytest.mark.parametrize(("text", "sentence"), [("{", "cannot be read"), ("[]", "is not a JSON object")])
def test_a_file_that_is_no_configuration_is_told_in_a_sentence(tmp_path: Path, text: str, sentence: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_config(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json"):
        read_config(str(tmp_path))


def test_a_shape_is_told_without_importing_torch_or_transformers():
    program = (
        "import sys; from finetune.planner.shape import shape_of; from finetune.planner.model_config import "
        "read_config; assert not {'torch', 'transformers', 'accelerate', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# a shape that is wrong in a classic way is found


@pytest.mark.parametrize(
    ("family", "mutate"),
    [
        ("qwen2", lambda shape: tuple(replace(m, bias=False) for m in shape.linears)),
        ("qwen2", lambda shape: tuple(replace(m, bias=m.inside == "self_attn") for m in shape.linears)),
        ("mixtral", lambda shape: tuple(m for m in shape.linears if m.name != "gate")),
        ("llama", lambda shape: tuple(replace(m, outputs=48) if m.name == "k_proj" else m for m in shape.linears)),
    ],
)
def test_the_comparison_with_transformers_finds_a_wrong_shape(family: str, mutate: Any):
    shape = shape_of(small(family))
    wrong = replace(shape, linears=mutate(shape))
    assert names_and_sizes(wrong) != {name: p.numel() for name, p in on_meta(small(family)).named_parameters()}
