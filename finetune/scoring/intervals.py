"""How far chance may move a score: intervals of shares and of means, and tests of the difference of two models.

Rows are taken to be a sample of all that could be asked. Two models that answered the same rows are compared row by
row, which is much sharper than holding two intervals against each other.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z = 1.959963984540054
"""Within so many standard deviations a normal variable stays with a probability of 95 %."""
DRAWS = 10_000
"""Of the test that flips signs. A p-value of 0.05 is then known to within 0.004."""


class Interval(NamedTuple):
    """Of 95 %."""

    low: float
    high: float


class Difference(NamedTuple):
    """Of the second model's score from the first's, on the same rows."""

    value: float
    interval: Interval
    p: float
    """Of a difference as large as this or larger by chance alone, in either direction."""


def share_interval(right: int, rows: int) -> Interval:
    """Wilson's interval of a share (J. Am. Stat. Assoc. 22, 209-212, 1927), which is right for few rows, and near 0
    and 1: 28 of 36 are 77.8 %, with an interval from 61.9 to 88.3 %."""
    share, z2 = right / rows, Z * Z
    middle = (share + z2 / (2 * rows)) / (1 + z2 / rows)
    half = Z / (1 + z2 / rows) * math.sqrt(share * (1 - share) / rows + z2 / (4 * rows * rows))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def ratio_interval(totals: Sequence[float], divisors: Sequence[float]) -> Interval:
    """Of a sum divided by a sum, over rows: the loss of all tokens, where rows have different numbers of them.

    The rows' residuals ``total - ratio * divisor`` have the standard error of the ratio, divided by the mean divisor
    (Cochran, Sampling Techniques, 3rd edition, section 6.4). With divisors of 1 it is the interval of a mean.
    """
    total, divisor = np.asarray(totals, float), np.asarray(divisors, float)
    rows, ratio = len(total), float(total.sum() / divisor.sum())
    if rows < 2:
        return Interval(-math.inf, math.inf)
    residuals = total - ratio * divisor
    error = math.sqrt(rows / (rows - 1) * float((residuals**2).sum())) / float(divisor.sum())
    return Interval(ratio - Z * error, ratio + Z * error)


def mean_interval(values: Sequence[float]) -> Interval:
    """Of a mean, by its standard error."""
    return ratio_interval(values, [1.0] * len(values))


def compared(first: Sequence[float], second: Sequence[float], *, are_shares: bool) -> Difference:
    """The difference of two models' mean scores of the same rows, in the same order.

    Args:
        are_shares: each score is 0 or 1. The test is McNemar's, exact; else signs of the differences are flipped.
    """
    differences = np.asarray(second, float) - np.asarray(first, float)
    if are_shares:
        p = mcnemar(int((differences < 0).sum()), int((differences > 0).sum()))
    else:
        p = sign_flip(differences)
    return Difference(float(differences.mean()), mean_interval(differences.tolist()), p)


def compared_ratio(first: Sequence[float], second: Sequence[float], divisors: Sequence[float]) -> Difference:
    """The same of two ratios with the same divisors: losses per token of the same rows."""
    differences = np.asarray(second, float) - np.asarray(first, float)
    value = float(differences.sum() / np.sum(divisors))
    return Difference(value, ratio_interval(differences.tolist(), divisors), sign_flip(differences))


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact test of McNemar (Psychometrika 12, 153-157, 1947), two-sided.

    Rows that both models got right, or both wrong, say nothing. Of the others each model gets half by chance: of 8 to 2
    the p-value is 2 * (1 + 10 + 45) / 2**10 = 0.109.

    Args:
        only_first: rows that only the first model got right.
        only_second: those that only the second did.
    """
    rows, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(rows, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**rows)


def sign_flip(differences: np.ndarray, *, seed: int = 0) -> float:
    """A permutation test of paired differences, two-sided: how often their sum is as far from 0 with random signs.

    It takes no distribution for granted. Up to 12 rows all signs are tried, else ``DRAWS`` of them are drawn. NaN where
    a difference is not finite.
    """
    values = np.asarray(differences, float)
    if not np.isfinite(values).all():
        return math.nan
    values = values[values != 0]
    if not len(values):
        return 1.0
    observed = abs(float(values.sum())) * (1 - 1e-12)  # sums in another order differ in their last bit
    if len(values) <= 12:
        bits = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        return float((np.abs((2 * bits - 1) @ values) >= observed).mean())
    rng, extreme = np.random.default_rng(seed), 0
    for _ in range(DRAWS // 100):  # 100 at a time: all would take gigabytes of memory for many rows
        extreme += int((np.abs((2 * rng.integers(0, 2, (100, len(values))) - 1) @ values) >= observed).sum())
    return (extreme + 1) / (DRAWS + 1)
