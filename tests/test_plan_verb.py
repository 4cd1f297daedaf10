"""`finetune plan` as a user meets it: 80 columns, JSON, pictures, sentences for what is wrong, and no slow import."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune import __version__
from finetune.cli import commands
from finetune.config.command_line import parse
from finetune.config.compatibility import STRATEGIES
from finetune.planner import traced
from finetune.planner.tape import KINDS
from finetune.trace.findings import Moment, Trace
from finetune.trace.setting import Setting
from recipes.sft import Config

CONFIGS = json.loads((Path(__file__).parent / "model_configs.json").read_text())
ROOT = Path(__file__).parent.parent
SLOW = ("torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "numpy", "matplotlib")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path, CONFIGS["llama-3.1-8b"]["config"])


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        "--gpus 8xH100 --tokens 5e9 --all",
        "--gpus 8x80GB",
        "--gpus 1xT4 --all",
        "--gpus 64x8xH200 --row-tokens 32768 --method full",
        "--gpus 8xH200 --method full",
        "--gpus 1x12GB --method full --strategy single",
        "--gpus 2xL40S --host-memory 256 --disk 400 --all",
    ],
)
def test_answer_is_at_most_80_columns_wide(asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = write_model(tmp_path, CONFIGS["llama-3.1-70b" if "H200" in asked else "llama-3.1-8b"]["config"])
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
        assert set(row["gpu_bytes"]) == set(KINDS)
        assert sum(row["gpu_bytes"].values()) == row["gpu_peak_bytes"] < row["gpu"]["needed_bytes"]
        assert row["epoch_seconds"] == pytest.approx(1e9 / row["tokens_per_second"])
        assert row["step_seconds"] == pytest.approx(sum(row["step_seconds_by_part"].values()))
    assert {row["strategy"] for row in found["rows"]} == set(STRATEGIES) - {"single", "hsdp"}
    assert max(size for _, size in found["course"]) == found["rows"][found["recommended"]]["gpu_peak_bytes"]


@pytest.mark.slow
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


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_can_be_planned(path: Path, model: str, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "--config", str(path), "--model", model, "--gpus", "1xH200")
    assert len({row["method"] for row in found["rows"]}) == 1
    assert found["recommended"] == 0


@pytest.mark.slow
def test_batch_of_a_bare_model_is_made_to_divide(model: str, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "--model", model, "--gpus", "3xH100")
    assert found["global_batch_size"] == 18
    assert "--train.global_batch_size 18" in found["command"]
    assert any("18 rows" in note for note in found["notes"])


def test_card_without_bf16_trains_in_fp16(model: str, capsys: pytest.CaptureFixture[str]):
    found = answer(capsys, "--model", model, "--gpus", "4xV100-32GB", "--method", "qlora")
    assert {row["precision"] for row in found["rows"]} == {"fp16"}
    assert "--mixed_precision fp16" in found["command"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--gpus 0xH100", "means no GPUs"),
        ("--gpus 8xH1000", "unknown GPU"),
        (
            "--gpus 1xH200 --row-tokens 200000 --data.streaming true",
            "the model has 131,072 positions; set data.max_length to 131072 or less",
        ),
        ("--gpus 8xH100 --global-batch-size 12", "set it to 8 or 16"),
        ("--gpus 2xH100 --train.micro_batch_size 3", "does not divide into micro-batches of 3 rows on 2 processes"),
        ("--gpus 8xH100 --strategy mine.yaml", "unknown strategy mine.yaml; use one of single, ddp"),
        ("--gpus 8xH100 --strategy zero4", "did you mean zero"),
        ("--gpus 8xH100 --strategy nowhere/ddp.yaml", "there is no file nowhere/ddp.yaml"),
        ("--gpus 8xH100 --strategy single", "single is for one GPU"),
        ("--gpus 6xH100 --global-batch-size 18 --strategy fsdp2 --method lora_8bit", "cannot shard the 8-bit layers"),
        ("--gpus 8xH100 --train.optimizer adafactor --strategy fsdp2", "Adafactor needs whole matrices"),
        ("--gpus 1xT4 --train.weights bf16", "computes in bf16"),
        ("--gpus 1xT4 --mixed-precision bf16", "T4 does not support bf16"),
        ("--gpus 1xH100 --trane.epochs 3", "Unknown flag --trane.epochs"),
        ("--gpus 1xH100 --tokens 0", "--tokens 0: must be above 0"),
        ("--gpus 1xH100 --document-tokens 4000", "do not fit into rows of 2048 tokens"),
        ("--gpus 1xH100 --plot picture.txt", "must end in .png, .svg or .pdf"),
        ("--gpus 1xH100 --adapter.targets [nothing] --method lora", "no linear layer nothing"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(
    arguments: str, sentence: str, model: str, capsys: pytest.CaptureFixture[str]
):
    assert run("--model", model, *arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "perceptron"}, "model_type is 'perceptron'; there are formulas for"),
        ({"model_type": "llama", "hidden_size": -1}, "hidden_size is -1"),
        ({"hidden_size": 64}, "model_type is None"),
    ],
)
def test_wrong_model_is_told_in_a_sentence(
    config: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("--model", write_model(tmp_path, config), "--gpus", "1xH100") == 2
    assert sentence in capsys.readouterr().err


def test_without_a_model_or_gpus_it_says_what_to_give(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert run("--gpus", "8xH100") == 2
    assert "give --config FILE, or --model" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert run("--model", model) == 2
    assert "name the GPUs, for example --gpus" in capsys.readouterr().err
    assert run("--model", model, "--gpus", "1xH100", "--probe") == 2


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
        assert {"forward", "backward"} <= set(re.findall(r"<!-- (\w+) -->", file.read_text()))


def test_picture_without_matplotlib_is_a_sentence(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("--model", model, "--gpus", "1xH200", "--method", "qlora", "--plot", str(tmp_path / "a.png")) == 2
    assert "finetune[notebooks]" in capsys.readouterr().err


@pytest.mark.slow
def test_trace_stands_beside_the_closed_form(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[Setting] = []
    nothing = Moment(0, {})
    categories = {"weights": 3 * 2**30, "weight_copies": 2**30, "temporaries": 2**30}
    peak = Moment(5 * 2**30, categories)
    found = Trace(peak, "loss", {"loss": peak}, nothing, nothing, 0, (), (), 7, 1.0)

    def trace(config: dict[str, Any], setting: Setting, *, rank: int) -> Trace:
        assert (config["num_hidden_layers"], rank) == (32, 3)
        asked.append(setting)
        return found

    monkeypatch.setattr(traced, "trace_in_child", trace)
    words = ["--model", model, "--gpus", "4xH200", "--method", "qlora", "--trace", "3"]
    run(*words)
    text = capsys.readouterr().out
    assert "as rank 3 of 4" in text
    assert re.search(r"weights +5\.\d+ +3\.000", text)
    assert re.search(r"activations +\d+\.\d+ +2\.000", text)
    record = answer(capsys, *words)
    row = record["rows"][record["recommended"]]
    assert [replace(each) for each in asked] == [asked[0]] * 2
    assert (asked[0].bits, asked[0].micro_batch_size) == (4, row["micro_batch_size"])
    ratio = sum(record["trace"]["predicted"].values()) / (5 * 2**30)
    assert record["trace"]["ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize("what", ["answer", "help"])
def test_closed_form_imports_nothing_slow(what: str, model: str):
    words = ["--help"] if what == "help" else ["--model", model, "--gpus", "8xH100", "--method", "full"]
    code = f"""
import sys
from finetune.cli import commands
try:
    commands.main(["plan", *{words!r}])
except SystemExit:
    pass
print(sorted(set({SLOW!r}) & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"
    assert "usage" in done.stdout if what == "help" else "accelerate launch" in done.stdout


@pytest.mark.slow
def test_plan_of_half_a_download_says_that_a_run_would_be_refused(model: str, capsys: pytest.CaptureFixture[str]):
    asked = ["--model", model, "--gpus", "1xH100"]
    assert any("A run would be refused: " in note for note in answer(capsys, *asked)["notes"])
    (Path(model) / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert any("is a Git LFS pointer" in note for note in answer(capsys, *asked)["notes"])
    (Path(model) / "model.safetensors").unlink()
    assert answer(capsys, *asked, "--model.random_weights", "true")["notes"] == []
