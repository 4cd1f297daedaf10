"""The course of a figure in a line of text."""

import math
from itertools import pairwise
from statistics import fmean

BLOCKS = "▁▂▃▄▅▆▇█"


class Sparkline:
    """Keeps a course of any length in few numbers: each is the mean of as many values as the others."""

    MOST = 256

    def __init__(self) -> None:
        self.means: list[float] = []
        self.of_each, self.last = 1, list[float]()

    def add(self, value: float | None) -> None:
        """The next value; None and what is not finite are left out."""
        if value is None or not math.isfinite(value):
            return
        self.last.append(value)
        if len(self.last) == self.of_each:
            self.means.append(fmean(self.last))
            self.last = []
        if len(self.means) == self.MOST:
            self.means = [fmean(self.means[i : i + 2]) for i in range(0, self.MOST, 2)]
            self.of_each *= 2

    def text(self, width: int) -> str:
        """The course from its beginning in at most so many characters.

        In 4 characters 8, 6, 4, 2, 2, 2, 0, 0 are ``█▄▃▁``: of 7, 3, 2 and 0, which are means of two each.
        """
        values = [*self.means, *([fmean(self.last)] if self.last else [])]
        columns = min(width, len(values))
        edges = [round(place * len(values) / columns) for place in range(columns + 1)] if columns else [0]
        heights = [fmean(values[begin:end]) for begin, end in pairwise(edges)]
        lowest, highest = min(heights, default=0.0), max(heights, default=0.0)
        scale = (len(BLOCKS) - 1) / (highest - lowest) if highest > lowest else 0.0
        return "".join(BLOCKS[round((height - lowest) * scale)] for height in heights)
