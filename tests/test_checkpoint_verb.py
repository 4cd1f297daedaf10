"""``finetune checkpoint``: what it lists, finds damaged, and makes of a checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import savers
import scenarios
import tiny
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from finetune.cli import commands
from finetune.config import sections
from finetune.export.checkpoint_export import export
from finetune.models import adapter
from finetune.models import loading as models


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = commands.main(["checkpoint", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two complete checkpoints, one without its manifest and one in the making."""
    folder = tmp_path_factory.mktemp("run")
    for step in (100, 200):
        savers.save(folder, step, world_size=2)
    shutil.copytree(folder / "checkpoints/step-00000200", folder / "checkpoints/step-00000300")
    (folder / "checkpoints/step-00000300/manifest.json").unlink()
    (folder / "checkpoints/step-00000400.tmp").mkdir()
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


def test_ls_tells_of_each_checkpoint_whether_it_is_complete(run: Path, capsys: pytest.CaptureFixture[str]):
    code, printed, _ = run_cli(capsys, "ls", run)
    assert code == 0
    lines = printed.splitlines()
    table = [line for line in lines if line.startswith("step-")]
    assert [line.split()[0] for line in table] == [f"step-00000{n}" for n in ("300", "200", "100", "400.tmp")]
    assert [" complete" in line and "fsdp2 x 2" in line and "KiB" in line for line in table] == [
        False,
        True,
        True,
        False,
    ]
    assert max(map(len, lines[:5])) <= 80
    assert any("manifest.json is missing" in line for line in lines[5:])


def test_ls_as_json_has_the_same_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]):
    _, printed, _ = run_cli(capsys, "ls", run / "checkpoints", "--json")
    entries = json.loads(printed)
    assert [entry["state"] for entry in entries] == [
        "not complete",
        "complete",
        "complete",
        "being written, or left behind",
    ]
    complete = entries[1]
    files = (run / "checkpoints" / complete["name"]).glob("*.safetensors")
    assert complete["bytes"] == sum(file.stat().st_size for file in files)
    assert (complete["step"], complete["strategy"], complete["processes"]) == (200, "fsdp2", 2)


def test_verify_says_that_intact_files_are_intact(run: Path, capsys: pytest.CaptureFixture[str]):
    for path in (run / "checkpoints/step-00000100", run / "checkpoints/step-00000200"):
        code, printed, _ = run_cli(capsys, "verify", path)
        assert code == 0
        assert f"{path.name}: intact, 2 files" in printed


def test_verify_of_a_run_names_every_file_that_is_damaged_and_what_is_not_complete(
    copy: Path, capsys: pytest.CaptureFixture[str]
):
    damaged = copy / "checkpoints/step-00000100/rank-00001-of-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    code, printed, _ = run_cli(capsys, "verify", copy)
    assert code == 1
    assert f"{damaged} is damaged" in printed
    assert "step-00000200: intact" in printed
    assert "step-00000300 is not a complete checkpoint" in printed
    code, printed, _ = run_cli(capsys, "verify", copy, "--json")
    result = json.loads(printed)
    assert code == 1
    assert (result["intact"], len(result["not_complete"])) == (False, 1)
    assert [len(one["damaged"]) for one in result["checkpoints"]] == [0, 1]


def test_verify_of_one_checkpoint_that_is_not_complete_says_what_is_missing(
    copy: Path, capsys: pytest.CaptureFixture[str]
):
    path = copy / "checkpoints/step-00000200"
    (path / "rank-00000-of-00002.safetensors").unlink()
    code, printed, _ = run_cli(capsys, "verify", path)
    assert code == 1
    assert f"{path} is not complete: rank-00000-of-00002.safetensors is missing" in printed


def test_verify_names_a_pickle_in_a_checkpoint_and_does_not_open_it(copy: Path, capsys: pytest.CaptureFixture[str]):
    path = copy / "checkpoints/step-00000100"
    (path / "optimizer.pt").symlink_to("/nowhere")  # to open it would fail
    code, printed, _ = run_cli(capsys, "verify", path)
    assert code == 0
    assert "'optimizer.pt' does not belong to it, and was not opened" in printed


