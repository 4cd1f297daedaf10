"""Where a row of layers is cut into the stages of a pipeline. Without PyTorch."""

from collections.abc import Sequence
from functools import cache


def cuts(costs: Sequence[float], stages: int) -> list[tuple[int, int]]:
    """Which units each stage has, as the first one and the one after the last: at least one.

    Args:
        costs: of each unit, in their order.

    Example: units that cost 2, 2, 2, 2 and 3 are cut in two into 2, 2, 2 and 2, 3: the dearest costs 6.
    """
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @cache
    def best(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        """What the dearest stage costs, and where each ends."""
        if left == 1:
            return before[-1] - before[first], (len(costs),)
        found = []
        for end in range(first + 1, len(costs) - left + 2):
            dearest, ends = best(end, left - 1)
            found.append((max(dearest, before[end] - before[first]), (end, *ends)))
        return min(found)

    ends = best(0, stages)[1]
    return list(zip((0, *ends), ends))
