"""Shipped configurations fit the GPUs that their first lines name, by the command that stands there."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from finetune.cli import commands

ROOT = Path(__file__).parent.parent
CONFIGS = json.loads((Path(__file__).parent / "model_configs.json").read_text())
COMMAND = re.compile(r"^# It fits by `finetune (plan [^`]+)`,$", re.M)
NAMING = {
    str(path.relative_to(ROOT)): found[1]
    for path in sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))
    if (found := COMMAND.search(path.read_text()))
}


def test_every_configuration_for_a_gpu_names_one():
    assert len(NAMING) == 9
    for_a_gpu = [
        path
        for path in (ROOT / "recipes" / "configs").rglob("*.yaml")
        if re.search(r"^#.* GPU", path.read_text(), re.M)
    ]
    assert {str(path.relative_to(ROOT)) for path in for_a_gpu} == set(NAMING)


@pytest.mark.parametrize("path", NAMING)
def test_configuration_fits_the_gpus_that_it_names(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(ROOT)
    words = shlex.split(NAMING[path])
    assert words[words.index("--config") + 1] == path
    model = yaml.safe_load(Path(path).read_text())["model"]["path"]
    published = CONFIGS[model.split("/")[1].lower().replace("-instruct", "")]["config"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert commands.main([*words, "--model", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in answer["rows"]] == ["fits"]
