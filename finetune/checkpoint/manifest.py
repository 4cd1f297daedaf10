"""manifest.json: which file of a checkpoint holds which elements of which tensor, and how to know that it is whole.

Every tensor is flat: its elements are counted from 0 in row-major order, and each stretch ``[file, begin, end]`` says
in which file elements begin..end lie. So a checkpoint reads the same whatever strategy and number of processes wrote
it. Nothing here opens a file of tensors.

Example: a weight of shape (5, 3) that two processes wrote under FSDP2 has the stretches
``["rank-00000-of-00002.safetensors", 0, 9]`` and ``["rank-00001-of-00002.safetensors", 9, 15]``. Under ZeRO-3 on two
processes, process 0 needs elements 0 to 7 and reads only the first file; process 1 needs 8 to 14 and reads both.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from finetune.errors import InputError

FORMAT = 1
NAME = "manifest.json"
FILE_NAME = r"^rank-[0-9]{5}-of-[0-9]{5}\.safetensors$"

Natural = Annotated[int, Field(ge=0)]
FileName = Annotated[str, Field(pattern=FILE_NAME)]
Dtype = Literal["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]


class Form(BaseModel):
    """What is read from JSON: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredFile(Form):
    bytes: Natural
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class OwnStretch(Form):
    """What one process wrote of a tensor."""

    shape: list[Natural]
    dtype: Dtype
    begin: Natural
    end: Natural


class Part(Form):
    """What one process wrote, told to the first process in a file beside it."""

    name: FileName
    file: StoredFile
    tensors: dict[str, OwnStretch]
    own: dict[str, Any]


class StoredTensor(Form):
    shape: list[Natural]
    """Of the whole tensor."""
    dtype: Dtype
    stretches: list[tuple[FileName, Natural, Natural]]
    """File, first element, and the one after the last; in order, without gaps."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def untiled(self) -> bool:
        """Whether the stretches do not cover every element once."""
        at = 0
        for _, begin, end in self.stretches:
            if begin != at or end <= begin:
                return True
            at = end
        return at != self.elements


class Manifest(Form):
    format: Literal[1] = 1
    step: Natural
    strategy: str
    processes: Annotated[int, Field(ge=1)]
    written: str
    """When, in ISO 8601."""
    contents: dict[str, Any]
    """What the caller gave: configuration, versions, counters."""
    files: dict[FileName, StoredFile]
    tensors: dict[str, StoredTensor]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def text(self) -> str:
        """As it stands in the file, with its checksum."""
        contents = self.model_dump()
        return canonical({**contents, "checksum": checksum(contents)})


def file_name(rank: int, world_size: int) -> str:
    """Name of the file that a process writes."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def canonical(value: Any) -> str:
    """JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def checksum(contents: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical(contents).encode())


def plain(contents: dict[str, Any]) -> dict[str, Any]:
    """As it will be read from JSON: keys are texts, tuples are lists.

    Raises:
        TypeError: if something cannot be written as JSON.
    """
    as_read: dict[str, Any] = json.loads(json.dumps(contents))
    return as_read


def merged(
    parts: Iterable[Part], *, step: int, strategy: str, processes: int, written: str, contents: dict[str, Any]
) -> Manifest:
    """The manifest of a checkpoint from what every process wrote.

    Raises:
        RuntimeError: if the parts do not give whole tensors, or contradict each other.
    """
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    for part in parts:
        files[part.name] = part.file
        contents = united(contents, part.own, "contents")
        for name, own in part.tensors.items():
            tensor = tensors.setdefault(name, StoredTensor(shape=own.shape, dtype=own.dtype, stretches=[]))
            if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
                raise RuntimeError(
                    f"the processes disagree about {name}: {tensor.dtype} {tensor.shape} and {own.dtype} {own.shape}"
                )
            tensor.stretches.append((part.name, own.begin, own.end))
    for name, tensor in tensors.items():
        tensor.stretches.sort(key=lambda stretch: stretch[1])
        if tensor.untiled():
            raise RuntimeError(f"the stretches of {name} that the processes wrote are not the whole of it, each once")
    return Manifest(
        step=step,
        strategy=strategy,
        processes=processes,
        written=written,
        contents=contents,
        files=files,
        tensors=tensors,
    )


def united(one: Any, other: Any, what: str) -> Any:
    """Two values of JSON as one: dictionaries are merged, all else must be equal.

    Raises:
        RuntimeError: naming what is not equal.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: united(one[key], other[key], f"{what}.{key}") for key in one.keys() & other.keys()}
        return {**one, **other, **both}
    if one != other:
        raise RuntimeError(f"the processes disagree about {what}: {one!r} and {other!r}")
    return one


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, whose files are there with their sizes. Their checksums are not looked at.

    Raises:
        InputError: if there is none, if it was changed, or if files are missing; a sentence that begins with the path.
    """
    path = folder / NAME
    if path.is_symlink() or not path.is_file():
        raise InputError(f"{folder} is no complete checkpoint, {NAME} is missing; name another one.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}); {ANOTHER}") from error
    manifest = _checked(path, raw)
    if problem := _file_problem(folder, manifest):
        raise InputError(f"{folder} is not complete: {problem}; copy it again, or name another one.")
    return manifest


ANOTHER = "copy the checkpoint again, or name another one."


def _checked(path: Path, raw: Any) -> Manifest:
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not the manifest of a checkpoint; {ANOTHER}")
    if raw.get("format") != FORMAT:
        raise InputError(
            f"{path} has the format {raw.get('format')!r}, and this version of finetune reads {FORMAT}; use the "
            "version that wrote it."
        )
    contents = {key: value for key, value in raw.items() if key != "checksum"}
    if raw.get("checksum") != checksum(contents):
        raise InputError(f"{path} was changed after it was written, its checksum is another one; {ANOTHER}")
    try:
        manifest = Manifest.model_validate(contents)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path} is not the manifest of a checkpoint ({where}: {first['msg']}); {ANOTHER}") from error
    if len(manifest.files) != manifest.processes:
        raise InputError(
            f"{path} names {len(manifest.files)} files of {manifest.processes} processes, not one each; {ANOTHER}"
        )
    for name, tensor in manifest.tensors.items():
        if unknown := [file for file, _, _ in tensor.stretches if file not in manifest.files]:
            raise InputError(f"{path} has elements of {name} in {unknown[0]}, which it does not list; {ANOTHER}")
        if tensor.untiled():
            raise InputError(f"{path} does not tell where each element of {name} lies, once; {ANOTHER}")
    return manifest


def _file_problem(folder: Path, manifest: Manifest) -> str | None:
    for name, file in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != file.bytes:
            return f"{name} has {size:,} bytes instead of {file.bytes:,}"
    return None


def foreign(folder: Path, manifest: Manifest) -> list[str]:
    """Names in a checkpoint's folder that do not belong to it; they are never opened."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in {NAME, *manifest.files})
