"""Ask the hub for what a command names before the verb is imported: PyTorch and transformers take seconds.

Without a network a command then ends within five seconds. What is wrong otherwise is left to the verb, which knows
more, and asks again for each file that it needs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from finetune.hub_access import is_hub_id, refuse_without_access

ADAPTER = "adapter_config.json"


def ask_for_model(path: str, revision: str | None = None, instead: str | None = None) -> None:
    """Ask for a model, if it is an id on the hub. One without an owner may be a folder that is missing: the verb knows.

    Args:
        instead: what else can be given; None for the folder of a model.

    Raises:
        InputError: if the hub denies it, or does not answer and the cache does not have it.
    """
    if is_hub_id(path):
        refuse_without_access(path, "config.json", revision=revision, instead=instead)


def ask_for_result(path: str, base_model: str | None = None) -> None:
    """Ask for a model, or for the base of an adapter: that of a run, or in a folder of its own.

    Args:
        base_model: which is not the one that the adapter names.

    Raises:
        InputError: if the hub denies it, or does not answer and the cache does not have it.
    """
    ask_for_model(path)
    folder = next((each for each in (Path(path), Path(path) / "final") if (each / ADAPTER).is_file()), None)
    named = {} if folder is None else _read(folder / ADAPTER)
    base = base_model or named.get("base_model_name_or_path")
    if folder is not None and isinstance(base, str):
        revision = named.get("revision") if base_model is None else None
        ask_for_model(base, revision, instead="its folder with --base-model")


def ask_for_data(entries: Any) -> None:
    """Ask for the datasets among the sources of data, as a configuration names them.

    Raises:
        InputError: if the hub denies one, or does not answer and the cache does not have it.
    """
    from finetune.data.sources.names import is_hub_dataset, named_sources

    for source in named_sources(entries):
        if is_hub_dataset(source.path):
            refuse_without_access(source.path, "README.md", kind="dataset", revision=source.revision)


def ask_for_held_out(path: str) -> None:
    """Ask for the datasets that a run held out.

    Raises:
        InputError: if the hub denies one, or does not answer and the cache does not have it.
    """
    data = _section(Path(path), "data")
    held_out = data.get("train" if isinstance(data.get("eval"), float) else "eval")
    entries = held_out if isinstance(held_out, list) else [held_out]
    known = [
        {key: entry[key] for key in ("path", "revision") & entry.keys()} for entry in entries if isinstance(entry, dict)
    ]
    named = [entry for entry in known if isinstance(entry.get("path"), str)]
    ask_for_data([*named, *(entry for entry in entries if isinstance(entry, str))])


def ask_for_run(arguments: Sequence[str]) -> None:
    """Ask for the model and the data of a configuration.

    Args:
        arguments: ``--config FILE`` and flags of the recipe.

    Raises:
        InputError: for a wrong configuration; if the hub denies something, or does not answer and the cache does not
            have it.
    """
    from finetune.config.command_line import parse
    from finetune.config.recipe_classes import CorpusRun, class_of

    run: Any = parse(class_of(arguments), arguments)
    ask_for_model(run.model.path, run.model.revision)
    if run.model.tokenizer is not None:
        ask_for_model(*run.model.tokenizer_source)
    stages = [stage.train for stage in run.data.stages] if isinstance(run, CorpusRun) else []
    for entries in (run.data.train, run.data.eval, *stages, [task.data for task in run.eval.tasks]):
        ask_for_data(entries)


def ask_for_trained(path: Path, base_model: str | None = None) -> None:
    """Ask for the model that a run began with, by its checkpoint or its output folder.

    Args:
        base_model: which is not where the run found it.

    Raises:
        InputError: if the hub denies it, or does not answer and the cache does not have it.
    """
    model = _section(path, "model") or _section(path.absolute().parent.parent, "model")
    base = base_model or model.get("path")
    if isinstance(base, str):
        revision = model.get("revision") if base_model is None else None
        ask_for_model(base, revision, instead="its folder with --base-model")


def _section(run: Path, name: str) -> dict[str, Any]:
    """Of the configuration that a run has recorded."""
    config = _read(run / "run.yaml").get("config")
    section = config.get(name) if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def _read(file: Path) -> dict[str, Any]:
    """The contents of a JSON or YAML file; nothing of one that the verb will refuse."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
