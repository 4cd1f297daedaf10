"""What is read of a model before its step is traced: its config.json, and the sizes that transformers gives it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_models import CONFIGS, Llama
from test_families import EXPERTS, FAMILIES, MIXTURES, SIZES
from transformers import CONFIG_MAPPING

from finetune.errors import InputError
from finetune.models import quantization
from finetune.models.loading import config_from, without_weights
from finetune.models.model_config import published_bits, read_config
from finetune.trace.anatomy import anatomy_of
from finetune.trace.layers import Anatomy


def anatomy(config: dict[str, Any]) -> Anatomy:
    known = config_from(config)
    return anatomy_of(known, without_weights(known, trust_remote_code=False))


def small(family: str, **changed: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **(EXPERTS if family in MIXTURES else {}), **changed}


# the model


def test_there_are_published_models_and_families_to_check():
    assert len(CONFIGS) == 34
    assert len(FAMILIES) == 14
    assert len({entry["config"]["model_type"] for entry in CONFIGS.values()}) == 9


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_published_models_are_exact_and_their_layers_are_alike(name: str):
    found = anatomy(CONFIGS[name]["config"])
    assert found.parameters == CONFIGS[name]["parameters"]
    assert found.layers == CONFIGS[name]["config"]["num_hidden_layers"]
    low, high = found.depths(2)
    assert high - low == found.period <= 6
    assert low + high < found.layers  # fewer than all are traced


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_quantised_are_the_linear_layers_but_the_head(family: str):
    """As many as the recipe finds, whose layers bitsandbytes replaces."""
    known = config_from(small(family))
    skeleton = without_weights(known, trust_remote_code=False)
    found = anatomy_of(known, skeleton)
    assert 0 < found.linear_parameters < found.parameters
    expected = quantization.quantised_bytes(skeleton, 8) - quantization.quantised_bytes(skeleton, 4)
    assert expected == pytest.approx(found.linear_parameters / 2, rel=0.05)


def test_a_token_meets_the_experts_chosen_for_it_and_all_else():
    mixtral = anatomy(CONFIGS["mixtral-8x7b-v0.1"]["config"])
    assert mixtral.active_parameters == mixtral.parameters - 32 * 6 * 3 * 4096 * 14336
    assert 12.8e9 < mixtral.active_parameters < 12.95e9  # arXiv:2401.04088: 13B
    dense = anatomy(small("llama"))
    assert dense.active_parameters == dense.parameters


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b", "llama-3.1-70b"])
def test_arithmetic_models_have_the_sizes_of_those_they_stand_for(name: str):
    real, arithmetic = anatomy(CONFIGS[name]["config"]), Llama.of(CONFIGS[name]["config"]).anatomy
    assert arithmetic == replace(real, not_split=(), split_names=())  # its heads and layers can be divided at will


# its bits


@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        ({}, None),
        ({"torch_dtype": "float16"}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}, 4),
        ({"quantization_config": {"load_in_8bit": True, "quant_method": "bitsandbytes"}}, 8),
        ({"quantization_config": {"load_in_8bit": True}}, 8),
    ],
)
def test_bits_of_a_published_model_are_those_that_the_recipe_reads(stored: dict[str, Any], bits: int | None):
    config = small("llama", **stored)
    assert published_bits(config) == bits
    if stored.get("quantization_config"):
        stored["quantization_config"].setdefault("quant_method", "bitsandbytes")  # which the recipe asks for
    assert quantization.stored_bits(CONFIG_MAPPING["llama"].from_dict(small("llama", **stored))) == bits


@pytest.mark.parametrize(
    ("stored", "named"),
    [({"quant_method": "gptq"}, "gptq"), ({"bits": 4}, "an unknown method"), ("awq", "awq")],
)
def test_a_model_that_is_quantised_by_something_else_is_told_in_a_sentence(stored: Any, named: str):
    with pytest.raises(InputError, match=f"published quantised with {named}, which is not supported; use its 16-bit"):
        published_bits(small("llama", quantization_config=stored))


# the file


def test_a_config_is_read_from_a_folder_and_from_a_file_of_any_name(tmp_path: Path):
    for name in ("config.json", "qwen.json"):
        (tmp_path / name).write_text(json.dumps({"name": name}))
    assert read_config(str(tmp_path)) == {"name": "config.json"}
    assert read_config(str(tmp_path / "qwen.json")) == {"name": "qwen.json"}


def test_a_config_of_the_hub_is_read_from_its_cache_without_a_connection_and_without_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commit, repository = "0" * 40, tmp_path / "models--owner--name"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit / "config.json").write_text('{"model_type": "llama"}')
    program = (
        "import sys; from finetune.models.model_config import read_config; print(read_config('owner/name')); "
        "assert not {'torch', 'transformers', 'accelerate', 'peft'} & set(sys.modules)"
    )
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
        ("owner/model name", "There is no file or folder owner/model name"),
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
