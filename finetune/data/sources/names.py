"""Resolve the name of a data source: a file, a glob, a folder, or a hub dataset."""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from finetune.data.sources.byte_stream import COMPRESSIONS
from finetune.errors import InputError
from finetune.hub_access import is_hub_id, missing_in_folder

KINDS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
}
"""Kind of file by suffix."""
_FOREIGN = (*COMPRESSIONS, ".gzip", ".zstd", ".bz2", ".xz", ".lzma", ".lz4", ".zip", ".7z", ".br", ".snappy")
"""Suffixes behind which another may say that a file holds data."""
_UNREADABLE = (".arrow", ".feather", ".orc", ".avro", ".tfrecord")
"""Suffixes of data in forms that are not read."""
_SPLITS = {"train": "train", "training": "train"} | dict.fromkeys(("valid", "validation", "val", "dev"), "validation")
_SPLITS |= dict.fromkeys(("test", "testing"), "test")
"""Splits by how names of files and folders begin."""
_MOST_SHOWN = 3
_KNOWN = f"{', '.join(KINDS)}, all but Parquet also compressed ({', '.join(COMPRESSIONS)})"


@dataclass(frozen=True)
class Source:
    """One entry of the configuration's training or held-out data."""

    path: str
    """A file, a glob (``**`` for any depth), a folder, or the id of a dataset on the hub, ``owner/name``."""
    weight: float = 1.0
    """Its share when sources are mixed; not used here."""
    subset: str | None = None
    """Configuration of a hub dataset."""
    split: str | None = None
    """Split of a hub dataset, if one is named."""
    revision: str | None = None
    """Commit, tag or branch of a hub dataset, if one is named."""

    @property
    def hub_split(self) -> str:
        """Split of a hub dataset that is read."""
        return self.split or "train"


def named_sources(entries: str | float | Iterable[str | Iterable[tuple[str, Any]]] | None) -> list[Source]:
    """Sources of a configuration: a string, or a list of strings and of objects with ``Source``'s fields.

    A fraction of the training rows in place of held-out sources gives no sources.
    """
    listed = [] if entries is None or isinstance(entries, float) else [entries] if isinstance(entries, str) else entries
    return [Source(entry) if isinstance(entry, str) else Source(**dict(entry)) for entry in listed]


def kind_of(path: str) -> str | None:
    """The kind of a file by its name, ``None`` if unknown."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix in COMPRESSIONS:
        inner = KINDS.get(os.path.splitext(stem)[1])
        return None if inner == "parquet" else inner  # read from its end, so it would have to be unpacked first
    return KINDS.get(suffix)


def is_hub_dataset(path: str) -> bool:
    """Whether a name means a hub dataset: an id of the hub that does not look like a file."""
    return is_hub_id(path) and kind_of(path) is None


def _is_unreadable(path: str) -> bool:
    """Whether a file's name says that it holds data, in a form that is not read."""
    if kind_of(path) is not None:
        return False
    stem, suffix = os.path.splitext(path.lower())
    inner = os.path.splitext(stem)[1] if suffix in _FOREIGN else suffix
    return inner in _UNREADABLE or inner in KINDS


