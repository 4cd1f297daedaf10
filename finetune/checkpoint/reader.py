"""Reads a checkpoint under any strategy and number of processes: each process reads the shards it holds."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from finetune.checkpoint import folder, manifest
from finetune.checkpoint.host_copy import CODES
from finetune.checkpoint.manifest import ANOTHER, Manifest, StoredTensor
from finetune.errors import InputError, refuse_if_any
from finetune.units import MIB

if TYPE_CHECKING:
    from finetune.distributed import Piece

READ_BYTES = 16 * MIB
AT_ONCE = 2**24
"""Elements that are read together."""
LISTED = 5
"""Tensors that a refusal names."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its manifest was read, and every file exists with the right size."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def contents(self) -> dict[str, Any]:
        """Metadata saved with the tensors."""
        return self.manifest.contents

    def names(self) -> list[str]:
        return sorted(self.manifest.tensors)

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors whose names begin with a prefix, by the rest of the name."""
        return {
            name.removeprefix(prefix): tuple(tensor.shape)
            for name, tensor in self.manifest.tensors.items()
            if name.startswith(prefix)
        }

    def damaged(self, rank: int = 0, world_size: int = 1) -> list[str]:
        """Files whose bytes changed since they were written, as sentences.

        Each file is verified by one process: the i-th by rank i modulo ``world_size``.
        """
        found = []
        for name in sorted(self.manifest.files)[rank::world_size]:
            path = self.path / name
            try:
                same = _checksum(path) == self.manifest.files[name].xxh3_128
            except OSError as error:
                found.append(f"{path} cannot be read ({error.strerror or error}); {ANOTHER}")
                continue
            if not same:
                found.append(f"{path} is damaged: its checksum differs; choose another checkpoint.")
        return found

    def problems(self, pieces: Iterable["Piece"]) -> list[str]:
        """Why these pieces cannot be filled from this checkpoint, as sentences. Neither reads nor changes values."""
        return _first([problem for piece in pieces if (problem := self._problem(piece))], self.path)

    def fill(self, pieces: Iterable["Piece"]) -> None:
        """Overwrite every piece with the values of the checkpoint.

        Reads only the elements of a piece, in parts. Pieces in a list are all checked before the first is overwritten;
        for other iterables call ``problems`` first.

        Raises:
            InputError: if tensors are missing or have another shape or dtype, or a file is damaged.
        """
        if isinstance(pieces, list | tuple):
            refuse_if_any(self.problems(pieces))
        with _Files(self.path) as files, torch.no_grad():
            for piece in pieces:
                refuse_if_any(self.problems([piece]))
                end = piece.begin + len(piece.values)
                tensor = self.manifest.tensors[piece.name]
                for begin, values in files.read(piece.name, tensor, piece.begin, end):
                    piece.values[begin - piece.begin : begin - piece.begin + len(values)].copy_(values)

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU; see ``tensors``."""
        return next(self.tensors([name]))[1]

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of whole tensors, on the CPU, one after the other.

        Raises:
            KeyError: if a name is unknown.
            InputError: if a file is damaged.
        """
        with _Files(self.path) as files:
            for name in names:
                tensor = self.manifest.tensors[name]
                whole = torch.empty(tensor.elements, dtype=getattr(torch, tensor.dtype))
                for begin, values in files.read(name, tensor, 0, tensor.elements):
                    whole[begin : begin + len(values)] = values
                yield name, whole.view(tensor.shape)

    def _problem(self, piece: "Piece") -> str | None:
        stored = self.manifest.tensors.get(piece.name)
        if stored is None:
            return self._missing(piece.name)
        if stored.shape != list(piece.shape):
            return f"{piece.name} has shape {stored.shape}, but {list(piece.shape)} in this run"
        if (here := str(piece.values.dtype).removeprefix("torch.")) != stored.dtype:
            return f"{piece.name} is stored as {stored.dtype}, but {here} in this run"
        return None

    def _missing(self, name: str) -> str:
        bare = name.split("@")[0]
        others = [other for other in self.manifest.tensors if other.split("@")[0] == bare]
        if not others:
            return f"{name} is missing"
        launch = others[0].partition("@")[2].rsplit(", shard", 1)[0]
        return f"{bare}: its 8-bit state was cut into blocks at other elements{f' by {launch}' if launch else ''}"


def newest(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint of a run, by manifest and file sizes.

    Args:
        run: output folder of a run.

    Returns:
        The checkpoint, None if there is none; and a sentence for each newer one that was skipped.
    """
    return _newest_in(folder.checkpoints_of(run))


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder, or the newest complete checkpoint of a run's folder or its ``checkpoints``.

    Raises:
        InputError: if there is none, or it is not complete.
    """
    if not path.is_dir():
        raise InputError(f"There is no folder {path}; give the folder of a checkpoint, or the output folder of a run.")
    if (path / manifest.NAME).is_file() or folder.STEP.fullmatch(path.name):
        return Checkpoint(path, manifest.read(path))
    found, passed_over = _newest_in(checkpoints_in(path))
    if found is None:
        raise InputError(
            [f"{path} has no complete checkpoint; give the folder of a checkpoint or of a run.", *passed_over]
        )
    return found


def open_all(path: Path) -> tuple[list[Checkpoint], list[str]]:
    """Every complete checkpoint of a run, or the named one; and a sentence for each incomplete one.

    Raises:
        InputError: if there is no checkpoint.
    """
    if not path.is_dir():
        raise InputError(f"There is no folder {path}; give the folder of a checkpoint, or the output folder of a run.")
    named = (path / manifest.NAME).is_file() or folder.STEP.fullmatch(path.name)
    found, problems = [], []
    for entry in [path] if named else folder.in_place(checkpoints_in(path)):
        try:
            found.append(Checkpoint(entry, manifest.read(entry)))
        except InputError as error:
            problems += error.problems
    if not found and not problems:
        raise InputError(f"{path} has no checkpoint; give the folder of a checkpoint or of a run.")
    return found, problems


def checkpoints_in(path: Path) -> Path:
    """The checkpoints folder of a path: that of a run, or the path itself."""
    inner = folder.checkpoints_of(path)
    return inner if inner.is_dir() else path


def _newest_in(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    passed_over: list[str] = []
    for path in folder.in_place(checkpoints):
        try:
            return Checkpoint(path, manifest.read(path)), passed_over
        except InputError as error:
            passed_over += error.problems
    return None, passed_over


def _first(problems: list[str], path: Path) -> list[str]:
    """One sentence for many tensors, which usually have the same problem."""
    if not problems:
        return []
    more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    advice = "use the model, adapter and optimizer of that run"
    if any("cut into blocks" in problem for problem in problems):
        advice = "use the launch that wrote it, or set checkpoint.resume_weights_only true"
    return [f"The checkpoint {path} does not fit this run: {'; '.join(problems[:LISTED])}{more}. To resume, {advice}."]


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file, ThreadPoolExecutor(1) as beside:
        digested = beside.submit(digest.update, b"")
        while data := file.read(READ_BYTES):
            digested.result()
            digested = beside.submit(digest.update, data)
        digested.result()
    return digest.hexdigest()


class _Files(ExitStack):
    """The files of a checkpoint, opened on demand."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.open: dict[str, Any] = {}

    def read(self, name: str, tensor: StoredTensor, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements begin..end of a tensor: number of the first, and values, a part at a time.

        Raises:
            InputError: if a file does not match the manifest.
        """
        for file, first, last in tensor.stretches:
            low, high = max(begin, first), min(end, last)
            if low >= high:
                continue
            stored = self._stretch(file, name, tensor.dtype, last - first)
            for at in range(low, high, AT_ONCE):
                yield at, stored[at - first : min(at + AT_ONCE, high) - first]

    def _stretch(self, file: str, name: str, dtype: str, elements: int) -> Any:
        path = self.path / file
        try:
            if file not in self.open:
                self.open[file] = self.enter_context(safe_open(path, framework="pt"))
            stored = self.open[file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read ({error}); {ANOTHER}") from error
        found = (stored.get_dtype(), stored.get_shape())
        if found != (CODES[getattr(torch, dtype)], [elements]):
            raise InputError(f"{path} does not contain {name} as its manifest says ({found}); {ANOTHER}")
        return stored
