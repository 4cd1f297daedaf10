"""``finetune.train``: a recipe's run from Python, in this process."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from yaml.representer import RepresenterError

from finetune.config.command_line import as_flag, parse
from finetune.config.recipe_classes import SCRIPTS, class_of
from finetune.errors import InputError
from finetune.run.run_result import RunResult
from finetune.shipped import shipped_files


def train(config: str | Path | None = None, **sections: Mapping[str, Any]) -> RunResult:
    """Train in this process as ``python recipes/... --config FILE`` does; the keys say which recipe it is.

    For example ``train("recipes/configs/sample.yaml", data={"train": "mine.jsonl"}, train={"steps": 100})``. Several
    processes are for ``accelerate launch``, or for ``notebook_launcher``, which calls this function on each of them.

    Args:
        config: the YAML file of a configuration.
        sections: keys by their section, which win over the file, as flags do.

    Raises:
        InputError: for wrong input, before weights load.
        RunStopped: if the run had to stop.
        RunInterrupted: after a signal, once a checkpoint is complete.
    """
    arguments = [] if config is None else ["--config", str(config)]
    for section, values in sections.items():
        if not isinstance(values, Mapping):
            raise InputError(f"{section}: {values!r} is not a section; give a dictionary of its keys.")
        arguments += [f"--{section}.{name}={_written(f'{section}.{name}', value)}" for name, value in values.items()]
    recipe = _recipe(SCRIPTS[class_of(arguments)])
    result: RunResult = recipe.main(parse(recipe.Config, arguments))
    return result


def _written(key: str, value: Any) -> str:
    try:
        return as_flag(str(value) if isinstance(value, Path) else value)
    except RepresenterError as error:
        raise InputError(
            f"{key}: must be text, a number, true or false, or a list of them, got {value!r}; change it."
        ) from error


def _recipe(script: str) -> ModuleType:
    """A recipe, which is a script beside the package or in it, as a module."""
    name = f"finetune_{Path(script).stem}"
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, shipped_files() / script)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
