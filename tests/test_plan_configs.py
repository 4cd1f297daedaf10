"""Shipped configurations fit the GPUs that their first lines name, by the command that stands there."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from plan_models import config_named

from finetune.cli import commands

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(r"^# It fits by `finetune (plan [^`]+)`,$", re.M)
NAMING = {
    str(path.relative_to(ROOT)): found[1]
    for path in sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))
    if (found := COMMAND.search(path.read_text()))
}


def test_every_configuration_for_a_gpu_names_one():
    assert len(NAMING) == 12
    for_a_gpu = [
        path
        for path in (ROOT / "recipes" / "configs").rglob("*.yaml")
        if re.search(r"^#.* GPU", path.read_text(), re.M)
    ]
    assert {str(path.relative_to(ROOT)) for path in for_a_gpu} == set(NAMING)


def verdicts(path: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Of the rows that answer the command in a configuration's first lines."""
    words = shlex.split(NAMING[path])
    assert words[words.index("--config") + 1] == path
    model = yaml.safe_load(Path(path).read_text())["model"]["path"]
    published = config_named(model.split("/")[1].lower().replace("-instruct", ""))
    (folder / "config.json").write_text(json.dumps(published))
    assert commands.main([*words, "--model", str(folder), "--json"]) == 0
    return [row["verdict"] for row in json.loads(capsys.readouterr().out)["rows"]]


@pytest.mark.parametrize("path", NAMING)
def test_configuration_fits_the_gpus_that_it_names(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    assert verdicts(path, tmp_path, capsys) == ["fits"]


def test_pretraining_of_12_billion_weights_is_planned_on_six_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    words = "plan --config recipes/configs/geniac_12b.yaml --gpus 6x8xH100 --strategy fsdp2 --json"
    assert commands.main(words.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in answer["rows"]] == ["fits"]
    assert "recipes/pretrain.py" in answer["command"]
