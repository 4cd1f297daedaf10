"""A process's share of the state, copied to host memory, so that training continues while it is written.

The copy has the layout of the file: shards of one dtype are stored one after the other in blocks of 64 MiB, which are
reused for the next checkpoint. So it takes exactly the bytes of the share, and nothing is copied twice. (PyTorch rounds
pinned memory up to a power of two: a buffer per tensor would take up to twice as much.)
"""

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from finetune.checkpoint.manifest import OwnStretch
from finetune.units import MIB

if TYPE_CHECKING:
    from finetune.distributed import Piece

BLOCK_BYTES = 64 * MIB
AT_ONCE = 8 * MIB
"""Bytes passed to the writer at a time, which limits how long it takes to stop."""
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the dtypes in safetensors."""


class HostCopy:
    """Shards in host memory, in the layout of their file."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.blocks: dict[torch.dtype, list[torch.Tensor]] = {}
        self.used: dict[torch.dtype, int] = {}
        """Elements."""
        self.stretches: dict[str, OwnStretch] = {}

    def take(self, pieces: Iterable["Piece"]) -> None:
        """Copy the part of each piece that this process writes, replacing the previous copy.

        Raises:
            MemoryError: if host memory is not enough.
            RuntimeError: if two pieces have one name.
        """
        self.stretches, self.used = {}, dict.fromkeys(self.blocks, 0)
        devices: set[torch.device] = set()
        for piece in pieces:
            first, end = piece.written
            if first == end:
                continue
            if piece.name in self.stretches:
                raise RuntimeError(f"{piece.name} was given twice by one process, which holds only one shard of it.")
            values = piece.values.detach()[first:end]
            self.stretches[piece.name] = OwnStretch.model_construct(
                shape=list(piece.shape),
                dtype=str(values.dtype).removeprefix("torch."),
                begin=piece.begin + first,
                end=piece.begin + end,
            )
            self._append(values)
            if values.is_cuda:
                devices.add(values.device)
        for device in devices:
            torch.cuda.synchronize(device)

    def _append(self, values: torch.Tensor) -> None:
        dtype, size = values.dtype, self.block_bytes // values.itemsize
        blocks, used = self.blocks.setdefault(dtype, []), self.used.setdefault(dtype, 0)
        copied = 0
        while copied < len(values):
            block, at = divmod(used + copied, size)
            if block == len(blocks):
                blocks.append(_new_block(size, dtype, pinned=values.is_cuda))
            count = min(size - at, len(values) - copied)
            blocks[block][at : at + count].copy_(values[copied : copied + count], non_blocking=True)
            copied += count
        self.used[dtype] = used + copied

    def _dtypes(self) -> list[torch.dtype]:
        """The widest first, so that every tensor is aligned in the file."""
        return sorted(self.used, key=lambda dtype: -dtype.itemsize)

    def header(self) -> bytes:
        """What stands before the data in a file of safetensors."""
        table, offset = {}, 0
        for dtype in self._dtypes():
            for name, stretch in self.stretches.items():
                if f"torch.{stretch.dtype}" == str(dtype):
                    count = stretch.end - stretch.begin
                    end = offset + count * dtype.itemsize
                    table[name] = {"dtype": CODES[dtype], "shape": [count], "data_offsets": [offset, end]}
                    offset = end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def chunks(self) -> Iterator[memoryview]:
        """The whole file, in order, without a copy."""
        yield memoryview(self.header())
        for dtype in self._dtypes():
            left = self.used[dtype] * dtype.itemsize
            for block in self.blocks[dtype]:
                data = memoryview(block.view(torch.uint8).numpy()[:left])  # type: ignore[arg-type]
                left -= len(data)
                for at in range(0, len(data), AT_ONCE):
                    yield data[at : at + AT_ONCE]


def _new_block(size: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=dtype, pin_memory=pinned)
    except RuntimeError as error:
        raise MemoryError(f"no room in host memory for a copy of the state ({str(error).splitlines()[0]})") from error
