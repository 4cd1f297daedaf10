"""``finetune export``: a GGUF file is the model, by other people's readers, and the hub gets what it should."""

import json
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import tiny
import torch
from huggingface_hub import CommitOperationDelete, HfApi
from safetensors.torch import load_file, save_file
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.cli import commands, demo_model
from finetune.errors import InputError
from finetune.export.gguf_file import describe, rope_factors, write_gguf
from finetune.export.gguf_vocabulary import SPLITS, splits_of

TEXT = "<|im_start|>user\nthe red house, 123 木々🙂<|im_end|>\n"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def build(folder: Path, kind: str = "llama", *, tied: bool = True, dtype: str = "bfloat16", **changes: Any) -> Path:
    """A tiny model of this type with weights, the biases of its projections included."""
    tiny.build_model_folder(folder, tied=tied)
    config = json.loads((folder / "config.json").read_text())
    if kind != "llama":
        config = {key: value for key, value in config.items() if key not in ("architectures", "head_dim")}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind, "dtype": dtype} | changes))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def fields(file: Path) -> dict[str, Any]:
    """The metadata of a file, by gguf's own reader."""
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("llama", False), ("mistral", False), ("qwen2", True), ("qwen3", False)]
)
def test_a_gguf_file_is_the_model_for_transformers(kind: str, tied: bool, tmp_path: Path):
    model = build(tmp_path / "model", kind, tied=tied, dtype="float32")
    result = write_gguf(model, tmp_path / "model.gguf", dtype="f32")
    expected = AutoModelForCausalLM.from_pretrained(model)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ours, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert torch.equal(found(ids).logits, expected(ids).logits)
    assert result["tensors"] == len(theirs)
    assert found.config.tie_word_embeddings is tied


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_that_lies_beside_a_tied_embedding_is_written_only_where_it_differs(is_equal: bool, tmp_path: Path):
    model = build(tmp_path / "model", tied=True, dtype="float32")
    state = load_file(model / "model.safetensors")
    head = (
        state["model.embed_tokens.weight"].clone() if is_equal else torch.randn_like(state["model.embed_tokens.weight"])
    )
    save_file({**state, "lm_head.weight": head}, model / "model.safetensors", {"format": "pt"})
    write_gguf(model, tmp_path / "model.gguf", dtype="f32")
    stored = [tensor.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors]
    assert ("output.weight" not in stored) is is_equal
    expected = AutoModelForCausalLM.from_pretrained(model)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert torch.equal(found(ids).logits, expected(ids).logits)


def test_a_gguf_file_has_the_tokens_template_and_ends_of_the_tokenizer(tmp_path: Path):
    model = build(tmp_path / "model", vocab_size=600)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    write_gguf(model, tmp_path / "model.gguf")
    own, found = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert found(TEXT)["input_ids"] == own(TEXT)["input_ids"]
    known = fields(tmp_path / "model.gguf")
    tokens, kinds = known["tokenizer.ggml.tokens"], known["tokenizer.ggml.token_type"]
    assert len(tokens) == len(kinds) == 600
    assert [tokens[i] for i in range(len(own))] == own.convert_ids_to_tokens(range(len(own)))
    assert [kinds[i] for i in (0, 1, 2, 599)] == [3, 3, 1, 5]  # control, control, normal, unused
    assert tokens[599] == "[PAD599]"
    said = {name.removeprefix("tokenizer.ggml."): known[name] for name in known if name.endswith("_id")}
    assert said == {"eos_token_id": 1, "eot_token_id": 7, "padding_token_id": 1}
    assert known["tokenizer.chat_template"] == tiny.CHATML
    assert (known["tokenizer.ggml.model"], known["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert known["tokenizer.ggml.add_bos_token"] is False


def test_the_demos_own_conversion_of_an_export_is_the_model_that_was_exported(tmp_path: Path):
    model = build(tmp_path / "model")
    (tmp_path / "gguf").mkdir()
    write_gguf(model, tmp_path / "gguf" / "model.gguf")
    demo_model._convert(tmp_path / "gguf" / "model.gguf", tmp_path / "back")
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "back"))
    assert after.dtype == torch.bfloat16
    weights = dict(after.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in before.named_parameters())


def test_matrices_of_8_bits_are_half_a_step_off_at_most_and_norms_are_exact(tmp_path: Path):
    model = build(tmp_path / "model")
    write_gguf(model, tmp_path / "model.gguf", dtype="q8_0")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    name = "blk.1.ffn_down.weight"
    values = gguf.dequantize(stored[name].data, stored[name].tensor_type)
    exact = weights["model.layers.1.mlp.down_proj.weight"].numpy()
    steps = np.abs(exact.reshape(-1, 32)).max(1) / 127
    assert (
        np.abs(values - exact).reshape(-1, 32).max(1) <= 0.6 * steps
    ).all()  # half, and a little because steps are in fp16
    assert (stored["output_norm.weight"].data == weights["model.norm.weight"].numpy()).all()
    assert fields(tmp_path / "model.gguf")["general.file_type"] == 7


