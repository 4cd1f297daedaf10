"""The strategy meant by a name or a file. A file counts as ours if it requests the same as ours of that name."""

import difflib
from pathlib import Path
from typing import Any

import yaml

from finetune.config.strategy_names import STRATEGIES
from finetune.errors import InputError
from finetune.shipped import shipped_files

OF_A_LAUNCH = (
    "compute_environment",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "mixed_precision",
    "num_machines",
    "num_processes",
    "same_network",
)
"""Keys that set machines and precision, not the strategy."""


def strategy_named(name_or_file: str) -> str:
    """The name of a strategy, from its name or a file of ``accelerate_configs``.

    Raises:
        InputError: if it is not ours, or was changed in a key that affects memory or time.
    """
    if name_or_file in STRATEGIES:
        return name_or_file
    path = Path(name_or_file)
    if path.suffix not in (".yaml", ".yml") or path.stem not in STRATEGIES:
        close = difflib.get_close_matches(path.stem, STRATEGIES, n=1, cutoff=0.75)
        meant = f"did you mean {close[0]}? Otherwise " if close else ""
        raise InputError(f"--strategy: unknown strategy {name_or_file}; {meant}use one of {_all()}.")
    if not path.is_file():
        raise InputError(f"--strategy: there is no file {name_or_file}; give only the name, for example {path.stem}.")
    ours = _contents(shipped_files() / "accelerate_configs" / f"{path.stem}.yaml")
    theirs = _contents(path)
    if differing := sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)):
        raise InputError(
            f"--strategy: {name_or_file} differs from our {path.stem}.yaml in {', '.join(differing)}, which the "
            f"planner does not know; use one of {_all()}."
        )
    return path.stem


def _all() -> str:
    return ", ".join(STRATEGIES)


def _contents(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--strategy: {path} cannot be read as YAML; give a file of accelerate_configs/.") from error
    if not isinstance(values, dict):
        raise InputError(f"--strategy: {path} has no keys; give a file of accelerate_configs/.")
    return {key: value for key, value in values.items() if key not in OF_A_LAUNCH}
