"""A model's weight files and their headers. No weights are read here.

A header names each tensor with its shape. So a truncated, half downloaded or wrongly sized model is refused in
milliseconds, before data are prepared and long before weights load. No PyTorch is needed.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open

from finetune.errors import InputError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What transformers looks for, in this order."""
ADAPTER = "adapter_config.json"
LFS_POINTER = b"version https://git-lfs"


def local_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; all of them exist.

    Raises:
        InputError: if there are none, if a part is missing, if the index cannot be read or names files outside, or
            if the folder also has an adapter.
    """
    if (folder / ADAPTER).is_file():
        raise InputError(
            f"model.path: {folder} contains {ADAPTER} beside a model, and transformers would load both; merge "
            "them with "
            f"`finetune merge`, or move {ADAPTER} elsewhere."
        )
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    if not (folder / INDEX).is_file():
        raise InputError(_why_none(folder))
    files = [folder / name for name in parts(folder / INDEX)]
    if absent := [file.name for file in files if not file.is_file()]:
        raise InputError(
            f"model.path: {folder} lacks {first_of(absent)}, which {INDEX} lists: the download is incomplete. "
            "Download the model again."
        )
    return files


def parts(index: Path) -> list[str]:
    """Names of the files that an index lists, none of which leaves its folder.

    Raises:
        InputError: if one would, or the index cannot be read.
    """
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not names:
            raise ValueError("it lists no file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"model.path: {index} is not a valid index of weights ({type(error).__name__}: {error}); download it again."
        ) from error
    for name in names:
        path = PurePosixPath(str(name))
        if path.is_absolute() or ".." in path.parts or "\\" in str(name) or path.suffix != ".safetensors":
            raise InputError(
                f"model.path: {index} names {name!r}, but the parts of a model must be safetensors files in its own "
                "folder. Do not use this model unless you trust its source; if you do, correct the index."
            )
    return names


def shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor in these files.

    Raises:
        InputError: if a file is not a safetensors file, or is truncated.
    """
    found = {}
    for path in files:
        with opened(path, "numpy") as file:
            found.update({name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())})
    return found


@contextmanager
def opened(path: Path, framework: str) -> Iterator[Any]:
    """A safetensors file whose header matches its size.

    Raises:
        InputError: if it does not.
    """
    try:
        file = safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise InputError(_why_unreadable(path, error)) from error
    with file as readable:
        yield readable


def _why_none(folder: Path) -> str:
    if list(folder.glob("*.bin")):
        return (
            f"model.path: the folder {folder} only has pickle files as weights, which can run code when they are "
            "read; convert them to safetensors."
        )
    if others := sorted(file.name for file in folder.glob("*.safetensors")):
        return (
            f"model.path: the folder {folder} has {first_of(others)}, but neither {ONE_FILE} nor {INDEX}: the download "
            "is incomplete, or the model is not in transformers' format. Download the model again."
        )
    return (
        f"model.path: the folder {folder} has no weights ({ONE_FILE} or {INDEX}). Download the model again; or set "
        "model.random_weights to true to start from random weights."
    )


def _why_unreadable(path: Path, error: Exception) -> str:
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError as reason:
        return f"model.path: {path} cannot be read ({reason.strerror}); check its permissions."
    if is_pointer:
        return f"model.path: {path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder."
    return f"model.path: {path} is truncated or damaged ({error}); download it again."


def first_of(names: list[str], count: int = 3) -> str:
    """The first few names, and the number of the others."""
    rest = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
