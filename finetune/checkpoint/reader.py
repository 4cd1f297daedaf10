"""A checkpoint read back under any strategy and number of processes: each process reads the stretches it holds."""

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
    """A complete checkpoint: its manifest was read, and every file is there with its size."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def contents(self) -> dict[str, Any]:
        """What was saved beside the tensors."""
        return self.manifest.contents

    def names(self) -> list[str]:
        return sorted(self.manifest.tensors)

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors whose names begin so, by the rest of the name."""
        return {
            name.removeprefix(prefix): tuple(tensor.shape)
            for name, tensor in self.manifest.tensors.items()
            if name.startswith(prefix)
        }

    def damaged(self, rank: int = 0, world_size: int = 1) -> list[str]:
        """Files whose bytes are not those that were written, as sentences.

        Every file is looked at by one process: the i-th by that of rank i modulo ``world_size``.
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
                found.append(
                    f"{path} is damaged, its checksum is not the one that was written; name another checkpoint."
                )
        return found

    def problems(self, pieces: Iterable["Piece"]) -> list[str]:
        """Why these pieces cannot be filled from this checkpoint, as sentences. Reads and changes no values."""
        return _first([problem for piece in pieces if (problem := self._problem(piece))], self.path)

    def fill(self, pieces: Iterable["Piece"]) -> None:
        """Overwrite every piece with the values of the checkpoint.

        Only what a piece holds is read, in parts. Pieces that are given as a list are all checked before the first is
        overwritten; of others ask for ``problems`` before.

        Raises:
            InputError: for tensors that are missing, or have another shape or dtype; or for a damaged file.
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
            KeyError: if there is none of a name.
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
            return f"{piece.name} has the shape {stored.shape}, not {list(piece.shape)} as in this run"
        if (here := str(piece.values.dtype).removeprefix("torch.")) != stored.dtype:
            return f"{piece.name} is stored in {stored.dtype}, not in {here} as in this run"
        return None

    def _missing(self, name: str) -> str:
        bare = name.split("@")[0]
        others = [other for other in self.manifest.tensors if other.split("@")[0] == bare]
        if not others:
            return f"{name} is not in it"
        launch = others[0].partition("@")[2].rsplit(", process", 1)[0]
        return f"{bare}: its 8-bit state was cut into blocks at other places{f', by {launch}' if launch else ''}"


def newest(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint of a run, by manifest and sizes, to go on from.

    Args:
        run: output folder of a run.

    Returns:
        The checkpoint, None where there is none; and a sentence for each newer one that was passed over.
    """
    return _newest_in(folder.checkpoints_of(run))


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint: of its own folder, or the newest complete one of a run's folder or its ``checkpoints``.

    Raises:
        InputError: if there is none, or it is not complete.
    """
    if not path.is_dir():
        raise InputError(f"There is no folder {path}; give the folder of a checkpoint, or the output folder of a run.")
    if (path / manifest.NAME).is_file() or folder.STEP.fullmatch(path.name):
        return Checkpoint(path, manifest.read(path))
    found, passed_over = _newest_in(checkpoints_in(path))
    if found is None:
        raise InputError([f"{path} holds no complete checkpoint; give the folder of one, or of a run.", *passed_over])
    return found


def open_all(path: Path) -> tuple[list[Checkpoint], list[str]]:
    """Every complete checkpoint of a run, or the one that is named; and a sentence for each that is not complete.

    Raises:
        InputError: if there is nothing.
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
        raise InputError(f"{path} holds no checkpoint; give the folder of one, or of a run.")
    return found, problems


def checkpoints_in(path: Path) -> Path:
    """The folder of checkpoints that a path stands for: a run's, or itself."""
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
    """One sentence for many tensors, which mostly lack the same."""
    if not problems:
        return []
    more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    advice = "resume with the model, adapter and optimizer of that run"
    if any("cut into blocks" in problem for problem in problems):
        advice = "resume under the launch that wrote it, or set checkpoint.resume_weights_only true"
    return [f"The checkpoint {path} does not fit this run: {'; '.join(problems[:LISTED])}{more}. To go on, {advice}."]


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
    """The files of a checkpoint, each opened when it is needed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.open: dict[str, Any] = {}

    def read(self, name: str, tensor: StoredTensor, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements begin..end of a tensor: number of the first, and values, a part at a time.

        Raises:
            InputError: if a file does not hold what the manifest says.
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
            raise InputError(f"{path} does not hold {name} as its manifest says ({found}); {ANOTHER}")
        return stored
