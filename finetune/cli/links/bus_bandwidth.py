"""From seconds of collectives to bandwidth and latency of links, and to processes that are slower than others.

Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md): the algorithm's is bytes over seconds, where the bytes of
an all-gather are those of its whole output, and of a reduce-scatter of its whole input. The bus's is what the slowest
link carries of a ring: of n processes an all-reduce sends 2 (n - 1) / n of the bytes over each link, an all-gather or a
reduce-scatter half of that. It does not depend on n, and can be held against a data sheet.

Example: 4 processes all-reduce 64 MB in 12 ms. The algorithm's bandwidth is 5.3 GB/s, the bus's 8.0 GB/s.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, EXCHANGE = "all-reduce", "all-gather", "reduce-scatter", "point to point"
OPERATIONS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, EXCHANGE)
INSIDE, BETWEEN = "inside a machine", "between machines"
SLOW_LINKS, SLOW_COMPUTATION = 0.7, 1.5
"""Share of the others' median below which the links of a process are slow, and above which its computation is."""


@dataclass(frozen=True)
class Timing:
    """One operation of one size."""

    scope: str
    operation: str
    bytes: int
    seconds: float
    """Of the slowest process."""
    members: int
    """Processes of a group."""

    @property
    def bus_gb_per_second(self) -> float:
        """10^9 bytes a second that a link carries in one direction."""
        return self.bytes / self.seconds / 1e9 * share_of_a_link(self.operation, self.members)


@dataclass(frozen=True)
class MeasuredLink:
    """Bandwidth and latency that collectives see."""

    gb_per_second: float
    """Of one process inside a machine; of all processes of a machine together between machines."""
    microseconds: float
    """Latency of one hop."""


def share_of_a_link(operation: str, members: int) -> float:
    """Of an operation's bytes, those that each link of a ring carries."""
    both_ways = {ALL_REDUCE: 2, ALL_GATHER: 1, REDUCE_SCATTER: 1}
    return both_ways[operation] * (members - 1) / members if operation in both_ways else 1.0


def link_of(timings: Sequence[Timing], scope: str, *, side_by_side: int) -> MeasuredLink | None:
    """What a plan takes of the all-reduces of a scope: bandwidth of the largest, latency of the smallest.

    A ring of n processes has 2 (n - 1) hops.

    Args:
        side_by_side: groups that share the link, measured at the same time.
    """
    found = sorted(
        (each for each in timings if (each.scope, each.operation) == (scope, ALL_REDUCE)), key=lambda each: each.bytes
    )
    if not found:
        return None
    small, large = found[0], found[-1]
    return MeasuredLink(side_by_side * large.bus_gb_per_second, small.seconds / (2 * (small.members - 1)) * 1e6)


def seconds_of(size: int, timings: Sequence[Timing]) -> float:
    """What the slowest operation will take with so many bytes, at the speed that it had with the most bytes so far."""
    most = max(each.bytes for each in timings)
    return max(each.seconds for each in timings if each.bytes == most) * size / most


def rounds_of(members: int) -> Iterator[list[tuple[int, int]]]:
    """Neighbours of a ring that exchange at the same time: each process with at most one other in a round.

    Of 5 processes: (0, 1) and (2, 3); (1, 2) and (3, 4); (4, 0).
    """
    ring = [(each, (each + 1) % members) for each in range(members if members > 2 else members - 1)]
    closes = ring[members - 1 :] if members % 2 else []
    for parity in (0, 1):
        if pairs := [pair for pair in ring if pair[0] % 2 == parity and pair not in closes]:
            yield pairs
    if closes:
        yield closes


def with_slow_links(best: Mapping[int, float]) -> list[int]:
    """Processes all of whose links are slow.

    The neighbour of a slow process has one slow link and one that is not, so that its best one tells them apart. Of two
    processes nobody can tell which one is slow.

    Args:
        best: GB/s of the best link of each process.
    """
    usual = statistics.median(best.values()) if best else 0.0
    return [rank for rank, speed in best.items() if len(best) > 2 and speed < SLOW_LINKS * usual]


def with_slow_computation(seconds: Mapping[int, float]) -> list[int]:
    """Processes that take much longer than most for the same product."""
    usual = statistics.median(seconds.values()) if seconds else 0.0
    return [rank for rank, each in seconds.items() if len(seconds) > 2 and each > SLOW_COMPUTATION * usual]
