"""A model whose weights are missing, damaged or others than its config.json describes is refused before they load."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from finetune.data import dataset
from finetune.errors import InputError
from finetune.models import loading, weight_files, weights
from finetune.models import loading as models
from recipes import sft

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(weights_folder: Path, tmp_path: Path) -> Path:
    """A published model, to be damaged."""
    return shutil.copytree(weights_folder, tmp_path / "model")


@pytest.fixture
def train(conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The recipe, in which no data are prepared and no weights are loaded."""
    monkeypatch.setattr(loading, "load_model", None)
    monkeypatch.setattr(dataset, "load", None)

    def run(folder: Path, **changes: Any) -> None:
        changes = {"model__random_weights": False} | changes
        sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", **changes))

    return run


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Save the weights of a folder with a change."""
    state = load_file(folder / weight_files.ONE_FILE)
    edit(state)
    save_file(state, folder / weight_files.ONE_FILE, metadata={"format": "pt"})


def skeleton(folder: Path) -> Any:
    return models.without_weights(models.load_config(str(folder), revision=None, trust_remote_code=False), False)


def problems(folder: Path) -> str:
    models.quiet()
    return "\n".join(weights.problems(skeleton(folder), weight_files.local_files(folder)))


def test_complete_weights_are_accepted(folder: Path):
    assert problems(folder) == ""
    assert weights.not_finite(weight_files.local_files(folder)) == []


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda state: state.pop(UP), f"{UP} missing"),
        (lambda state: state.update(extra=torch.zeros(3)), "extra unknown"),
        (lambda state: state.update({UP: torch.zeros(3, 4)}), f"{UP} has shape 3 x 4 instead of 256 x 128"),
    ],
)
def test_missing_unknown_and_mismatched_tensors_are_refused_by_name_before_data_are_prepared(
    edit: Any, sentence: str, folder: Path, train: Callable[..., Any]
):
    change(folder, edit)
    with pytest.raises(InputError) as refusal:
        train(folder)
    assert f"the weights in {folder} do not fit its config.json: {sentence}." in str(refusal.value)


def test_tensors_known_to_be_harmless_are_passed_over(folder: Path):
    extra = ("model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.layers.0.weight", "model.layers.0.attn.masked_bias")
    change(folder, lambda state: state.update({name: torch.zeros(3) for name in extra}))
    assert problems(folder) == ""


def test_tied_head_may_be_stored_or_left_out(folder: Path):
    embedding = load_file(folder / weight_files.ONE_FILE)["model.embed_tokens.weight"]
    change(folder, lambda state: state.update({"lm_head.weight": embedding.clone()}))
    assert problems(folder) == ""
    change(folder, lambda state: state.pop("lm_head.weight"))
    assert problems(folder) == ""


def test_experts_are_checked_under_the_names_in_which_they_are_stored(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    assert problems(tmp_path) == ""
    change(tmp_path, lambda state: state.pop("model.layers.0.block_sparse_moe.experts.1.w1.weight"))
    assert "such as experts, are missing or have other shapes" in problems(tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_models_published_quantised_are_accepted_and_their_missing_tensors_found(bits: int, folder: Path):
    config = AutoConfig.from_pretrained(folder)
    source: dict[str, Any] = {"revision": None, "trust_remote_code": False, "attention": "auto", "seed": 0}
    device = torch.device("cpu")
    quantised = models.load_model(str(folder), config, dtype=torch.bfloat16, bits=bits, device=device, **source)
    quantised.save_pretrained(folder)
    assert problems(folder) == ""
    assert weights.not_finite(weight_files.local_files(folder)) == []
    change(folder, lambda state: [state.pop(name) for name in list(state) if name.startswith(UP)])
    assert f"{UP} missing" in problems(folder)


def test_half_a_download_is_refused_and_random_weights_are_drawn_only_if_asked_for(
    folder: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / weight_files.ONE_FILE).unlink()
    changes = {"train__steps": 1, "adapter__type": "lora", "model__random_weights": False}
    with pytest.raises(InputError, match=r"has no weights .* set model\.random_weights to true"):
        sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()
    sft.main(
        scenarios.configuration(folder, conversations, tmp_path / "run", **{**changes, "model__random_weights": True})
    )
    first_lines = capsys.readouterr().out.splitlines()[:4]
    assert any(line.startswith("random weights drawn from seed 0") for line in first_lines)
    assert "random_weights: true" in (tmp_path / "run" / "run.yaml").read_text()
    assert "random weights of the shape of" in (tmp_path / "run" / "final" / "README.md").read_text()


def test_random_weights_take_the_place_of_those_that_a_folder_has(folder: Path):
    source: dict[str, Any] = {"revision": None, "trust_remote_code": False, "attention": "auto", "seed": 3}
    config, device = AutoConfig.from_pretrained(folder), torch.device("cpu")
    model = models.load_model(
        str(folder), config, dtype=torch.float32, bits=None, device=device, random_weights=True, **source
    )
    torch.manual_seed(3)
    drawn = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, drawn[name]) for name, value in model.state_dict().items())


def test_model_of_random_weights_is_saved_in_the_dtype_that_its_configuration_names(
    folder: Path, conversations: Path, tmp_path: Path
):
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    changes = {"train__steps": 1, "model__random_weights": True}
    sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", **changes))
    saved = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


def test_part_that_the_index_names_and_the_folder_lacks_is_named(folder: Path, train: Callable[..., Any]):
    (folder / weight_files.ONE_FILE).rename(folder / "model-00001-of-00002.safetensors")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / weight_files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    with pytest.raises(InputError, match=r"lacks model-00002-of-00002\.safetensors, which model\.safetensors\.index"):
        train(folder)


def test_weights_in_parts_are_accepted(folder: Path):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder / "parts", max_shard_size="100KB")
    assert len(weight_files.local_files(folder / "parts")) > 2
    assert problems(folder / "parts") == ""


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/model.safetensors", "..\\m.safetensors", "a.bin"])
def test_index_that_names_a_file_outside_of_its_folder_is_refused_and_not_followed(
    name: str, folder: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    (folder.parent / "other").mkdir()
    (folder / weight_files.ONE_FILE).rename(folder.parent / "other" / weight_files.ONE_FILE)
    (folder / weight_files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {UP: name}}))
    monkeypatch.setattr(weight_files, "safe_open", None)
    with pytest.raises(InputError, match="must be safetensors files in its own folder"):
        train(folder)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "\x00"]
)
def test_damaged_index_is_refused_with_a_sentence(content: str, folder: Path, train: Callable[..., Any]):
    (folder / weight_files.ONE_FILE).unlink()
    (folder / weight_files.INDEX).write_text(content)
    with pytest.raises(InputError, match=r"index\.json (is not a valid index of weights|names 3, but the parts)"):
        train(folder)


@pytest.mark.parametrize("kept", [0, 5, 1000, 100_000])
def test_file_that_is_cut_off_is_named(kept: int, folder: Path, train: Callable[..., Any]):
    os.truncate(folder / weight_files.ONE_FILE, kept)
    with pytest.raises(InputError, match=r"model\.safetensors is truncated or damaged \(.*\); download it again"):
        train(folder)


def test_git_lfs_pointer_is_named_as_what_it_is(folder: Path, train: Callable[..., Any]):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / weight_files.ONE_FILE).write_text(pointer)
    with pytest.raises(InputError, match="is a Git LFS pointer, not the weights; run `git lfs pull`"):
        train(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_weight_that_is_not_finite_is_found(value: float, dtype: torch.dtype, folder: Path):
    def edit(state: dict[str, torch.Tensor]) -> None:
        state[UP] = state[UP].to(dtype)
        state[UP][7, 9] = value

    change(folder, edit)
    assert f"has NaN or infinite weights in {UP};" in weights.not_finite(weight_files.local_files(folder))[0]


def test_tensor_without_elements_is_finite(folder: Path):
    change(folder, lambda state: state.update(empty=torch.zeros(0, 4)))
    assert weights.not_finite(weight_files.local_files(folder)) == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_tensor_is_checked_by_one_process(world_size: int, folder: Path):
    names = list(load_file(folder / weight_files.ONE_FILE))
    for damaged in (names[0], names[-1]):
        change(folder, lambda state, name=damaged: state[name].view(-1).fill_(float("nan")))
        files = weight_files.local_files(folder)
        found = [bool(weights.not_finite(files, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert sum(found) == 1
        change(folder, lambda state, name=damaged: state[name].view(-1).fill_(0.0))


@pytest.mark.parametrize("bits", ["none", 4])
def test_model_with_a_nan_is_refused_before_its_weights_load(
    bits: Any, folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    change(folder, lambda state: state[UP][7].fill_(float("nan")))
    monkeypatch.setattr(loading, "load_model", None)
    changes = {"adapter__type": "lora", "quantization__bits": bits}
    with pytest.raises(InputError, match="has NaN or infinite weights"):
        sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", **changes))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"num_attention_heads": 7}, "does not describe a valid model"),
        ({"num_attention_heads": 0}, "does not describe a valid model"),
        ({"num_key_value_heads": 3}, "which is not a multiple of its num_key_value_heads: 3"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: -1, but it must be 1 or more"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0, but it must be 1 or more"),
        ({"num_hidden_layers": 1_000_000_000}, "1,000,000,000, more than the supported 2,000"),
        ({"num_hidden_layers": 2.5}, "does not describe a valid model"),
        ({"hidden_size": 0}, "hidden_size: 0, but it must be 1 or more"),
        ({"hidden_size": "wide"}, "does not describe a valid model"),
        ({"head_dim": -4}, "does not make a causal language model"),
        ({"vocab_size": -1}, "vocab_size: -1, but it must be 1 or more"),
        ({"intermediate_size": 10**18}, "does not make a causal language model"),
        ({"hidden_act": "unheard-of"}, "does not make a causal language model"),
        (
            {"rope_parameters": {"rope_type": "unheard-of", "rope_theta": 1e4}},
            "does not make a causal language model",
        ),
    ],
    ids=str,
)
def test_impossible_configuration_is_refused_with_a_sentence(
    sizes: dict[str, Any], sentence: str, folder: Path, train: Callable[..., Any]
):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    with pytest.raises(InputError, match=rf"config\.json .*{sentence}"):
        train(folder)


def test_weights_that_transformers_would_read_from_elsewhere_are_refused(folder: Path, train: Callable[..., Any]):
    path, text = folder / "config.json", (folder / "config.json").read_text()
    path.write_text(json.dumps(json.loads(text) | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(InputError, match=r"names other\.safetensors as its weights"):
        train(folder)
    path.write_text(text)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/other"}))
    with pytest.raises(InputError, match=r"contains adapter_config\.json beside a model"):
        train(folder)


def test_sizes_that_a_model_has_for_each_of_its_layers_are_left_to_it():
    assert models._impossible_sizes({"num_attention_heads": [8, 4], "num_key_value_heads": [3, 4]}) == []
    assert models._impossible_sizes({"num_attention_heads": 8, "num_key_value_heads": [3, 4]}) == []


def test_weights_of_a_hub_model_are_taken_from_its_cache_and_must_be_safetensors(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commit = "0" * 40
    cached = tmp_path / "hub" / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    snapshot = shutil.copytree(folder, cached / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert weights.files("owner/name", None) == [snapshot / weight_files.ONE_FILE]
    (snapshot / weight_files.ONE_FILE).unlink()
    with pytest.raises(InputError, match="owner/name has no safetensors weights on the hub"):
        weights.files("owner/name", None)


def test_merge_refuses_a_base_or_an_adapter_with_a_nan_and_a_base_that_lacks_a_tensor(
    folder: Path, conversations: Path, tmp_path: Path
):
    from finetune.export import adapter_source

    changes = {"adapter__type": "lora", "train__steps": 1}
    sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", **changes))
    base = str(folder)  # named, so that one with other weights than the run's is looked at
    read = lambda: adapter_source.read(tmp_path / "run", base_model=base, bits=None)  # noqa: E731
    assert read().base == str(folder)
    whole = (folder / weight_files.ONE_FILE).read_bytes()
    change(folder, lambda state: state[UP][7].fill_(float("nan")))
    with pytest.raises(InputError, match="has NaN or infinite weights"):
        read()
    (folder / weight_files.ONE_FILE).write_bytes(whole)
    change(folder, lambda state: state.pop(UP))
    with pytest.raises(InputError, match=f"{UP} missing"):
        read()
    (folder / weight_files.ONE_FILE).write_bytes(whole)
    adapter = tmp_path / "run" / "final" / "adapter_model.safetensors"
    state = load_file(adapter)
    next(iter(state.values())).fill_(float("inf"))
    save_file(state, adapter)
    with pytest.raises(InputError, match=r"adapter_model\.safetensors has NaN or infinite weights"):
        read()


def test_tiny_model_of_the_tests_has_no_weights(tmp_path: Path):
    """What scenarios.configuration relies on."""
    with pytest.raises(InputError, match="has no weights"):
        weight_files.local_files(tiny.build_model_folder(tmp_path))