def _readable(path: str, found: Iterable[str]) -> list[str]:
    """Those that are data files, each once and sorted.

    Raises:
        InputError: if one of them holds data that cannot be read, or has a name that is not UTF-8.
    """
    names = sorted(set(found))
    files = [name for name in names if (kind_of(name) or _is_unreadable(name)) and os.path.isfile(name)]
    for name in files:
        _refuse_bad_name(name)
    if unreadable := [name for name in files if kind_of(name) is None]:
        more = len(unreadable) - _MOST_SHOWN
        shown = ", ".join(unreadable[:_MOST_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
        raise InputError(
            f"{path}: it holds data that cannot be read: {shown}; unpack or convert them, move them elsewhere, or name "
            f"the other files by a glob. Known suffixes are {_KNOWN}."
        )
    return files


def _refuse_bad_name(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise InputError(f"{shown}: the name of this file is not UTF-8; rename it.") from None


def _refuse_several_splits(folder: str, files: Sequence[str]) -> None:
    """A dataset as it lies on the hub has its test rows beside those for training."""
    splits: dict[str, str] = {}
    for file in files:
        parts = (re.split(r"[-_.]", part.lower())[0] for part in Path(file).relative_to(folder).parts)
        splits.setdefault(next((_SPLITS[part] for part in parts if part in _SPLITS), ""), file)
    if "train" in splits and (others := [split for split in splits if split not in ("", "train")]):
        train = os.path.relpath(splits["train"], folder)
        raise InputError(
            f"{folder}: the folder has rows for training and others for {' and '.join(others)} (such as {train} and "
            f"{os.path.relpath(splits[others[0]], folder)}); name the files of one split by a glob, such as "
            f"{folder.rstrip(os.sep)}/{_glob_of(train)}."
        )


def _glob_of(file: str) -> str:
    """For data/train-00000-of-00002.parquet data/train*.parquet; for train/a.jsonl train/*.jsonl."""
    folder, name = os.path.split(file)
    begin = "train" if name.lower().startswith("train") else ""
    return os.path.join(folder, f"{name[: len(begin)]}*{name[name.index('.', len(begin)) :]}")


def data_files(path: str) -> list[str]:
    """The data files of a name, sorted, each once; hidden files and those that hold no data are ignored.

    Raises:
        InputError: if there is none, saying what was looked for, or if one holds data that cannot be read.
    """
    _refuse_bad_name(path)
    if os.path.isfile(path):
        if kind_of(path) is None:
            raise InputError(f"{path}: unknown kind of data file; known suffixes are {_KNOWN}.")
        return [path]
    if os.path.isdir(path):
        files = _readable(path, _within(path))
        if not files:
            raise InputError(f"{path}: the folder contains no data file; known suffixes are {_KNOWN}.")
        _refuse_several_splits(path, files)
        return files
    if glob.has_magic(path):
        files = _readable(path, glob.glob(path, recursive=True))
        if not files:
            raise InputError(f"{path}: no data file matches; check the folder and the suffix ({_KNOWN}).")
        return files
    if kind_of(path) is None and (missing := missing_in_folder(path)):
        raise InputError(f"{path}: {missing}")
    raise InputError(
        f"{path}: there is no such data file or folder; check its name. A hub dataset is written as owner/name."
    )


def _within(folder: str) -> Iterator[str]:
    """Files in a folder and those in it, linked ones too, but for hidden ones.

    Raises:
        InputError: if a folder cannot be listed.
    """

    def refuse(error: OSError) -> NoReturn:
        raise InputError(
            f"{folder}: its folder {error.filename} cannot be read ({error.strerror}); check its permissions."
        ) from error

    seen = {os.path.realpath(folder)}  # a link may lead back
    for here, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        inside = {os.path.realpath(os.path.join(here, name)): name for name in sorted(folders) if name[0] != "."}
        folders[:] = [name for real, name in inside.items() if real not in seen]
        seen |= inside.keys()
        yield from (str(Path(here, name)) for name in files if name[0] != ".")


def problems(sources: Sequence[Source]) -> list[str]:
    """Why sources cannot be read, as sentences, before anything is loaded; the hub is not asked."""
    found = []
    for source in sources:
        if is_hub_dataset(source.path):
            continue
        try:
            data_files(source.path)
        except InputError as error:
            found += error.problems
            continue
        if any(each is not None for each in (source.subset, source.split, source.revision)):
            found.append(_not_of_the_hub(source.path))
    return found


def _not_of_the_hub(path: str) -> str:
    what = "a folder" if os.path.isdir(path) else "several files" if glob.has_magic(path) else "a file"
    folder = path.rstrip(os.sep) if os.path.isdir(path) else os.path.dirname(path) or "."
    return (
        f"{path}: subset, split and revision are for hub datasets, but this is {what}; remove them, and name "
        f"the files of a split by a glob, such as {folder}/data/train-*.parquet."
    )


def extent(source: Source) -> Any:
    """What identifies the content of a source on any machine: the sizes of its files in bytes, or its commit."""
    if is_hub_dataset(source.path):
        return identity([source])[0][-1]
    return [os.stat(file).st_size for file in data_files(source.path)]


def identity(sources: Sequence[Source]) -> list[Any]:
    """What changes whenever the content of the sources may have changed, as JSON values.

    Of each source its files: path as given, size in bytes, times of their last changes in ns (of content, and of
    content or name); of a hub dataset its id, subset, split and the commit that a load would take.

    Raises:
        InputError: if a source is missing, or the hub does not answer and there is no cached copy.
    """
    known: list[Any] = []
    for source in sources:
        if is_hub_dataset(source.path):
            from finetune.data.sources.hub import commit

            newest = commit(source.path, source.subset, source.revision)
            known.append([source.path, source.subset, source.hub_split, newest])
            continue
        stats = [(file, os.stat(file)) for file in data_files(source.path)]
        known.append([[file, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for file, stat in stats])
    return known
