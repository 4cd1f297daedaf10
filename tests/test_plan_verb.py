"""`finetune plan` as a user meets it: 80 columns, JSON, pictures, sentences for what is wrong, and no slow import.

Steps are arithmetic (``plan_models``) but where a test is about what is traced.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_models import config_named
from thinning import thinned

from finetune import __version__
from finetune.cli import commands
from finetune.config.command_line import parse
from finetune.config.strategy_names import SHARDED_PARTS, SIZES, STRATEGIES, TOGETHER
from finetune.planner.memory import PARTS
from finetune.trace.setting import Setting
from recipes.sft import Config

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("arithmetic_steps")
SLOW = ("torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "numpy", "matplotlib")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path, config_named("llama-3.1-8b"))


def write_model(folder: Path, config: dict[str, Any]) -> str:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return str(folder / "model")


def run(*arguments: str) -> int:
    return commands.main(["plan", *arguments])


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    run(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def command_in(text: str) -> list[str]:
    lines = text[text.index("accelerate launch") :].split("\n\n")[0]
    return lines.replace("\\\n", " ").split()


@pytest.mark.parametrize(
    "asked",
    thinned(
        [
            "--gpus 8xH100 --tokens 5e9 --all",
            "--gpus 1xT4 --all",
            "--gpus 8x8xH200 --row-tokens 32768 --method full",
            "--gpus 1x12GB --method full --strategy single",
        ],
        ["--gpus 8x80GB", "--gpus 8xH200 --method full", "--gpus 2xL40S --host-memory 256 --disk 400 --all"],
    ),
)
def test_answer_is_at_most_80_columns_wide(asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = write_model(tmp_path, config_named("llama-3.1-70b" if "H200" in asked else "llama-3.1-8b"))
    run("--model", model, *asked.split())
    lines = capsys.readouterr().out.splitlines()
    own = [line for line in lines if str(tmp_path) not in line]  # a long path is not broken, so that it can be copied
    assert len(own) > 8
    assert max(map(len, own)) <= 80
    assert any("not measured" in line for line in lines)


def test_table_and_command_say_what_was_chosen(model: str, capsys: pytest.CaptureFixture[str]):
    assert run("--model", model, "--gpus", "8xH100", "--method", "lora") == 0
    text = capsys.readouterr().out
    marked = [line.split() for line in text.splitlines() if line.startswith(">")]
    assert len(marked) == 2  # memory, and the rest
    chosen = answer(capsys, "--model", model, "--gpus", "8xH100", "--method", "lora")
    row = chosen["rows"][chosen["recommended"]]
    assert marked[0][1:5] == [row["strategy"], "LoRA", "none", str(row["micro_batch_size"])]
    words = command_in(text)
    assert words[:2] == ["accelerate", "launch"]
    config = parse(Config, words[words.index("recipes/sft.py") + 1 :])
    assert config.model.path == model
    assert config.adapter.type == "lora"
    assert config.train.micro_batch_size == row["micro_batch_size"]


def test_bf16_weights_that_nobody_asked_for_are_marked_explained_and_in_the_command(
    model: str, capsys: pytest.CaptureFixture[str]
):
    asked = ["--model", model, "--gpus", "1xH100", "--method", "full"]
    assert run(*asked) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^> single +full\* ", text, re.M)) == 2
    assert "*: with train.weights bf16." in " ".join(text.split())
    words = command_in(text)
    assert parse(Config, words[words.index("recipes/sft.py") + 1 :]).train.weights == "bf16"
    chosen = answer(capsys, *asked, "--train.weights", "fp32_master", "--train.optimizer", "adamw")
    assert {(row["weights"], row["optimizer"]) for row in chosen["rows"]} == {("fp32_master", "adamw")}
    assert "Leave out train.weights and train.optimizer" in chosen["reason"]


def test_what_does_not_fit_is_shown_when_asked_for(model: str, capsys: pytest.CaptureFixture[str]):
    run("--model", model, "--gpus", "1x24GB", "--method", "full")
    assert not re.search(r"^. single", capsys.readouterr().out, re.M)
    run("--model", model, "--gpus", "1x24GB", "--method", "full", "--all")
    assert re.search(r"^. single .* no", capsys.readouterr().out, re.M)


def test_exit_code_is_1_and_the_nearest_is_named_where_nothing_fits(model: str, capsys: pytest.CaptureFixture[str]):
    assert run("--model", model, "--gpus", "1x24GB", "--method", "full", "--strategy", "single") == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "The nearest option that fits is " in text
    assert "adapter.type to lora" in text
    assert "accelerate launch" not in text


def test_json_has_every_part_and_its_schema_is_stable(model: str, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "--model", model, "--gpus", "8xH100", "--tokens", "1e9")
    assert set(found) == {
        "schema",
        "finetune",
        "measured",
        "model",
        "parameters",
        "active_parameters",
        "machines",
        "world_size",
        "speed_of",
        "global_batch_size",
        "row_tokens",
        "mean_document_tokens",
        "epoch_tokens",
        "rows",
        "impossible",
        "recommended",
        "reason",
        "command",
        "course",
        "nearest",
        "notes",
    }
    assert (found["schema"], found["finetune"], found["measured"]) == (1, __version__, False)
    assert found["parameters"] == 8_030_261_248
    fields = set(Setting.__dataclass_fields__)
    for row in found["rows"]:
        assert set(row) == fields | {
            "packing",
            "method",
            "verdict",
            "worst",
            "gpu_bytes",
            "gpu_peak_bytes",
            "gpu_phases",
            "gpu",
            "host",
            "disk",
            "relative_speed",
            "tokens_per_second",
            "mfu",
            "step_seconds",
            "step_seconds_by_part",
            "epoch_seconds",
            "transfers",
        }
        assert set(row["gpu_bytes"]) == set(PARTS)
        assert sum(row["gpu_bytes"].values()) == row["gpu_peak_bytes"] < row["gpu"]["needed_bytes"]
        assert row["epoch_seconds"] == pytest.approx(1e9 / row["tokens_per_second"])
        assert row["step_seconds"] == pytest.approx(sum(row["step_seconds_by_part"].values()))
    not_compared = {"single", "hsdp", "ep", "tp_pp", *TOGETHER, *SHARDED_PARTS}
    assert {row["strategy"] for row in found["rows"]} == set(STRATEGIES) - not_compared
    assert max(size for _, size in found["course"]) == found["rows"][found["recommended"]]["gpu_peak_bytes"]


@pytest.mark.parametrize("strategy", [*SHARDED_PARTS.values(), *SHARDED_PARTS])
def test_parts_of_a_model_are_planned_by_name_and_the_command_says_how_many_there_are(
    strategy: str, model: str, capsys: pytest.CaptureFixture[str]
):
    assert run("--model", model, "--gpus", "8xH100", "--strategy", strategy, "--method", "full") == 0
    words = command_in(capsys.readouterr().out)
    assert words[words.index("--config_file") + 1] == f"accelerate_configs/{strategy}.yaml"
    for size in SIZES[strategy]:
        assert words[words.index(f"--{size.key}") + 1] in ("2", "4", "8")
    found = answer(capsys, "--model", model, "--gpus", "8xH100", "--strategy", strategy, "--method", "full")
    assert {row["strategy"] for row in found["rows"]} == {strategy}


def test_speed_of_a_card_that_is_not_known_is_not_told_in_seconds(model: str, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "--model", model, "--gpus", "8x80GB", "--tokens", "1e9")
    for row in found["rows"]:
        assert row["tokens_per_second"] is row["mfu"] is row["step_seconds"] is row["epoch_seconds"] is None
        assert 0 < row["relative_speed"] <= 1
    assert found["speed_of"] == "H100"
    run("--model", model, "--gpus", "8x80GB", "--tokens", "1e9")
    text = capsys.readouterr().out
    assert "tokens/s" not in text
    assert "h/epoch" not in text


def test_configuration_decides_what_it_says_and_leaves_open_what_it_does_not(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    written: dict[str, Any] = {
        "model": {"path": model},
        "data": {"train": "x.jsonl", "max_length": 1024},
        "train": {"output_dir": "out", "global_batch_size": 32, "optimizer": "adamw_8bit"},
        "eval": {"every": 5},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written))
    config = ["--config", str(tmp_path / "run.yaml"), "--gpus", "4xH100"]
    found = answer(capsys, *config)
    assert {row["method"] for row in found["rows"]} == {"full"}
    assert {row["optimizer"] for row in found["rows"]} == {"adamw_8bit"}
    assert {row["row_tokens"] for row in found["rows"]} == {1024}
    assert len({row["micro_batch_size"] for row in found["rows"]}) > 1
    assert f"--config {tmp_path / 'run.yaml'}" in found["command"]
    fixed = answer(
        capsys, *config, "--train.micro_batch_size", "2", "--train.activation_checkpointing=full", "--adapter.type=lora"
    )
    kinds = {(row["micro_batch_size"], row["activation_checkpointing"], row["method"]) for row in fixed["rows"]}
    assert kinds == {(2, True, "LoRA")}
    assert "--adapter.type lora" in fixed["command"]
    some = answer(capsys, *config, "--train.micro_batch_size", "2", "--train.activation_checkpointing=3")
    assert {row["recomputed_layers"] for row in some["rows"]} == {3}
    assert "--train.activation_checkpointing 3" in some["command"]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_can_be_planned(path: Path, model: str, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "--config", str(path), "--model", model, "--gpus", "1xH200")
    assert len({row["method"] for row in found["rows"]}) == 1
    assert found["recommended"] == 0


def test_batch_of_a_bare_model_is_made_to_divide(model: str, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "--model", model, "--gpus", "3xH100")
    assert found["global_batch_size"] == 18
    assert "--train.global_batch_size 18" in found["command"]
    assert any("18 rows" in note for note in found["notes"])


def test_card_without_bf16_trains_in_fp16(model: str, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "--model", model, "--gpus", "4xV100-32GB", "--method", "qlora")
    assert {row["precision"] for row in found["rows"]} == {"fp16"}
    assert "--mixed_precision fp16" in found["command"]


def test_json_says_what_the_gpu_can_compute_and_a_plan_for_another_vendors_that_no_run_has_confirmed_it(
    model: str, capsys: pytest.CaptureFixture[str]
):
    for gpus, capability, bf16 in (("T4x2", [7, 5], False), ("A100x2", [8, 0], True), ("MI300Xx2", None, True)):
        found = answer(capsys, "--model", model, "--gpus", gpus, "--method", "lora", "--strategy", "ddp")
        assert (found["machines"]["gpu"]["compute_capability"], found["machines"]["gpu"]["bf16"]) == (capability, bf16)
        assert any("is not an NVIDIA GPU" in note for note in found["notes"]) == (capability is None)


def test_strategy_file_is_ours_until_it_asks_for_something_else(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ours = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())
    file = tmp_path / "fsdp2.yaml"
    file.write_text(yaml.safe_dump(ours | {"num_processes": 8, "machine_rank": 0}))
    asked = ["--model", model, "--gpus", "8xH100", "--method", "full", "--strategy", str(file)]
    assert {row["strategy"] for row in answer(capsys, *asked)["rows"]} == {"fsdp2"}
    file.write_text(yaml.safe_dump(ours | {"fsdp_config": {"fsdp_version": 1}}))
    assert run(*asked) == 2
    assert "differs from our fsdp2.yaml in fsdp_config" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["memory.png", "memory.svg"])
def test_picture_is_drawn(name: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    file = tmp_path / name
    assert run("--model", model, "--gpus", "1xH200", "--method", "qlora", "--plot", str(file)) == 0
    assert str(file) in capsys.readouterr().out
    assert file.read_bytes().startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    if name.endswith("svg"):
        written = set(re.findall(r"<!-- (\w+) -->", file.read_text()))
        assert {"forward", "backward", "weights", "optimizer", "activations"} <= written


def test_picture_without_matplotlib_is_a_sentence(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("--model", model, "--gpus", "1xH200", "--method", "qlora", "--plot", str(tmp_path / "a.png")) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


PROGRAM = """
import subprocess, sys
from finetune.cli import commands
if {is_known}:
    subprocess.Popen = None  # no child is started
