"""Which points of a matrix of settings `make test` runs; `make prove` runs them all.

Of a proven matrix few that hold every value, and one of each test at least; a strategy is held by one at least of the
matrices that compare losses, not by each.

Every point was run on these very sources, or `test_proofs` fails: what is left to do is to see, in another environment,
that each strategy, precision, optimizer ... works there at all. For example, of ("ddp", "sgd"), ("ddp", "adamw"),
("fsdp2", "sgd") and ("fsdp2", "adamw"), the first and the last are run.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest


def values_of(parameters: Mapping[str, Any]) -> Iterator[str]:
    """The values of a point, those of tuples one by one, by whatever names: a launch is a strategy and processes."""
    waiting = list(parameters.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, tuple):
            waiting += value
        else:
            yield repr(value)


def kept(points: Sequence[tuple[str, Mapping[str, Any]]], shared: dict[str, int] | None = None) -> set[int]:
    """Places of the points to run, of all of a file: each is the name of its test, and its parameters.

    Greedy: always the point with the most values that no other holds yet; of equals the first of those whose shared
    values are the rarest.

    Args:
        shared: values that the points of one file hold for those of others, and how many did so far; the chosen ones
            are added.
    """
    held = [{test, *values_of(parameters)} for test, parameters in points]
    uses = {} if shared is None else shared
    wanted = set().union(*held) - {value for value, times in uses.items() if times}
    chosen = set()
    while wanted:
        best = max(
            range(len(held)),
            key=lambda place: (len(held[place] & wanted), -sum(uses.get(value, 0) for value in held[place])),
        )
        chosen.add(best)
        wanted -= held[best]
        for value in uses.keys() & held[best]:
            uses[value] += 1
    return chosen


def thinned(kept: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Parameters of a test of a file that is not proven, of which the others are marked ``prove``."""
    return [
        *kept,
        *(pytest.param(*each if isinstance(each, tuple) else (each,), marks=pytest.mark.prove) for each in others),
    ]
