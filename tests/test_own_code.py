"""A model whose code comes with it trains, answers, is merged and exported where that is asked for by name."""

import json
from pathlib import Path

import pytest
import scenarios
import tiny
import transformers.dynamic_module_utils
from transformers import AutoModelForCausalLM

from finetune.cli.commands import main
from recipes import sft

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.build_model_folder(tmp_path_factory.mktemp("own") / "model")
    tiny.write_weights(folder)
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own-llama", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def run(base: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("own") / "run"
    changes = {"model__trust_remote_code": True, "adapter__type": "lora", "train__steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(output.parent / "modules"))
        sft.main(scenarios.configuration(base, conversations, output, **changes))
    return output


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the code are not left in the cache of who runs the tests."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize("verb", ["generate", "merge", "checkpoint export"])
def test_it_is_run_where_that_is_asked_for_and_nowhere_else(
    verb: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = ["--output", str(tmp_path / "new")] if verb != "generate" else ["what is 1 + 1?", "--max-new-tokens", "2"]
    command = [*verb.split(), str(run), *output]
    assert main(command) == 2
    assert "add --trust-remote-code" in capsys.readouterr().err
    assert main([*command, "--trust-remote-code"]) == 0
    if verb == "merge":
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "new", trust_remote_code=True)
        assert type(saved).__name__ == "OwnForCausalLM"


@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_a_whole_model_asks_for_it_as_well(verb: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "what is 1 + 1?", "completion": "2"}) + "\n")
    given = ["--data", str(tmp_path / "rows.jsonl")] if verb == "evaluate" else ["what is 1 + 1?"]
    command = [verb, str(base), *given, "--max-new-tokens", "2"]
    assert main(command) == 2
    assert "add --trust-remote-code" in capsys.readouterr().err
    assert main([*command, "--trust-remote-code"]) == 0