def test_matrices_whose_rows_are_no_multiple_of_32_are_in_f16_beside_others_of_8_bits(tmp_path: Path):
    model = build(tmp_path / "model", hidden_size=48, intermediate_size=96, head_dim=12)
    result = write_gguf(model, tmp_path / "model.gguf", dtype="q8_0")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    assert stored["blk.0.ffn_down.weight"].tensor_type.name == "Q8_0"
    assert stored["blk.0.ffn_up.weight"].tensor_type.name == "F16"
    found = torch.tensor(stored["blk.0.ffn_up.weight"].data)
    assert torch.equal(found, weights["model.layers.0.mlp.up_proj.weight"].half())
    assert sorted(result["in_f16"]) == sorted(name for name in stored if stored[name].tensor_type.name == "F16")
    told = f"{len(result['in_f16'])} matrices are in f16 ({result['in_f16'][0]} first): their rows are no multiple of"
    assert told in describe(result)


def test_long_contexts_of_llama3_are_divided_as_transformers_divides_them(tmp_path: Path):
    model = build(tmp_path / "model", rope_parameters=LLAMA3)
    write_gguf(model, tmp_path / "model.gguf")
    config = AutoConfig.from_pretrained(model)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head_dim = config.hidden_size // config.num_attention_heads
    plain = 1 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    (factors,) = (t.data for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors if t.name == "rope_freqs.weight")
    assert torch.allclose(plain / torch.tensor(factors), scaled, rtol=1e-6)
    assert len(set(factors.tolist())) > 2  # short waves, long ones and some between
    assert torch.equal(rope_factors(LLAMA3, head_dim), torch.tensor(factors))


def test_tensors_that_older_versions_of_transformers_stored_are_left_out(tmp_path: Path):
    model = build(tmp_path / "model")
    tensors = load_file(model / "model.safetensors") | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    write_gguf(model, tmp_path / "model.gguf")
    assert not [each.name for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors if "rot" in each.name]


def test_rules_of_splitting_have_llama_cpps_names_and_others_none():
    digits, bytes_alone = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    )
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def name(*steps: Any) -> str | None:
        each = [json.loads(step.__getstate__()) for step in steps]
        return splits_of(each[0] if len(each) == 1 else {"type": "Sequence", "pretokenizers": each})

    assert name(whole) == "gpt-2"
    assert name(digits, whole) == "smollm"
    for pattern, known in SPLITS.items():
        assert name(pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_alone) == known
    assert name(pre_tokenizers.Split(Regex(r"\w+"), "isolated"), bytes_alone) is None
    assert name(pre_tokenizers.ByteLevel(add_prefix_space=True)) is None
    assert name(pre_tokenizers.Metaspace()) is None
    assert splits_of(None) is None


def test_what_no_gguf_file_is_written_of_is_refused_in_a_sentence(tmp_path: Path):
    model = build(tmp_path / "model")
    (tmp_path / "there.gguf").write_text("mine")
    for change, reason in (
        ({"model_type": "gemma2"}, "models of the type gemma2 are not written here, only llama, mistral, qwen2, qwen3"),
        ({"rope_parameters": LLAMA3 | {"rope_type": "yarn"}}, "rotary embeddings of the type yarn"),
        ({}, "there.gguf already exists"),
    ):
        own = tmp_path / str(len(reason))
        own.mkdir()
        for file in model.iterdir():
            (own / file.name).write_bytes(file.read_bytes())
        config = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=reason):
            write_gguf(own, tmp_path / "there.gguf")
    bare = build(tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InputError, match=r"No tokenizer could be loaded .*; copy the files of a fast tokenizer"):
        write_gguf(bare, tmp_path / "new.gguf")
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"is an adapter, .*finetune merge"):
        write_gguf(model, tmp_path / "new.gguf")
    assert sorted(path.name for path in tmp_path.glob("*.gguf*")) == ["there.gguf"]


