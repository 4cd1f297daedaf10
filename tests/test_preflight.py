"""One preflight: what a run refuses, ``finetune data`` and ``finetune plan`` refuse in the same words."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scenarios
import tiny
import yaml

from finetune.cli import commands
from finetune.errors import InputError
from finetune.models.recomputation import recompute_activations
from finetune.run import model_setup, session
from finetune.trace.setting import Setting
from finetune.trace.tracer import Tracer
from recipes import sft

pytestmark = pytest.mark.planned


@pytest.fixture
def short_model(tmp_path: Path) -> Path:
    """A model of 64 positions."""
    folder = tiny.build_model_folder(tmp_path / "short")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused_by_run(config: Any) -> str:
    with pytest.raises(InputError) as error:
        sft.main(config)
    return str(error.value)


def written(config: Any, folder: Path) -> str:
    """The configuration as a file."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    return str(path)


REFUSED = {
    "packed rows without bounds": {"data__packing": True, "model__attention": "eager"},
    "micro-batches that do not fit": {"train__global_batch_size": 8, "train__micro_batch_size": 3},
    "answers of which none is whole": {"eval__exact_match": True, "data__train_on": "all"},
    "an adapter that is not asked for": {"adapter__rank": 4},
    "questions without held-out rows": {"eval__prompts": 2, "data__eval": None},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_run_refuses_of_its_data_so_does_finetune_data(
    name: str,
    model_folder: Path,
    conversations: Path,
    held_out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    changes = {"data__eval": str(held_out)} | REFUSED[name]
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes)
    said = refused_by_run(config)
    capsys.readouterr()
    assert commands.main(["data", "--config", written(config, tmp_path), "--json"]) == 2
    shown = capsys.readouterr()
    assert said.splitlines()[0] in (json.loads(shown.out)["refusal"] if shown.out else shown.err)


@pytest.mark.slow
def test_rows_that_are_shorter_than_max_length_are_refused_by_nobody_for_it(
    short_model: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    short = tiny.write_conversations(tmp_path / "short.jsonl", rows=16, longest=3)
    config = scenarios.configuration(short_model, short, tmp_path / "run", data__max_length=4096, train__steps=1)
    sft.main(config)
    plan = ["plan", "--config", written(config, tmp_path), "--gpus", "1xH100"]
    assert commands.main(plan) == 0
    assert "Assuming rows of 64 tokens" in " ".join(capsys.readouterr().out.split())
    longer = {"data__max_length": 4096, "train__steps": 1, "train__overwrite": True}
    config = scenarios.configuration(
        short_model, tiny.write_conversations(tmp_path / "long.jsonl", 8, longest=40), tmp_path / "run", **longer
    )
    said = refused_by_run(config)
    assert "64 positions" in said
    capsys.readouterr()
    assert commands.main(["data", "--config", written(config, tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["refusal"] == said
    streamed = config.model_copy(update={"data": config.data.model_copy(update={"streaming": True})})
    assert commands.main(["plan", "--config", written(streamed, tmp_path), "--gpus", "1xH100"]) == 2
    assert "4,096 tokens, but the model has 64 positions" in capsys.readouterr().err


def test_eager_attention_is_planned_by_neither_planner(
    model_folder: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = scenarios.configuration(
        model_folder, conversations, tmp_path / "run", model__attention="eager", train__steps=1
    )
    sft.main(config)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan: none. ")]
    assert commands.main(["plan", "--config", written(config, tmp_path), "--gpus", "1xH100"]) == 2
    assert line.removeprefix("plan: none. ") in capsys.readouterr().err


def test_padding_is_told_where_the_planner_chooses_the_micro_batch(
    model_folder: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = {}
    for rows in ("auto", 8):
        config = scenarios.configuration(
            *(model_folder, conversations, tmp_path / "run"),
            train__global_batch_size=8,
            train__micro_batch_size=rows,
            model__attention="sdpa",
        )
        assert commands.main(["data", "--config", written(config, tmp_path), "--json"]) == 0
        found[rows] = json.loads(capsys.readouterr().out)
    assert found["auto"]["unpacked"]["padding"] == found[8]["unpacked"]["padding"] > 0.1
    assert found["auto"]["micro_batch_is_open"]
    assert not found[8]["micro_batch_is_open"]


def train_with_sizes(config: Any) -> tuple[int, int]:
    """As on unlike GPUs: only the second process is told to compute activations again."""
    rank = int(os.environ["RANK"])
    plan_of = session.plan_of

    def unlike(*args: Any) -> Any:
        planned = plan_of(*args)
        return replace(planned, sizes=replace(planned.sizes, recomputed_layers=None if rank == 1 else 0))

    with (
        mock.patch.object(session, "plan_of", unlike),
        mock.patch.object(model_setup, "recompute_activations", wraps=recompute_activations) as recompute,
    ):
        sft.main(config)
    return int(os.environ["WORLD_SIZE"]), recompute.call_count


def test_run_yaml_states_the_activation_checkpointing_that_ran_on_unlike_gpus(
    ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(
        model_folder, conversations, tmp_path / "run", train__steps=1, train__activation_checkpointing="auto"
    )
    assert ranks(2).run(train_with_sizes, config, strategy="ddp") == [(2, 1), (2, 1)]
    run = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert run["config"]["train"]["activation_checkpointing"] == "full"


@pytest.mark.slow
def test_layers_that_are_trained_whole_have_no_adapter_beside_them(model_folder: Path, tmp_path: Path):
    config = json.loads((model_folder / "config.json").read_text())
    setting = Setting(adapter="lora", rank=3, modules_to_save=("down_proj",), row_tokens=16)
    with Tracer(config, row_tokens=16, folder=tmp_path) as tracer:
        trained = tracer.step(setting).trained()
    layers, hidden, intermediate = (config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    assert trained[hidden, intermediate] == layers
    assert trained[3, hidden] == layers * 6  # every other linear layer reads hidden states
    assert (3, intermediate) not in trained
