"""Shipped configurations fit the GPUs that their first lines name, by the command that stands there."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.configuration_plans import NAMING, RESULTS, planned
from finetune.cli import commands

ROOT = Path(__file__).parent.parent


def test_every_configuration_for_a_gpu_names_one():
    assert len(NAMING) == 12
    for_a_gpu = [
        path
        for path in (ROOT / "recipes" / "configs").rglob("*.yaml")
        if re.search(r"^#.* GPU", path.read_text(), re.M)
    ]
    assert {path.stem for path in for_a_gpu} == set(NAMING)


@pytest.mark.parametrize("name", NAMING)
def test_configuration_fits_the_gpus_that_it_names_by_as_much_as_the_readme_says(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    found = planned(name)
    assert found["verdict"] == "fits"
    assert found == json.loads(RESULTS.read_text())[name]


def test_pretraining_of_12_billion_weights_is_planned_on_six_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    words = "plan --config recipes/configs/geniac_12b.yaml --gpus 6x8xH100 --strategy fsdp2 --json"
    assert commands.main(words.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in answer["rows"]] == ["fits"]
    assert "recipes/pretrain.py" in answer["command"]
