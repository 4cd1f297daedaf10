"""Which recipe a configuration is for, by what only that recipe knows."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import yaml

from finetune.config.command_line import Loader
from finetune.config.dpo_section import Dpo
from finetune.config.pretrain_section import Budget, Corpus, Pretrain
from finetune.config.sections import Run


class PairedRun(Run):
    """A run of ``recipes/dpo.py``."""

    adapter_learning_rate: ClassVar[float] = 2e-5
    """Preferences are learnt from far smaller steps: TRL trains them at 1e-6, and adapters at ten times that."""
    dpo: Dpo = Dpo()


class CorpusRun(Run):
    """A run of ``recipes/pretrain.py``."""

    data: Corpus
    train: Budget
    pretrain: Pretrain = Pretrain()


SCRIPTS: dict[type[Run], str] = {
    PairedRun: "recipes/dpo.py",
    CorpusRun: "recipes/pretrain.py",
    Run: "recipes/sft.py",
}
"""The recipes as they are launched; the one that knows least comes last."""
OWN_VALUES: dict[type[Run], set[str]] = {CorpusRun: {"data.packing: concatenate"}}
"""Which one recipe alone knows, of keys that others have too."""


def class_of(arguments: Sequence[str]) -> type[Run]:
    """The class that a recipe's arguments are read with: the one that knows a section, a key or a value of its own
    among them.

    Args:
        arguments: ``--config FILE`` and flags. A file that cannot be read is for the parser to refuse.
    """
    file = config_file(arguments)
    try:
        contents = None if file is None else yaml.load(Path(file).read_text(encoding="utf-8"), Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        contents = None
    given, values = set[str](), dict[str, object]()
    for section, inside in contents.items() if isinstance(contents, dict) else ():
        given.add(section)
        values |= {f"{section}.{key}": value for key, value in inside.items()} if isinstance(inside, dict) else {}
    for word, following in zip(arguments, [*arguments[1:], ""]):
        if word.startswith("--"):
            key, _, value = word.removeprefix("--").partition("=")
            values[key] = value or following
    given |= {*values, *(f"{key}: {value}" for key, value in values.items())}
    return next((kind for kind in SCRIPTS if given & (_keys(kind) - _keys(Run) | OWN_VALUES.get(kind, set()))), Run)


def _keys(kind: type[Run]) -> set[str]:
    """Sections, and keys as ``section.key``."""
    sections = {name: field.annotation for name, field in kind.model_fields.items()}
    return {*sections, *(f"{name}.{key}" for name, section in sections.items() for key in section.model_fields)}  # type: ignore[union-attr]


def script_of(run: Run) -> str:
    """The recipe, as it is launched."""
    return next(script for kind, script in SCRIPTS.items() if isinstance(run, kind))


def config_file(arguments: Sequence[str]) -> str | None:
    """The file that ``--config`` names."""
    for place, word in enumerate(arguments):
        if word.startswith("--config="):
            return word.removeprefix("--config=")
        if word == "--config" and place + 1 < len(arguments):
            return arguments[place + 1]
    return None
