"""Row lengths: their figures, and a histogram with round edges."""

from dataclasses import dataclass

import numpy as np

MOST_BINS = 12
"""Of one width."""


@dataclass(frozen=True)
class Bin:
    """Rows of ``first`` to ``last`` tokens."""

    first: int
    last: int
    rows: int


@dataclass(frozen=True)
class LengthFigures:
    """Tokens of the training rows before they were cut at max_length."""

    shortest: int
    median: int
    mean: float
    percentile_90: int
    percentile_99: int
    longest: int
    histogram: list[Bin]


def length_figures(lengths: np.ndarray, max_length: int) -> LengthFigures:
    """Figures of one length or more, in tokens. A percentile is the smallest length that so many do not exceed."""
    median, percentile_90, percentile_99 = np.percentile(lengths, [50, 90, 99], method="inverted_cdf").tolist()
    return LengthFigures(
        shortest=int(lengths.min()),
        median=int(median),
        mean=float(lengths.mean()),
        percentile_90=int(percentile_90),
        percentile_99=int(percentile_99),
        longest=int(lengths.max()),
        histogram=histogram(lengths, max_length),
    )


def histogram(lengths: np.ndarray, max_length: int) -> list[Bin]:
    """Bins of one round width, about ten, that cover all lengths; ``max_length`` ends one, where longer rows exist.

    Where the longest row is more than twice the 99th percentile, the last bin holds the whole tail.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    common = int(np.percentile(lengths, 99, method="inverted_cdf"))
    top = longest if longest <= 2 * common else common
    width = _bin_width(shortest, top, max_length)
    before = (shortest - 1) // width * width
    ends = set(range(before + width, top + width, width))
    if before < max_length < longest:
        ends.add(max_length)
    if max(ends) < longest:
        ends.add(longest)
    in_order = sorted(ends)
    rows = np.bincount(np.searchsorted(in_order, lengths), minlength=len(in_order)).tolist()
    firsts = [before + 1, *(end + 1 for end in in_order)]
    return [Bin(first, last, count) for first, last, count in zip(firsts, in_order, rows)]


def _bin_width(shortest: int, longest: int, max_length: int) -> int:
    """The finest round width that covers the lengths with few bins; if it will do, one that divides ``max_length``."""
    round_widths = {digits * 10**zeros for digits in (1, 2, 5, 25) for zeros in range(9)} | {2**n for n in range(30)}
    few = [width for width in sorted(round_widths) if (longest - 1) // width - (shortest - 1) // width < MOST_BINS]
    finest = few[0]
    return next((width for width in few if max_length % width == 0 and width <= 2 * finest), finest)
