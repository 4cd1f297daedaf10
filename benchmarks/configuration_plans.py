"""What `finetune plan` says of the recipe configurations, by the commands that stand in their first lines.

  python -m benchmarks.configuration_plans

writes the answers to benchmarks/results/configuration_plans.json, for the table in README.md. Predictions, which no GPU
has confirmed. `tests/test_plan_configs.py` fails where an answer has become another.
"""

import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import yaml

from finetune.cli import commands
from finetune.units import GIB

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "configuration_plans.json"
PUBLISHED = ROOT / "tests" / "model_configs.json"
COMMAND = re.compile(r"^# It fits by `finetune (plan [^`]+)`,$", re.M)
NAMING = {
    path.stem: shlex.split(found[1])
    for path in sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
    if (found := COMMAND.search(path.read_text(encoding="utf-8")))
}
"""The command of each configuration that names one, in words."""


def planned(name: str) -> dict[str, Any]:
    """The verdict on a configuration, and GiB of each GPU: ``needed``, and ``there``.

    Its model is one of tests/model_configs.json, so that no hub is asked. To be called in the repository's folder.

    Raises:
        AssertionError: if the command is about another file, or is refused.
    """
    words = NAMING[name]
    file = words[words.index("--config") + 1]
    assert Path(file).stem == name, f"{name}.yaml names {file}"
    path = yaml.safe_load(Path(file).read_text(encoding="utf-8"))["model"]["path"]
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    config = published[path.split("/")[1].lower().replace("-instruct", "")]["config"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert commands.main([*words, "--model", folder, "--json"]) == 0
    (row,) = json.loads(said.getvalue())["rows"]
    gpu = {key: round(row["gpu"][f"{key}_bytes"] / GIB, 1) for key in ("needed", "there")}
    return {"verdict": row["verdict"], "gpus": words[words.index("--gpus") + 1], **gpu}


def main() -> None:
    os.chdir(ROOT)
    answers = {name: planned(name) for name in NAMING}
    RESULTS.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
