"""manifest.json: which file of a checkpoint has which elements of which tensor, and checksums to verify them.

Every tensor is flat: its elements are counted from 0 in row-major order, and each stretch ``[file, begin, end]`` says
which file has the elements begin..end. So a checkpoint reads the same whatever strategy and number of processes wrote
it. This module opens no tensor files.

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
    """Base of what is read from JSON: unknown keys are errors."""

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
    """What one process wrote, passed to the first process in a file beside it."""

    name: FileName
    file: StoredFile
    tensors: dict[str, OwnStretch]
    own: dict[str, Any]


class StoredTensor(Form):
    shape: list[Natural]
    """Of the whole tensor."""
    dtype: Dtype
    stretches: list[tuple[FileName, Natural, Natural]]
    """File, first element, and the element after the last; in order, without gaps."""

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
    """Metadata from the caller: configuration, versions, counters."""
    files: dict[FileName, StoredFile]
    tensors: dict[str, StoredTensor]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def text(self) -> str:
        """The text of the file, with its checksum."""
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
    """The contents as JSON returns them: keys are strings, tuples are lists.

    Raises:
        TypeError: if a value cannot be written as JSON.
    """
    as_read: dict[str, Any] = json.loads(json.dumps(contents))
    return as_read


def merged(
    parts: Iterable[Part], *, step: int, strategy: str, processes: int, written: str, contents: dict[str, Any]
) -> Manifest:
    """The manifest of a checkpoint from what every process wrote.

    Raises:
        RuntimeError: if the parts do not add up to whole tensors, or contradict each other.
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
            raise RuntimeError(f"the shards of {name} that the processes wrote do not cover it exactly once")
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
    """Merge two JSON values: dictionaries are merged, other values must be equal.

    Raises:
        RuntimeError: naming the value that differs.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: united(one[key], other[key], f"{what}.{key}") for key in one.keys() & other.keys()}
        return {**one, **other, **both}
    if one != other:
        raise RuntimeError(f"the processes disagree about {what}: {one!r} and {other!r}")
    return one


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files exist with the right sizes. Their checksums are not verified.

    Raises:
        InputError: if it is missing or was changed, or if files are missing; the sentence begins with the path.
    """
    path = folder / NAME
    if path.is_symlink() or not path.is_file():
        raise InputError(f"{folder} is not a complete checkpoint: {NAME} is missing; choose another one.")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}); {ANOTHER}") from error
    manifest = _checked(path, raw)
    if problem := _file_problem(folder, manifest):
        raise InputError(f"{folder} is not complete: {problem}; copy it again, or choose another one.")
    return manifest


ANOTHER = "copy the checkpoint again, or choose another one."


def _checked(path: Path, raw: Any) -> Manifest:
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not a checkpoint manifest; {ANOTHER}")
    if raw.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {raw.get('format')!r}, but this version of finetune reads format {FORMAT}; use the "
            "version that wrote it."
        )
    contents = {key: value for key, value in raw.items() if key != "checksum"}
    if raw.get("checksum") != checksum(contents):
        raise InputError(f"{path} was changed after it was written: its checksum differs; {ANOTHER}")
    try:
        manifest = Manifest.model_validate(contents)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path} is not a checkpoint manifest ({where}: {first['msg']}); {ANOTHER}") from error
    if len(manifest.files) != manifest.processes:
        raise InputError(
            f"{path} lists {len(manifest.files)} files for {manifest.processes} processes instead of one each; "
            f"{ANOTHER}"
        )
    for name, tensor in manifest.tensors.items():
        if unknown := [file for file, _, _ in tensor.stretches if file not in manifest.files]:
            raise InputError(f"{path} places elements of {name} in {unknown[0]}, which it does not list; {ANOTHER}")
        if tensor.untiled():
            raise InputError(f"{path} does not place each element of {name} exactly once; {ANOTHER}")
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
    """Files in a checkpoint folder that do not belong to it; they are never opened."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in {NAME, *manifest.files})
