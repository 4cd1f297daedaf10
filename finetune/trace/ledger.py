"""The bytes of every storage from its birth to its death, of real tensors and of fake ones alike.

A dispatch mode sees each operation below autograd, in the forward pass, in the backward pass and in the optimizer, and
each tensor that comes out of it. A storage that it has not met is a new block of memory; a weak reference tells when
the block is freed. What a kernel takes for itself while it runs is seen by nobody, and told by ``kernels``.
(The technique is that of ``torch.distributed._tools.mem_tracker``; this one keeps what happened instead of judging it
on the way, so that a block's purpose may be told after its end.)
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from finetune.compat.fake_tensors import TorchDispatchMode, operation_name, storage_key, tree_leaves
from finetune.trace.patches import storages_tell_their_size

ALLOCATOR_ROUNDING = 512
"""CUDA's caching allocator hands out multiples of it (``kMinBlockSize`` in c10/cuda/CUDACachingAllocator.cpp)."""
COMPUTES = ("aten", "prim", "bitsandbytes", "torch_attn", "profiler")
"""Namespaces of operations that compute. The others move data between processes, or to and from their buffers."""


@dataclass(eq=False, slots=True)
class Block:
    """Memory from its birth to its death, in events: each birth and each death is one."""

    bytes: int
    born: int
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    died: int | None = None
    category: str | None = None
    """What it is for, where that was told."""
    is_weight_copy: bool = False
    travels: bool = False
    """A collective reads or writes it, or it is freed and taken anew as gathered layers are."""

    def lives_at(self, event: int) -> bool:
        return self.born <= event and (self.died is None or self.died > event)


@dataclass
class Segment:
    """Events of one phase in a row."""

    phase: str
    start: int


@dataclass(eq=False)
class Ledger(TorchDispatchMode):
    """Counts while it is active. Enter it after ``FakeTensorMode``, so that it sees what operations return."""

    rounding: int = ALLOCATOR_ROUNDING
    """Bytes; 1 counts exactly."""
    inside: Callable[[str, Any, Any], int] | None = None
    """Bytes that a kernel takes for itself, told the operation's name, its arguments and what it returned."""
    blocks: list[Block] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    events: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.live: dict[int, Block] = {}
        self.deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def begin(self, phase: str) -> None:
        """From here on another phase."""
        self.segments.append(Segment(phase, self.events + 1))

    def tell(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """What these tensors' memory is for, of those that are counted."""
        for tensor in tensors:
            local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if block := self.live.get(_key(local)):
                block.category = category

    def __enter__(self) -> Any:
        self.listening = storages_tell_their_size(self._resized)
        self.listening.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.listening.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back for the local tensors
        returned = func(*args, **(kwargs or {}))
        name = operation_name(func)
        copied = self.live.get(_key(args[0])) if name == "aten::_to_copy" else None
        for tensor in tree_leaves(returned):
            is_plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
            if is_plain and tensor.device.type != "meta":  # which holds no memory
                block = self._meet(tensor, name)
                block.is_weight_copy |= copied is not None and copied is not block and copied.category == "weights"
        if not name.startswith(COMPUTES):
            for tensor in tree_leaves((args, kwargs, returned)):
                if isinstance(tensor, torch.Tensor) and (known := self.live.get(_key(tensor))):
                    known.travels = True
        if self.inside and (taken := self.inside(name, args, returned)):
            self._free(self._take(Block(taken, 0, name, (), torch.uint8, category="kernels")))
        return returned

    def _meet(self, tensor: torch.Tensor, operation: str) -> Block:
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), self._rounded(storage.nbytes())
        known = self.live.get(key)
        if known is None:
            known = self.live[key] = self._take(Block(size, 0, operation, tuple(tensor.shape), tensor.dtype))
            self.deaths[key] = weakref.ref(storage, lambda _: self._dies(key))
        elif known.bytes != size:
            known = self._resize(key, size)
        return known

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self.live:
            self._resize(key, self._rounded(storage.nbytes())).travels = True

    def _resize(self, key: int, size: int) -> Block:
        old = self.live[key]
        if old.bytes == size:
            return old
        self._free(old)
        new = Block(size, 0, old.operation, old.shape, old.dtype, category=old.category, travels=old.travels)
        self.live[key] = self._take(new)
        return new

    def _dies(self, key: int) -> None:
        del self.deaths[key]
        self._free(self.live.pop(key))

    def _take(self, block: Block) -> Block:
        self.events += 1
        block.born = self.events
        self.blocks.append(block)
        return block

    def _free(self, block: Block) -> None:
        self.events += 1
        block.died = self.events

    def _rounded(self, size: int) -> int:
        return -(-size // self.rounding) * self.rounding


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())
