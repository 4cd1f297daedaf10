"""Tensors without values: how many bytes an automatic differentiation engine holds, and when.

A forward pass written with these operations keeps what PyTorch keeps: a storage lives while a variable of the program,
a node that saved it for backward, or a gradient buffer refers to it, and its bytes go with the last reference. The
backward pass runs the nodes in PyTorch's order: the latest first, as soon as all gradients of its output have arrived.
``Memory`` sums the live bytes by kind, and remembers the peak.
"""

import heapq
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Optional

KINDS = ("weights", "gradients", "optimizer", "activations", "loss", "gathered", "workspace")
BLOCK_BYTES = 512
"""PyTorch's CUDA allocator gives memory in multiples of this."""


class Memory:
    """Live bytes by kind, their peak, and the course of both."""

    def __init__(self, *, adds_in_place: bool = True, block_bytes: int = BLOCK_BYTES) -> None:
        """
        Args:
            adds_in_place: gradients that meet are added in place, as PyTorch does where nothing watches the operations;
                else, as under a dispatch mode (a dry run), into a new tensor.
            block_bytes: to whose multiples each storage is rounded up; 1 counts exactly.
        """
        self.adds_in_place, self.block_bytes = adds_in_place, block_bytes
        self._live, self._total = dict.fromkeys(KINDS, 0), 0
        self._blocks: set[_Block] = set()
        self._freed: deque[_Block] = deque()
        self.peak, self.at_peak, self.peak_phase = 0, dict(self._live), ""
        self.phase, self.kind = "", "activations"
        self.phases: dict[str, int] = {}
        """Peak of each phase."""
        self.course: list[tuple[str, int]] = []
        """Phase and live bytes after each allocation."""

    def take(self, storage: "Storage", kind: str) -> "_Block":
        """Count a new storage, until it is gone."""
        block = _Block(storage, self._freed.append)
        block.size, block.kind = storage.size, kind
        self._blocks.add(block)
        self._add(block)
        return block

    def change(self, block: "_Block", kind: str) -> None:
        """Count it as another kind from here on."""
        self._subtract(block)
        block.kind = kind
        self._add(block)

    @property
    def live(self) -> dict[str, int]:
        """Bytes that are held, by kind."""
        self._settle()
        return self._live

    @property
    def total(self) -> int:
        """Bytes that are held."""
        self._settle()
        return self._total

    def _settle(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            self._blocks.remove(block)
            self._subtract(block)

    def _subtract(self, block: "_Block") -> None:
        self._live[block.kind] -= block.size
        self._total -= block.size

    def _add(self, block: "_Block") -> None:
        self._settle()
        self._live[block.kind] += block.size
        self._total += block.size
        self.phases[self.phase] = max(self.phases.get(self.phase, 0), self._total)
        self.course.append((self.phase, self._total))
        if self._total > self.peak:
            self.peak, self.at_peak, self.peak_phase = self._total, dict(self._live), self.phase

    def rounded(self, size: float) -> int:
        """Bytes of the block that so many bytes take."""
        return -(-int(size) // self.block_bytes) * self.block_bytes

    def restart(self) -> None:
        """Forget what has been, and keep what is held."""
        self.peak, self.phases, self.course = 0, {}, []

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Within it, new storages are of this kind."""
        before, self.kind = self.kind, kind
        yield
        self.kind = before


class _Block(weakref.ref["Storage"]):
    """What is counted for a storage, known when it is gone.

    Not a destructor, which would be Python code at every release: an interrupt (Ctrl-C) that arrives there is dropped.
    """

    __slots__ = ("kind", "size")
    size: int
    kind: str


class Storage:
    """Bytes that live as long as this object is referred to."""

    __slots__ = ("__weakref__", "_block", "memory", "shared", "size")

    def __init__(self, memory: Memory, size: float, kind: str | None = None) -> None:
        self.memory, self.size, self.shared = memory, memory.rounded(size), False
        self._block = memory.take(self, kind or memory.kind)

    def become(self, kind: str) -> None:
        """Count as another kind from here on."""
        self.memory.change(self._block, kind)


class Tensor:
    """Elements of some width in bytes, in a storage that views share; ``node`` made it, if a gradient reaches it."""

    __slots__ = ("elements", "node", "storage", "width")

    def __init__(self, storage: Storage, elements: int, width: int, node: Optional["Node"] = None) -> None:
        self.storage, self.elements, self.width, self.node = storage, elements, width, node


Backward = Callable[[list[Tensor]], Sequence[Tensor | None]]
"""From the gradient of an output, in a list of one so that it can be let go of, to that of each input. It may refer to
sizes only: what a closure refers to lives as long as the node."""


class Parameter(Tensor):
    """A leaf: its gradient stays beside it."""

    __slots__ = ("grad", "kept_width", "on_gradient")

    def __init__(
        self, storage: Storage, elements: int, width: int, *, trained: bool, kept_width: int | None = None
    ) -> None:
        """
        Args:
            kept_width: bytes of an element of the gradient that stays; 0 where it is passed on.
        """
        super().__init__(storage, elements, width)
        self.grad: Storage | None = None
        self.on_gradient: Callable[[], None] | None = None
        """Told of every gradient that arrives."""
        self.kept_width = width if kept_width is None else kept_width
        if trained:
            self.node = Node([], [], self._accumulate)
            self.node.order = FIRST

    def _accumulate(self, arrived: list[Tensor]) -> list[Tensor | None]:
        if self.on_gradient is not None:
            self.on_gradient()
        storage = arrived.pop().storage
        if self.grad is None and self.kept_width:  # else added in place
            if self.kept_width != self.width:
                storage = Storage(storage.memory, self.elements * self.kept_width)
            storage.become("gradients")
            self.grad = storage
        elif not self.kept_width:
            self.grad = None
        return []


FIRST = float("inf")
"""Order of nodes that accumulate gradients."""
_numbers = itertools.count()


class Node:
    """One operation of the forward pass: what it saved, and how a gradient passes it."""

    __slots__ = ("__weakref__", "backward", "frame", "inputs", "order", "pinned", "saved")

    def __init__(
        self, inputs: Sequence[Tensor], saved: Sequence[Storage], backward: Backward, pinned: Sequence[object] = ()
    ) -> None:
        self.inputs = [tensor.node for tensor in inputs]
        self.saved, self.pinned = list(saved), list(pinned)
        """Freed when the node has run; and with the graph, as attributes of a Python function are."""
        self.backward = backward
        self.order: float = next(_numbers)
        self.frame: Frame | None = None
        """Of what is checkpointed, if the operation would save something."""


class Enough(Exception):
    """What is computed again has been, as far as it is asked for."""


class Frame:
    """Operations that saved nothing, and what they would have saved as soon as one of them is asked for it."""

    def __init__(self, recompute: Callable[["Frame"], None], given: Storage) -> None:
        """
        Args:
            recompute: computes again, and gives what is saved to the nodes of the frame in their order.
            given: the input, which is kept until all nodes have run that would save something.
        """
        self.recompute, self.given = recompute, given
        self.is_full = False
        self.nodes: deque[tuple[weakref.ref[Node], bool]] = deque()
        """Of the first pass, as far as they are still there; and whether they save something."""
        self.empty = 0
        """Of them, those that save something and have not been given it."""

    def add(self, node: Node, *, saves: bool) -> None:
        """A node of the first pass."""
        self.nodes.append((weakref.ref(node), saves))
        node.frame = self if saves else None
        self.empty += saves

    def give(self, saved: list[Storage]) -> None:
        """What the next node saves in the second pass.

        Raises:
            Enough: after the last that saves something.
        """
        found, saves = self.nodes.popleft()
        if (node := found()) is not None:
            node.saved = saved
        self.empty -= saves
        if not self.empty:
            raise Enough

    def fill(self) -> None:
        """Compute again, once."""
        if not self.is_full:
            self.is_full = True
            self.recompute(self)


def leaf(tensor: Tensor) -> Tensor:
    """A tensor that no operation made and a gradient shall reach, as transformers asks for it where an adapter's layers
    are checkpointed: the gradient stays until the graph goes."""
    kept: list[Storage] = []

    def keep(arrived: list[Tensor]) -> list[Tensor | None]:
        kept.append(arrived.pop().storage)
        return []

    node = Node([], [], keep, pinned=[tensor.storage])
    node.order = FIRST
    return Tensor(tensor.storage, tensor.elements, tensor.width, node)


def run_backward(root: Node, arrived: list[Tensor]) -> None:
    """Pass a gradient (in a list of one, which is emptied) through a graph."""
    waiting: dict[Node, int] = {}
    stack = [root]
    while stack:
        for source in stack.pop().inputs:
            if source is not None:
                if source not in waiting:
                    stack.append(source)
                waiting[source] = waiting.get(source, 0) + 1
    buffers = {root: [arrived.pop()]}
    ready = [(-root.order, 0, root)]
    places = itertools.count(1)
    while ready:
        node = heapq.heappop(ready)[2]
        buffer = buffers.pop(node)
        if node.frame is not None:
            node.frame.fill()
        gradients = list(node.backward(buffer))[::-1]
        buffer.clear()
        node.saved.clear()
        node.frame = None
        for source in node.inputs:
            gradient = gradients.pop() if gradients else None
            if source is None:
                continue
            assert gradient is not None
            buffers.setdefault(source, []).append(gradient)
            del gradient
            _sum(buffers[source])
            waiting[source] -= 1
            if waiting[source] == 0:
                heapq.heappush(ready, (-source.order, next(places), source))


def _sum(buffer: list[Tensor]) -> None:
    """Add what arrived: in place where nothing else refers to one of the two, as PyTorch does."""
    if len(buffer) < 2:
        return
    first, second = buffer
    in_place = first.storage.memory.adds_in_place
    if in_place and not first.storage.shared:
        buffer.pop()
    elif in_place and not second.storage.shared:
        buffer.pop(0)
    else:
        buffer[:] = [Tensor(Storage(first.storage.memory, first.elements * first.width), first.elements, first.width)]
