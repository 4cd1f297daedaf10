"""What ``main`` of a recipe and ``finetune.train`` return; and several processes in a kernel that has trained."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scenarios

import finetune
from finetune.cli.commands import main
from finetune.config.command_line import to_yaml
from finetune.errors import InputError
from finetune.run import from_python
from recipes import dpo, sft

ROOT = Path(__file__).parent.parent
LORA = {"adapter__type": "lora", "train__steps": 3}


def lines_of(result: Any) -> list[dict[str, Any]]:
    return scenarios.read_metrics(result.folder)


@pytest.fixture(scope="module")
def result(weights_folder: Path, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a run with an adapter and held-out rows."""
    folder = tmp_path_factory.mktemp("runs") / "lora"
    return sft.main(scenarios.configuration(weights_folder, conversations, folder, data__eval=str(held_out), **LORA))


def test_metrics_are_the_lines_of_the_file_by_their_steps(result: Any):
    lines = lines_of(result)
    assert list(result.metrics.index) == [1, 2, 3]
    assert result.metrics["loss"].tolist() == [line["loss"] for line in lines]
    assert result.metrics["eval_loss"].dropna().to_dict() == {3: lines[-1]["eval_loss"]}


def test_metrics_before_the_first_step_are_an_empty_table_that_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MPLBACKEND", "agg")
    early = finetune.RunResult(tmp_path)
    assert early.metrics.index.name == "step"
    assert early.metrics["loss"].tolist() == []
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = early.plot()
    pyplot.close(axes.figure)
    assert [line.get_xydata().tolist() for line in axes.lines] == [[]]


def test_record_is_run_yaml_and_final_holds_the_adapter(result: Any):
    assert result.record["eval_loss"]["after"] == lines_of(result)[-1]["eval_loss"]
    assert (result.final / "adapter_config.json").is_file()


def test_answers_are_those_of_finetune_generate(result: Any, capsys: pytest.CaptureFixture[str]):
    prompts = ["the red house", "a tree"]
    answers = result.generate(prompts, system="sings", max_new_tokens=8)
    capsys.readouterr()
    for prompt, answer in zip(prompts, answers, strict=True):
        words = ["generate", str(result.folder), prompt, "--system", "sings", "--max-new-tokens", "8", "--json"]
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["answer"] == answer
    assert result.generate(prompts[0], system="sings", max_new_tokens=8) == answers[0]


def test_losses_are_drawn_with_the_one_before_training(result: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = result.plot()
    assert result.plot(axes, label="again") is axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    pyplot.close(axes.figure)
    before, after = (result.record["eval_loss"][key] for key in ("before", "after"))
    assert drawn["training"] == drawn["again"] == [[line["step"], line["loss"]] for line in lines_of(result)]
    assert drawn["training, held out"] == [[0, before], [3, after]]


def test_picture_without_matplotlib_is_a_sentence(result: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(InputError, match=r"plot\(\) needs matplotlib.*pip install"):
        result.plot()


def test_finished_run_that_is_resumed_returns_its_result(
    result: Any, weights_folder: Path, conversations: Path, held_out: Path
):
    again = {**LORA, "data__eval": str(held_out), "train__overwrite": False, "checkpoint__resume": "auto"}
    assert sft.main(scenarios.configuration(weights_folder, conversations, result.folder, **again)) == result


def test_train_is_the_recipe_with_a_file_and_the_keys_that_win_over_it(
    result: Any, weights_folder: Path, conversations: Path, held_out: Path, tmp_path: Path
):
    changes = {**LORA, "train__steps": 7}
    config = scenarios.configuration(weights_folder, conversations, tmp_path / "of the file", **changes)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    own = finetune.train(file, data={"eval": held_out}, train={"steps": 3, "output_dir": tmp_path / "own"})
    assert own == finetune.RunResult(tmp_path / "own")
    assert own.metrics["loss"].tolist() == result.metrics["loss"].tolist()


class FakeRecipe:
    Config = dpo.Config

    @staticmethod
    def main(cfg: dpo.Config) -> str:
        return f"trained {cfg.data.train}"


def test_train_finds_the_recipe_by_its_keys(weights_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sections: dict[str, Any] = {
        "model": {"path": weights_folder},
        "data": {"train": ["pairs.jsonl"]},
        "train": {"output_dir": tmp_path, "steps": 1},
    }
    asked = []
    monkeypatch.setattr(from_python, "_recipe", lambda script: asked.append(script) or FakeRecipe)
    assert finetune.train(**sections) == "trained ['pairs.jsonl']"
    assert finetune.train(dpo={"loss": "ipo"}, **sections) == "trained ['pairs.jsonl']"
    assert asked == ["recipes/sft.py", "recipes/dpo.py"]


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"train": 4}, "train: 4 is not a section; give a dictionary"),
        ({"train": {"learnin_rate": 1.0}}, "did you mean train.learning_rate"),
        ({"train": {"steps": object()}}, "train.steps: must be text, a number, true or false"),
        ({"train": {"steps": "many"}}, "train.steps: must be a valid integer, got 'many'"),
    ],
)
def test_what_train_cannot_take_is_a_sentence(sections: dict[str, Any], sentence: str):
    with pytest.raises(InputError) as error:
        finetune.train(**sections)
    assert sentence in str(error.value)


KERNEL = """
import sys

import finetune
from accelerate import notebook_launcher
from finetune.distributed.launch_environment import launched_as

file = sys.argv[1]
alone = finetune.train(file)


def together():
    finetune.train(file, train={"output_dir": sys.argv[2]})
    assert "bitsandbytes" not in sys.modules


with launched_as(sys.argv[3], 2, "no"):
    notebook_launcher(together, num_processes=2, use_port=sys.argv[4])
finetune.train(file, quantization={"bits": 4}, train={"output_dir": alone.folder.parent / "quantised", "steps": 1})
result = finetune.RunResult(alone.folder.parent / "together")
assert result.record["strategy"]["processes"] == 2, result.record["strategy"]
print(*(result.metrics["loss"] - alone.metrics["loss"]).abs())
"""


@pytest.mark.slow
def test_kernel_that_has_trained_an_adapter_starts_processes_with_notebook_launcher(
    weights_folder: Path, conversations: Path, tmp_path: Path
):
    """With the losses of one process; and weights can be quantised after it."""
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(scenarios.configuration(weights_folder, conversations, tmp_path / "alone", **LORA)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    strategy_file = ROOT / "accelerate_configs" / "fsdp2.yaml"
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, file, tmp_path / "together", strategy_file, port],
        cwd=ROOT,
        env=os.environ | {"ACCELERATE_MIXED_PRECISION": "no"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    differences = [float(word) for word in done.stdout.splitlines()[-1].split()]
    assert len(differences) == 3
    assert max(differences) < 1e-5
