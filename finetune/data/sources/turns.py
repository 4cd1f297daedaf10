"""Several sources read in turns, in proportion to their weights, each as often as its weight says."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from finetune.data.sources.names import Source
from finetune.data.sources.reading import read
from finetune.data.sources.record import Record, Rejected


@dataclass(frozen=True)
class Reading:
    """One of the times that a source is read in a pass over all: a weight of 2.5 is two, and half of a third."""

    source: Source
    share: float
    """Of its rows that are kept."""
    is_first: bool


def readings_of(entries: Sequence[Source]) -> list[Reading]:
    """The readings of a pass, those of one source in a row."""
    return [
        Reading(entry, min(1.0, entry.weight - copy), is_first=copy == 0)
        for entry in entries
        for copy in range(math.ceil(entry.weight))
    ]


def in_turns(readings: Sequence[Reading]) -> Iterator[tuple[int, Record | Rejected]]:
    """Records with the number of their reading, all sources in turns, in proportion to the weights of what is kept.

    For example, of every four records from sources of weights 1 and 3, three are of the second, until one ends.

    Raises:
        InputError: if a source cannot be read.
    """
    starts = [number for number, reading in enumerate(readings) if reading.is_first]
    ends = [*starts[1:], len(readings)]

    def timed(numbers: Iterable[int]) -> Iterator[tuple[float, int, Record | Rejected]]:
        time = 0.0
        for number in numbers:
            reading = readings[number]
            for record in read(reading.source, streaming=True):
                time += reading.share / reading.source.weight
                yield time, number, record

    merged = heapq.merge(*(timed(range(*each)) for each in zip(starts, ends)), key=lambda each: each[0])
    return ((number, record) for _, number, record in merged)
