"""Which recipe a configuration is for, by what only that recipe knows."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from finetune.config.dpo_section import Dpo
from finetune.config.sections import Run


class PairedRun(Run):
    """A run of ``recipes/dpo.py``."""

    dpo: Dpo = Dpo()


def class_of(arguments: Sequence[str]) -> type[Run]:
    """The class that a recipe's arguments are read with: ``PairedRun`` where they have a section or a flag of its own.

    Args:
        arguments: ``--config FILE`` and flags. A file that cannot be read is for the parser to refuse.
    """
    file = config_file(arguments)
    if any(word.startswith("--dpo.") for word in arguments):
        return PairedRun
    try:
        contents = None if file is None else yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return Run
    return PairedRun if isinstance(contents, dict) and "dpo" in contents else Run


def script_of(run: Run) -> str:
    """The recipe, as it is launched."""
    return f"recipes/{'dpo' if isinstance(run, PairedRun) else 'sft'}.py"


def config_file(arguments: Sequence[str]) -> str | None:
    """The file that ``--config`` names."""
    for place, word in enumerate(arguments):
        if word.startswith("--config="):
            return word.removeprefix("--config=")
        if word == "--config" and place + 1 < len(arguments):
            return arguments[place + 1]
    return None