try:
    commands.main(["plan", *{words!r}])
except SystemExit:
    pass
print(sorted(set({slow!r}) & set(sys.modules)), file=sys.stderr)
"""


def printed(words: list[str], environment: dict[str, str], *, is_known: bool) -> str:
    """What ``finetune plan`` prints, in a process that imports nothing slow.

    Args:
        is_known: and starts none.
    """
    code = PROGRAM.format(words=words, slow=SLOW, is_known=is_known)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr.strip() == "[]"
    return done.stdout


def test_help_imports_nothing_slow():
    assert "usage" in printed(["--help"], dict(os.environ), is_known=True)


@pytest.mark.slow
def test_question_is_traced_once_by_a_child_and_nothing_slow_is_imported_before_or_after(
    model_folder: Path, tmp_path: Path
):
    words = ["--model", str(model_folder), "--gpus", "1xH100", "--method", "full", "--strategy", "single"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    first = printed(words, environment, is_known=False)
    assert "accelerate launch" in first
    traces = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.json")}
    assert len(traces) == 2  # the model's anatomy, and its step
    assert printed(words, environment, is_known=True) == first
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.json")} == traces


def test_plan_of_half_a_download_says_that_a_run_would_be_refused(model: str, capsys: pytest.CaptureFixture[str]):
    asked = ["--model", model, "--gpus", "1xH100"]
    assert any("A run would be refused: " in note for note in answer(capsys, *asked)["notes"])
    (Path(model) / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert any("is a Git LFS pointer" in note for note in answer(capsys, *asked)["notes"])
    (Path(model) / "model.safetensors").unlink()
    assert answer(capsys, *asked, "--model.random_weights", "true")["notes"] == []