@pytest.mark.parametrize("action", ["ls", "verify", "export"])
def test_a_folder_without_checkpoints_is_wrong_input(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = ["--output", tmp_path / "new"] if action == "export" else []
    for path in (tmp_path, tmp_path / "absent"):
        code, _, told = run_cli(capsys, action, path, *output)
        assert code == 2
        assert str(path) in told
        assert "give the" in told


def trained_model(base: Path, config: dict[str, Any]) -> Any:
    """A base with the adapter of a configuration, or without one, as it was after some training."""
    model = models.load_model(
        str(base),
        models.load_config(str(base), revision=None, trust_remote_code=False),
        revision=None,
        trust_remote_code=False,
        attention="auto",
        dtype=torch.float32,
        seed=0,
        bits=None,
        device=torch.device("cpu"),
        random_weights=True,
    )
    section = sections.Adapter.model_validate(config["adapter"])
    if section.type != "none":
        adapter.attach(model, section, base=str(base), revision=None, dtype=torch.float32, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def save_run(run: Path, base: Path, **changes: Any) -> Any:
    """A checkpoint of step 3 that two processes wrote of a trained model, which is returned."""
    config = scenarios.configuration(base, run / "train.jsonl", run, **changes).model_dump()
    model = trained_model(base, config)
    weights = {f"weights/{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    strategy = {"name": "fsdp2", "processes": 2, "precision": "bf16"}
    read = {"base": models.identity(str(base), revision=None, weights=config["adapter"]["type"] != "none")}
    contents = {
        "run": {"config": config, "strategy": strategy, "chat_template": tiny.CHATML, "data": read},
        "progress": {"step": 3, "metrics": [{"step": 3, "loss": 1.25, "eval_loss": 1.5}], "eval_loss": 2.5},
    }

    def on(rank: int, gather: savers.Gather) -> None:
        saver = savers.saver(run, rank, 2, gather)
        saver.save(3, savers.share(weights, savers.even_cuts(weights, 2), rank), contents, {}, "fsdp2")
        saver.finish()

    savers.together(2, on)
    return model


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_a_fully_trained_checkpoint_is_exported_as_the_model_that_was_trained(
    tied: bool, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base = tiny.build_model_folder(tmp_path / "base", tied=tied)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    model = save_run(tmp_path / "run", base)
    code, printed, _ = run_cli(capsys, "export", tmp_path / "run", "--output", tmp_path / "new" / "model", "--json")
    assert code == 0
    told = json.loads(printed)
    assert told["step"] == 3
    assert told["parameters"] == sum(value.numel() for value in model.parameters()) > 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "model")
    assert str(exported.dtype) == f"torch.{dtype}"
    expected = dict(model.named_parameters())
    found = dict(exported.named_parameters())
    assert len(expected) == len(found) > 10
    assert all(torch.equal(found[name], value.to(exported.dtype)) for name, value in expected.items())
    assert (exported.get_output_embeddings().weight is exported.get_input_embeddings().weight) == tied
    assert AutoTokenizer.from_pretrained(tmp_path / "new" / "model").chat_template == tiny.CHATML
    card = (tmp_path / "new" / "model" / "README.md").read_text()
    assert "optimizer steps: 3" in card
    assert "2.5000 before, 1.5000 after" in card
    assert "fsdp2" in (tmp_path / "new" / "model" / "run.yaml").read_text()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["model"]


def test_buffers_that_belong_to_a_model_are_exported_with_its_trained_weights(tmp_path: Path):
    """Such as the bias by which experts are chosen."""
    base = tiny.build_model_folder(tmp_path / "base")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 512}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **sizes, **heads, **experts))
    (bias,) = (each for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
    bias.normal_()
    model.save_pretrained(base)
    trained = save_run(tmp_path / "run", base)
    export(tmp_path / "run", tmp_path / "model")
    exported, told = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not {name for kind in told.values() for name in kind}
    found = dict(exported.named_buffers())
    assert torch.equal(next(each for name, each in found.items() if name.endswith("e_score_correction_bias")), bias)
    expected = dict(trained.named_parameters())
    assert all(torch.equal(each, expected[name]) for name, each in exported.named_parameters())


@pytest.mark.parametrize("changes", [{}, {"adapter__type": "dora"}, {"adapter__modules_to_save": ["lm_head"]}], ids=str)
def test_a_checkpoint_of_an_adapter_is_exported_as_peft_loads_it(
    changes: dict[str, Any], weights_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from peft import PeftModel

    model = save_run(tmp_path / "run", weights_folder, **{"adapter__type": "lora", "adapter__rank": 4, **changes})
    code, printed, _ = run_cli(
        capsys, "export", tmp_path / "run/checkpoints/step-00000003", "--output", tmp_path / "adapter"
    )
    assert code == 0
    assert "Exported the adapter of step 3 to" in printed
    base = AutoModelForCausalLM.from_pretrained(weights_folder)
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        untrained = base(tokens).logits
        exported = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(tokens).logits
        assert torch.allclose(exported, model(tokens).logits, atol=1e-5)
        assert not torch.allclose(exported, untrained, atol=1e-2)


def test_an_export_is_refused_before_anything_is_written(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, output = tmp_path / "run", tmp_path / "new"
    save_run(run, model_folder)
    other_base = tiny.build_model_folder(tmp_path / "base", hidden_size=128)

    def refused(sentence: str, to: Path = output, *more: Any) -> None:
        code, _, told = run_cli(capsys, "export", run, "--output", to, *more)
        assert code == 2
        assert sentence in told
        assert not output.exists()

    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").touch()
    refused("already exists", tmp_path / "taken")
    (run / "run.yaml").touch()
    refused("would be taken for finished; choose another one, for example", run / "final")
    damaged = run / "checkpoints/step-00000003/rank-00001-of-00002.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused("is damaged")
    savers.save(run, 4)
    refused("has no configuration of its run")
    save_run(run, other_base)
    shutil.rmtree(run / "checkpoints/step-00000004")
    shutil.copy(model_folder / "config.json", other_base / "config.json")
    refused("is not the one that the run began with, by its fingerprint")
    refused("does not fit", output, "--base-model", other_base)
    shutil.rmtree(other_base)
    refused("If the base was moved, give its folder with --base-model.")
    refused(f"--base-model: there is no folder {other_base}", output, "--base-model", other_base)


def test_a_base_that_a_run_knows_by_its_weights_is_known_by_them(
    weights_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """As a run does that compares with the model that it began with."""
    base = shutil.copytree(weights_folder, tmp_path / "base")
    identity = models.identity
    with monkeypatch.context() as patch:
        patch.setattr(
            models, "identity", lambda path, revision, weights: identity(path, revision=revision, weights=True)
        )
        save_run(tmp_path / "run", base)
    assert run_cli(capsys, "export", tmp_path / "run", "--output", tmp_path / "model")[0] == 0
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    code, _, told = run_cli(capsys, "export", tmp_path / "run", "--output", tmp_path / "other")
    assert code == 2
    assert "is not the one that the run began with, by its fingerprint" in told


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_checkpoint_whose_base_was_moved_is_exported_with_its_new_folder(
    adapter: str, model_folder: Path, weights_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base = shutil.copytree(model_folder if adapter == "none" else weights_folder, tmp_path / "base")
    save_run(tmp_path / "run", base, adapter__type=adapter)
    assert run_cli(capsys, "export", tmp_path / "run", "--output", tmp_path / "before")[0] == 0
    moved = base.rename(tmp_path / "moved")
    command = ["export", tmp_path / "run", "--output", tmp_path / "after", "--base-model", moved]
    assert run_cli(capsys, *command)[0] == 0
    (weights,) = (path.name for path in (tmp_path / "before").glob("*.safetensors"))
    assert (tmp_path / "after" / weights).read_bytes() == (tmp_path / "before" / weights).read_bytes()
    if adapter == "lora":
        named = json.loads((tmp_path / "after" / "adapter_config.json").read_text())
        assert named["base_model_name_or_path"] == str(moved)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")], ids=repr)
def test_an_export_that_cannot_be_written_is_a_sentence_and_leaves_nothing(
    error: Exception,
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def save(model: PreTrainedModel, folder: Path, **_: Any) -> None:
        folder.mkdir()
        raise error

    save_run(tmp_path / "run", model_folder)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)
    code, _, told = run_cli(capsys, "export", tmp_path / "run", "--output", tmp_path / "new")
    assert code == 2
    assert f"new could not be written ({error}); free some space" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_an_export_runs_no_code_of_the_model_even_if_the_run_did(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base = shutil.copytree(model_folder, tmp_path / "base")
    save_run(tmp_path / "run", base, model__trust_remote_code=True)
    config = json.loads((base / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Model"}}
    (base / "config.json").write_text(json.dumps(config))
    (base / "code.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')")
    code, _, told = run_cli(capsys, "export", tmp_path / "run", "--output", tmp_path / "new")
    assert code == 2
    assert told.startswith("error: ")
    assert not (tmp_path / "it ran").exists()
    assert not (tmp_path / "new").exists()


def test_an_exported_model_answers_as_its_base_was_meant_to(model_folder: Path, tmp_path: Path):
    base = shutil.copytree(model_folder, tmp_path / "base")
    said = {"eos_token_id": [1, 5], "do_sample": True, "temperature": 0.7, "repetition_penalty": 1.05}
    (base / "generation_config.json").write_text(json.dumps(said))
    save_run(tmp_path / "run", base)
    export(tmp_path / "run", tmp_path / "new")
    found = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert found.items() >= said.items()
