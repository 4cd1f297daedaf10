"""The bytes of every storage from its birth to its death, of real tensors and of fake ones alike.

A dispatch mode sees each operation below autograd, in the forward pass, in the backward pass and in the optimizer, and
each tensor that comes out of it. A storage that it has not met is a new block of memory; a weak reference tells when
the block is freed. What a kernel takes for itself while it runs is seen by nobody, and told by ``kernels``.
(The technique is that of ``torch.distributed._tools.mem_tracker``; this one keeps what happened instead of judging it
on the way, so that a block's purpose may be told after its end.)
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from finetune.compat.fake_tensors import (
    DispatchMode,
    FakeTensor,
    asks_for_the_device,
    asks_which,
    makes_gradients,
    operation_name,
    reads_a_value,
)
from finetune.compat.quick_operations import tensors_in
from finetune.compat.torch_private import storage_key
from finetune.trace.kernel_workspace import inside
from finetune.trace.patches import storages_tell_their_size
from finetune.trace.powers import CONSTANT, Power
from finetune.trace.shallow import HOST_COPY, OFFLOADED
from finetune.trace.work import Calls

ALLOCATOR_ROUNDING = 512
"""CUDA's caching allocator hands out multiples of it (``kMinBlockSize`` in c10/cuda/CUDACachingAllocator.cpp)."""
COMPUTES = ("aten", "prim", "bitsandbytes", "torch_attn", "profiler", "finetune")
"""Namespaces of operations that compute. The others move data between processes, or to and from their buffers."""


@dataclass(eq=False, slots=True)
class Block:
    """Memory from its birth to its death, in events: each birth and each death is one."""

    bytes: int
    """As the allocator hands it out."""
    born: int
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: int = 0
    """Bytes before they are rounded up."""
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
    micro_batch: int = 0
    """Of the optimizer step; 0 is the first."""
    layer: int | None = None
    """The decoder layer that is computed; None before, between and after them."""


@dataclass(eq=False)
class Ledger(DispatchMode):
    """Counts while it is active. Enter it after ``FakeTensorMode``, so that it sees what operations return."""

    as_on_gpu: bool = True
    """Whether blocks are as large as CUDA's allocator hands them out, and kernels take what those of a GPU do."""
    blocks: list[Block] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    events: int = 0
    trained: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Shapes of the trained weights, as the strategy found them."""
    calls: Calls | None = None
    """Where operations are counted; None while they are not."""

    def __post_init__(self) -> None:
        super().__init__()
        self.live: dict[int, Block] = {}
        self.times: Power | None = CONSTANT
        """How many times each operation is done; None: not at all, since another one stands for it."""
        self.most_scored = 0
        """Positions whose scores exist at a time, at most; 0 where the loss does not take them in parts."""
        self.built = 0
        """The last event of building model and optimizer. What is made from there to the first phase, and nothing else,
        are the strategy's buffers."""
        self.deaths: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def begin(self, phase: str, layer: int | None = None, *, micro_batch: int | None = None) -> None:
        """From here on another phase, layer, or (if it is given) micro-batch."""
        before = self.segments[-1].micro_batch if self.segments else 0
        now = before if micro_batch is None else micro_batch
        self.segments.append(Segment(phase, self.events + 1, now, layer))

    @property
    def phase(self) -> str:
        """The phase that is going on."""
        return self.segments[-1].phase if self.segments else "before"

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
        if args and isinstance(args[0], FakeTensor):
            if asks_for_the_device(func):
                return args[0].fake_device
            if reads_a_value(func):
                return _any_value(args[0])
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes back for the local tensors
        if args and isinstance(args[0], FakeTensor) and asks_which(func):
            returned = _all_of_them(args[0])
        else:
            returned = func(*args, **(kwargs or {}))
        name = operation_name(func)
        copied = self.live.get(_key(args[0])) if name == "aten::_to_copy" else None
        for tensor in tensors_in(returned):
            if not isinstance(tensor, DTensor) and tensor.device.type != "meta":  # which holds no memory
                block = self._meet(tensor, name)
                block.is_weight_copy |= copied is not None and copied is not block and copied.category == "weights"
        if not name.startswith(COMPUTES):
            for tensor in tensors_in((args, kwargs, returned)):
                if known := self.live.get(_key(tensor)):
                    known.travels = True
        if self.calls is not None and self.times is not None:
            phase = "backward" if makes_gradients() else self.phase
            counted = HOST_COPY if name == "aten::copy_" and self._is_on_host(args[:2]) else name
            self.calls.add(phase, self.times, counted, func, args, kwargs, returned)
        if self.as_on_gpu and (taken := inside(name, args, returned)):
            self._free(self._take(Block(taken, 0, name, (), torch.uint8, taken, category="kernels")))
        return returned

    def _is_on_host(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of them lies in host memory, so that the other travels."""
        blocks = [self.live.get(_key(each)) for each in tensors]
        return any(each is not None and each.category == OFFLOADED for each in blocks)

    def _meet(self, tensor: torch.Tensor, operation: str) -> Block:
        storage = tensor.untyped_storage()
        key, size = storage_key(storage), storage.nbytes()
        known = self.live.get(key)
        if known is None:
            block = Block(self._rounded(size), 0, operation, tuple(tensor.shape), tensor.dtype, size)
            known = self.live[key] = self._take(block)
            self.deaths[key] = weakref.ref(storage, lambda _: self._dies(key))
        elif known.exact != size:
            known = self._resize(key, size)
        return known

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self.live:
            self._resize(key, storage.nbytes()).travels = True

    def _resize(self, key: int, size: int) -> Block:
        old = self.live[key]
        if old.exact == size:
            return old
        self._free(old)
        new = Block(self._rounded(size), 0, old.operation, old.shape, old.dtype, size)
        new.category, new.travels = old.category, old.travels
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
        return -(-size // ALLOCATOR_ROUNDING) * ALLOCATOR_ROUNDING if self.as_on_gpu else size


def _any_value(tensor: torch.Tensor) -> float | bool:
    """What the host reads off a fake tensor, which has no value: a finite norm, and no for an answer, as to whether
    gradients overflowed."""
    return 1.0 if tensor.is_floating_point() else tensor.dtype not in (torch.bool, torch.uint8)


def _all_of_them(tensor: torch.Tensor) -> torch.Tensor:
    """Places of the elements of a fake tensor that are not zero, as if all of them were: each token is trained."""
    return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())
