"""What the processes of a launch must have in common. Compared when they have met, before weights load.

Each machine is launched by itself, with its own files, environment and clock. With other rows, another learning rate or
another version of a library on one of them, a run would train something that nobody asked for.
"""

import functools
import hashlib
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

import finetune
from finetune.checkpoint.resuming import INPUTS, by_key
from finetune.config import sections
from finetune.distributed import Strategy
from finetune.errors import refuse_if_any
from finetune.output import run_files

COPIES = frozenset(
    {"model.path", "model.revision", "model.tokenizer", "data.train", "data.eval", "data.chat_template", "adapter.from"}
)
"""Keys that name what is read. They may differ, since each machine may have copies in another place: what is read there
is compared."""
OF_CLOCKS_SECONDS = 5.0
"""By which clocks may differ without a word."""


@dataclass(frozen=True)
class Told:
    """What a process tells the others of itself."""

    name: str
    host: str
    inputs: Mapping[str, str | None]
    """Fingerprints of what it reads."""
    settings: Mapping[str, Any]
    """Of its configuration and its launch, by their keys."""
    versions: Mapping[str, str]


def agree(cfg: sections.Run, launch: Strategy, inputs: Mapping[str, str | None]) -> list[str]:
    """Compare this process with the others. Collective.

    Args:
        inputs: fingerprints of what this process reads.

    Returns:
        Lines on differences that do no harm.

    Raises:
        InputError: on those that do.
    """
    host = socket.gethostname()
    settings = {key: _comparable(key, value) for key, value in by_key(cfg.model_dump(mode="json", by_alias=True))}
    settings |= {"the strategy": launch.name, "--mixed_precision": launch.mixed_precision}
    settings |= {"the number of processes": launch.world_size, "the number of replicas": launch.replicas}
    settings |= {"the number of processes that compute a row": launch.context}
    settings |= {"the number of stages": launch.stages}
    settings |= {"the number of processes that share experts": launch.experts}
    settings |= {"the number of processes that split a layer": launch.tensor}
    known = run_files.environment()
    # without builds, such as +cpu, which go with a machine's hardware
    versions = {name: version.partition("+")[0] for name, version in known["packages"].items()}
    versions |= {"Python": known["python"], "finetune": f"{finetune.__version__} ({_hash_of_code()})"}
    told = Told(f"process {launch.rank} on {host}", host, dict(inputs), settings, versions)
    everyone = gather_object([told])
    refuse_if_any(problems(everyone))
    return clock_lines([(each.host, now) for each, now in zip(everyone, gather_object([time.time()]), strict=True)])


def problems(everyone: Sequence[Told]) -> list[str]:
    """How processes differ from the first, as sentences; each difference once, for the first process that has it."""
    first, found = everyone[0], dict[str, str]()
    for other in everyone[1:]:
        for key, what in (INPUTS | {"tasks": "eval.tasks: the rows"}).items():
            if first.inputs.get(key) != other.inputs.get(key):
                sentence = f"{what} of {other.name} are not those of {first.name}"
                found.setdefault(key, f"{sentence}; make the files the same on every machine.")
        for key, mine, theirs in _differing(first.settings, other.settings):
            sentence = f"{key} is {theirs!r} for {other.name} and {mine!r} for {first.name}"
            found.setdefault(key, f"{sentence}; start every machine with the same configuration and flags.")
        for key, mine, theirs in _differing(first.versions, other.versions):
            sentence = f"{key} is {theirs} for {other.name} and {mine} for {first.name}"
            found.setdefault(f"version of {key}", f"{sentence}; install the same on every machine.")
    return list(found.values())


def _comparable(key: str, value: Any) -> Any:
    """A setting without the names of files that it reads."""
    if isinstance(value, dict):  # a source, a stage or a task
        return {name: each for name, each in value.items() if name not in ("path", "data", "train")}
    if isinstance(value, list):
        return [_comparable(key, each) for each in value]
    return None if key in COPIES else value


@functools.cache  # what runs is what was imported
def _hash_of_code() -> str:
    files = sorted(Path(finetune.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs = [(key, mine.get(key, "missing"), theirs.get(key, "missing")) for key in dict.fromkeys([*mine, *theirs])]
    return [pair for pair in pairs if pair[1] != pair[2]]


def clock_lines(clocks: Sequence[tuple[str, float]]) -> list[str]:
    """What to say of the machines' clocks, which were read at about the same moment; nothing if they agree.

    Args:
        clocks: of each process, the name of its machine and its time in seconds.
    """
    (behind, earliest), (ahead, latest) = min(clocks, key=lambda each: each[1]), max(clocks, key=lambda each: each[1])
    if latest - earliest <= OF_CLOCKS_SECONDS:
        return []
    apart = f"the clock of {ahead} is {latest - earliest:,.0f} s ahead of that of {behind}"
    return [f"{apart}: times in logs and of files cannot be compared; training does not depend on them"]
