"""Packing of documents into rows of a fixed size, by best-fit-decreasing: longest first, each where it fits tightest.

The rule is Johnson's (1974). Documents of one length are placed together: the fullest pack that takes one of them
is, after it took it, still the fullest that takes another, so it takes as many as fit; and packs with the same room
left are one class, that moves as a whole. The work grows with the distinct lengths, not with the documents.
Limits: a document is never cut; the order of the packs follows the lengths, so shuffle them before training.

Example: documents 0 to 4 of 3, 6, 4, 5 and 2 tokens, rows of 8. Lengths 6 and 5 open rows A and B (room 2 and 3), 4
opens C, 3 fills B, 2 fills A: rows [1 4], [3 0] and [2], with tokens in 20 of 24 places.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Packs:
    """Which documents share a row: pack ``i`` holds ``documents[bounds[i]:bounds[i + 1]]``."""

    documents: np.ndarray
    """Index of every document, pack by pack, in a pack the longest first; shape (documents,), int32."""
    bounds: np.ndarray
    """Where each pack begins in ``documents``, and the end of the last; shape (packs + 1,), int64."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, pack: int) -> np.ndarray:
        """Documents of one pack, counted from 0; a view.

        Raises:
            IndexError: if there is no such pack.
        """
        if not 0 <= pack < len(self):
            raise IndexError(f"there are {len(self)} packs, so none with number {pack}")
        return self.documents[self.bounds[pack] : self.bounds[pack + 1]]

    def tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens in each pack, of shape (packs,) and int64, given the documents' lengths in tokens."""
        ends = np.concatenate([[0], np.cumsum(lengths[self.documents], dtype=np.int64)])[self.bounds]
        return np.diff(ends)

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Positions of each pack whose documents are padded to its longest, of shape (packs,) and int64."""
        found: np.ndarray = np.maximum.reduceat(lengths[self.documents], self.bounds[:-1]) * np.diff(self.bounds)
        return found


def pack(lengths: np.ndarray, capacity: int) -> Packs:
    """Best-fit-decreasing; the same lengths give the same packs, and equal lengths keep the order of their indices.

    Args:
        lengths: tokens of each document, shape (documents,), integers from 1 to ``capacity``.
        capacity: tokens that a pack holds at most.

    Raises:
        ValueError: if a document is empty or longer than a pack.
    """
    if len(lengths) and not (lengths.min() >= 1 and lengths.max() <= capacity):
        raise ValueError(
            f"documents have {lengths.min()} to {lengths.max()} tokens, but a pack takes documents of 1 to {capacity} "
            "tokens; cut or drop the others first"
        )
    order = np.argsort(-lengths.astype(np.int32), kind="stable").astype(np.int32)
    distinct, counts = np.unique(lengths, return_counts=True)
    pack_of = np.empty(len(lengths), np.int32)  # along ``order``
    open_packs = _OpenPacks(capacity)
    start = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist()):
        open_packs.place(length, pack_of[start : start + count])
        start += count
    by_pack = np.argsort(pack_of, kind="stable")
    sizes = np.bincount(pack_of, minlength=open_packs.opened)
    return Packs(order[by_pack], np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def pack_apart(lengths: np.ndarray, copy: np.ndarray, capacity: int) -> Packs:
    """As ``pack``, where documents occur several times: no pack holds a document twice, each pass is packed by itself.

    Args:
        copy: how often each document stood before, from 0; shape (documents,).
    """
    passes = [np.flatnonzero(copy == number) for number in range(int(copy.max(initial=0)) + 1)]
    packs = [pack(lengths[documents], capacity) for documents in passes]
    sizes = [np.diff(each.bounds) for each in packs]
    chosen = [documents[each.documents] for documents, each in zip(passes, packs)]
    return Packs(
        np.concatenate(chosen).astype(np.int32),
        np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64),
    )


def efficiency(lengths: np.ndarray, packs: Packs, capacity: int) -> float:
    """Share of the places of all packs that hold a token, 0 to 1; 1 where there is no pack."""
    places = len(packs) * capacity
    return int(lengths[packs.documents].sum(dtype=np.int64)) / places if places else 1.0


class _OpenPacks:
    """Packs with room left, in classes of equal room."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.opened = 0
        self.rooms: list[int] = []
        """The rooms (tokens) that at least one open pack has, ascending."""
        self.numbers: dict[int, list[np.ndarray]] = {}
        """Per room, the packs that have it, in pieces; int32."""

    def place(self, length: int, pack_of: np.ndarray) -> None:
        """Write into ``pack_of`` a pack for each of ``len(pack_of)`` documents of this length."""
        placed, count = 0, len(pack_of)
        while placed < count:
            i = bisect_left(self.rooms, length)
            room = self.rooms[i] if i < len(self.rooms) else self.capacity
            each = room // length
            wanted = -(-(count - placed) // each)
            packs = self._take(i, wanted) if i < len(self.rooms) else self._open(wanted)
            documents = min(len(packs) * each, count - placed)
            pack_of[placed : placed + documents] = np.repeat(packs, each)[:documents]
            placed += documents
            full = documents // each  # the last pack may have taken fewer
            self._keep(room - each * length, packs[:full])
            self._keep(room - documents % each * length, packs[full:])

    def _open(self, wanted: int) -> np.ndarray:
        self.opened += wanted
        return np.arange(self.opened - wanted, self.opened, dtype=np.int32)

    def _take(self, i: int, wanted: int) -> np.ndarray:
        """Up to ``wanted`` packs of the class ``rooms[i]``, those first that came first."""
        packs = np.concatenate(self.numbers.pop(self.rooms[i]))
        room = self.rooms.pop(i)
        self._keep(room, packs[wanted:])
        return packs[:wanted]

    def _keep(self, room: int, packs: np.ndarray) -> None:
        if room and len(packs):
            if room not in self.numbers:
                insort(self.rooms, room)
                self.numbers[room] = []
            self.numbers[room].append(packs)
