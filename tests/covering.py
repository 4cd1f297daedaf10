"""Which points of a matrix of settings are left to `make prove`; of proven matrices ``thinning`` leaves it more.

A covering array of strength two: each pair of values of any two axes that occurs in the matrix occurs in one of the
points kept. For example, of 10 strategies x 3 x 3 x 6 choices about 60 points hold every pair, where 540 hold every
combination: a fault that needs two settings to meet is found by either.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest


def pairs_of(point: Sequence[Any]) -> set[Any]:
    """Every two axes of a point with their values."""
    return set(combinations(enumerate(point), 2))


def covering_array(points: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Points that hold every pair of values which occurs in all points, few of them, in their order.

    Greedy: always the point with the most pairs that are not covered yet, the first of equals.
    """
    open_pairs = set().union(*map(pairs_of, points))
    chosen = set()
    while open_pairs:
        best = max(points, key=lambda point: len(pairs_of(point) & open_pairs))
        chosen.add(best)
        open_pairs -= pairs_of(best)
    return [point for point in points if point in chosen]


def covered(points: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test, one for each point; those outside of the covering array are marked ``prove``."""
    kept = set(covering_array(points))
    return [
        pytest.param(point, id="-".join(map(_name, point)), marks=[] if point in kept else [pytest.mark.prove])
        for point in points
    ]


def thinned(kept: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Parameters of a test, of which the others are marked ``prove``."""
    return [
        *kept,
        *(pytest.param(*each if isinstance(each, tuple) else (each,), marks=pytest.mark.prove) for each in others),
    ]


def _name(value: Any) -> str:
    """A launch, which is a strategy and its processes, as ``ddpx2``."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
