"""The command line of ``finetune plan``: its own options, and the recipe flags they correspond to."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import InputError
from finetune.planner.question import METHODS


@dataclass(frozen=True)
class Options:
    """The verb's own options; None if not given."""

    gpus: str | None = None
    model: str | None = None
    row_tokens: int | None = None
    global_batch_size: int | None = None
    document_tokens: float | None = None
    method: str | None = None
    """A name of ``METHODS``, or all."""
    strategy: str | None = None
    mixed_precision: str | None = None
    tokens: float | None = None
    host_memory: float | None = None
    """GiB of one machine."""
    disk: float | None = None
    """GiB of disk space for checkpoints."""
    links: Path | None = None
    """A file of ``finetune links``."""


def problems(options: Options) -> list[str]:
    """Invalid numbers, as sentences."""
    numbers = {
        "--row-tokens": options.row_tokens,
        "--global-batch-size": options.global_batch_size,
        "--document-tokens": options.document_tokens,
        "--tokens": options.tokens,
        "--host-memory": options.host_memory,
        "--disk": options.disk,
    }
    return [
        f"{name} {number:g}: must be above 0; change it, or leave it out."
        for name, number in numbers.items()
        if number is not None and not 0 < number < float("inf")
    ]


def given_flags(arguments: Sequence[str], options: Options) -> dict[str, str]:
    """Flags of the recipe that the verb's options stand for; without a configuration, also what it would need."""
    named = [word.split("=")[0] for word in arguments]
    flags: dict[str, str] = {}
    if options.model is not None:
        flags["model.path"] = options.model
        for key, value in (("data.train", "YOUR_DATA.jsonl"), ("train.output_dir", "runs/planned")):
            if "--config" not in named and f"--{key}" not in named:
                flags[key] = value
    elif "--config" not in named and "--model.path" not in named:
        raise InputError(
            "Nothing to plan; give a configuration (FILE.yaml), or a model: its folder, its config.json or its hub id."
        )
    if options.row_tokens is not None:
        flags["data.max_length"] = str(options.row_tokens)
    if options.global_batch_size is not None:
        flags["train.global_batch_size"] = str(options.global_batch_size)
    return flags


def contradictions(arguments: Sequence[str], options: Options) -> list[str]:
    """The verb's options and flags of the recipe that say different things, as sentences."""
    written = _written(arguments)
    said: dict[tuple[str, Any], dict[str, Any]] = {
        ("--row-tokens", options.row_tokens): {"data.max_length": options.row_tokens},
        ("--global-batch-size", options.global_batch_size): {"train.global_batch_size": options.global_batch_size},
        ("--model", options.model): {"model.path": options.model},
    }
    if options.method in METHODS:
        adapter, bits = METHODS[options.method]
        said["--method", options.method] = {"adapter.type": adapter, "quantization.bits": bits or "none"}
    return [
        f"{option} {value} and --{key} {written[key]} say different things; leave one of them out."
        for (option, value), keys in said.items()
        for key, meant in keys.items()
        if value is not None and key in written and written[key] != str(meant)
    ]


def words_of(flags: dict[str, str]) -> list[str]:
    return [word for key, value in flags.items() for word in (f"--{key}", value)]


def all_flags(arguments: Sequence[str], options: Options) -> dict[str, str]:
    """All flags of the recipe, for the command: those that were written, and those that options stand for."""
    flags = {**given_flags(arguments, options), **_written(arguments)}
    if "model.path" in flags:
        flags["model.path"] = _loadable(flags["model.path"])
    return {key: value for key, value in flags.items() if key != "config"}


def _written(arguments: Sequence[str]) -> dict[str, str]:
    """Flags of the recipe as they were written; the last of a name counts."""
    found: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            key, equals, value = word.removeprefix("--").partition("=")
            found[key] = value if equals else words.pop(0) if words and not words[0].startswith("--") else ""
    return found


def _loadable(path: str) -> str:
    """What a run can load where the planner was content with a config.json."""
    if not Path(path).is_file():
        return path
    return str(Path(path).parent) if Path(path).name == "config.json" else "YOUR_MODEL"
