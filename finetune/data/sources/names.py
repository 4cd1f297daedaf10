"""What the name of a data source stands for: a file, a glob, a folder, or a dataset of the hub."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.sources.byte_stream import COMPRESSIONS
from finetune.errors import InputError

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
}
"""Kind of file by suffix."""
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_KNOWN = f"{', '.join(KINDS)}, each but Parquet also with {' or '.join(COMPRESSIONS)} behind it"


@dataclass(frozen=True)
class Source:
    """One entry of the configuration's training or held-out data."""

    path: str
    """A file, a glob (``**`` for any depth), a folder, or the id of a dataset on the hub, ``owner/name``."""
    weight: float = 1.0
    """Its share when sources are mixed; not used here."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset."""


def kind_of(path: str) -> str | None:
    """The kind of file that a name tells, ``None`` for one that is not known."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix in COMPRESSIONS:
        inner = KINDS.get(os.path.splitext(stem)[1])
        return None if inner == "parquet" else inner  # read from its end, so it would have to be unpacked first
    return KINDS.get(suffix)


def is_hub_id(path: str) -> bool:
    """Whether a name stands for a dataset of the hub: ``owner/name``, where there is no folder ``owner`` here, and
    neither a file nor named like one."""
    if os.path.exists(path) or os.path.isdir(path.partition("/")[0]):
        return False
    return kind_of(path) is None and _HUB_ID.fullmatch(path) is not None


def data_files(path: str) -> list[str]:
    """The data files that a name stands for, sorted; hidden files and those of other kinds are left out.

    Raises:
        InputError: if there is none, saying what was looked for.
    """
    if os.path.isfile(path):
        if kind_of(path) is None:
            raise InputError(f"{path}: the suffix tells no known kind of data file; known are {_KNOWN}.")
        return [path]
    if os.path.isdir(path):
        found = [p for p in Path(path).rglob("*") if not any(s.startswith(".") for s in p.relative_to(path).parts)]
        files = sorted(str(p) for p in found if kind_of(p.name) and p.is_file())
        if not files:
            raise InputError(f"{path}: the folder holds no data file; known kinds are {_KNOWN}.")
        return files
    if glob.has_magic(path):
        files = sorted(p for p in glob.glob(path, recursive=True) if kind_of(p) and os.path.isfile(p))
        if not files:
            raise InputError(
                f"{path}: no data file has a name like this; check the folder, and that the kind is {_KNOWN}."
            )
        return files
    raise InputError(
        f"{path}: there is no such data file or folder; check data.train and data.eval. "
        "A dataset of the hub is named owner/name."
    )


def problems(sources: Sequence[Source]) -> list[str]:
    """Sentences on the sources that cannot be read, before anything is loaded; the hub is not asked."""
    found = []
    for source in sources:
        if is_hub_id(source.path):
            continue
        try:
            data_files(source.path)
        except InputError as error:
            found += error.problems
            continue
        if source.subset is not None or source.split != "train":
            found.append(
                f"{source.path}: subset and split choose within a dataset of the hub, but this is a file; remove them."
            )
    return found


def extent(source: Source) -> Any:
    """What tells the content of a source from another's on any machine: sizes of its files in bytes, or its commit."""
    if is_hub_id(source.path):
        return identity([source])[0][-1]
    return [os.stat(file).st_size for file in data_files(source.path)]


def identity(sources: Sequence[Source]) -> list[Any]:
    """What changes when the content of the sources can have changed, as JSON values.

    Of each source its files: path as given, size in bytes, times of their last changes in ns (of content, and of
    content or name); of a hub dataset its id, subset, split and the commit that a load would take.

    Raises:
        InputError: if a source is missing, or the hub does not answer and holds no copy here.
    """
    known: list[Any] = []
    for source in sources:
        if is_hub_id(source.path):
            from finetune.data.sources.hub import commit

            known.append([source.path, source.subset, source.split, commit(source.path, source.subset)])
            continue
        stats = [(file, os.stat(file)) for file in data_files(source.path)]
        known.append([[file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for file, stat in stats])
    return known