def test_the_command_writes_a_file_and_refuses_options_that_mean_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, file = build(tmp_path / "model"), tmp_path / "model.gguf"
    assert commands.main(["export", str(model), "--gguf", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gguf"]["bytes"] == file.stat().st_size
    for options, said in (
        ([], "Say where to"),
        (["--push", "a/b", "--dtype", "f16"], "--dtype is for --gguf"),
        (["--gguf", "x", "--public"], "--public is for --push"),
        (["--push", "name"], "give the repository with its owner, OWNER/NAME"),
    ):
        assert commands.main(["export", str(model), *options]) == 2
        assert said in capsys.readouterr().err


# The hub


class Repository:
    """What is asked of the hub."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Repository:
    asked = Repository()

    def create_repo(self: HfApi, name: str, **how: Any) -> Any:
        asked.made = {"name": name, **how}
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

    def create_commit(self: HfApi, name: str, operations: Any, **how: Any) -> Any:
        assert name == asked.made["name"]
        for each in operations:
            if isinstance(each, CommitOperationDelete):
                del asked.files[each.path_in_repo]
                continue
            with each.as_file() as file:
                asked.files[each.path_in_repo] = file.read()
        return huggingface_hub.CommitInfo(f"https://huggingface.co/{name}/commit/1", how["commit_message"], "", "1")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "list_repo_files", lambda self, name: list(asked.files))
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    return asked


def test_a_result_is_uploaded_with_its_card_and_nothing_else_of_its_folder(
    hub: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    final = build(tmp_path / "run" / "final")
    (final / "README.md").write_text(f"---\nbase_model: {tmp_path / 'base'}\ntags: [sft]\n---\n\n# Mine\n")
    for name in ("run.yaml", "train.jsonl", "pytorch_model.bin", ".env"):
        (final / name).write_text("private")
    (tmp_path / "run" / "run.yaml").write_text("")
    assert commands.main(["export", str(tmp_path / "run"), "--push", "me/mine", "--json"]) == 0
    printed = capsys.readouterr()
    assert hub.made == {"name": "me/mine", "private": True, "exist_ok": True}
    expected = {"config.json", "generation_config.json", "model.safetensors", "README.md", "chat_template.jinja"}
    assert set(hub.files) == expected | {"tokenizer.json", "tokenizer_config.json"}
    assert hub.files["model.safetensors"] == (final / "model.safetensors").read_bytes()
    assert hub.files["README.md"] == b"---\ntags: [sft]\n---\n\n# Mine\n"  # no folder of this machine
    assert set(json.loads(printed.out)["push"]["files"]) == set(hub.files)
    for name in set(hub.files):
        assert name in printed.err


def test_code_that_a_model_comes_with_is_uploaded_where_its_configuration_names_it(hub: Repository, tmp_path: Path):
    model = build(tmp_path / "model")
    (model / "modeling_mine.py").write_text("mine")
    assert commands.main(["export", str(model), "--push", "me/mine"]) == 0
    assert "modeling_mine.py" not in hub.files
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}})
    )
    assert commands.main(["export", str(model), "--push", "me/mine"]) == 0
    assert hub.files["modeling_mine.py"] == b"mine"


def test_an_adapter_is_uploaded_and_a_base_that_only_this_machine_has_is_told(
    hub: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    for base, told in (("/here/model", True), ("runs/model", True), ("owner/model", False)):
        adapter = tmp_path / base.replace("/", "-")
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        (adapter / "adapter_model.safetensors").write_bytes(b"x")
        (adapter / "README.md").write_text(f"---\nbase_model: {base}\n---\n")
        assert commands.main(["export", str(adapter), "--push", "me/mine", "--public"]) == 0
        assert (f"names its base by a folder of this machine, {base}" in capsys.readouterr().err) is told
        assert (b"base_model: " in hub.files["README.md"]) is not told
        assert hub.made["private"] is False


def test_what_is_left_of_an_earlier_result_is_removed_and_other_files_of_the_repository_stay(
    hub: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    left = {"adapter_config.json", "adapter_model.safetensors", "model-00001-of-00002.safetensors"}
    theirs = {".gitattributes", "train.py", "logs/model.safetensors"}
    hub.files = dict.fromkeys(left | theirs, b"")
    assert commands.main(["export", str(build(tmp_path / "model")), "--push", "me/mine", "--json"]) == 0
    printed = capsys.readouterr()
    assert not left & set(hub.files)
    assert theirs < set(hub.files)
    assert json.loads(printed.out)["push"]["removed"] == sorted(left)
    assert "adapter_config.json is of another result, and is removed" in printed.err


def test_without_a_login_nothing_is_uploaded_and_the_command_for_it_is_named(
    hub: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert commands.main(["export", str(build(tmp_path / "model")), "--push", "me/mine"]) == 2
    assert "nobody is logged in to the hub; run `hf auth login`" in capsys.readouterr().err
    assert not hub.made


def test_a_refusal_of_the_hub_is_a_sentence(
    hub: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(self: HfApi, *_: Any, **__: Any) -> None:
        raise OSError("You don't have the rights")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    assert commands.main(["export", str(build(tmp_path / "model")), "--push", "other/mine"]) == 2
    assert "--push other/mine: the hub refuses it (You don't have the rights)" in capsys.readouterr().err
