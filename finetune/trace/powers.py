"""Sizes that depend on the micro-batch: what one trace says of all lengths and numbers of rows.

A micro-batch is traced with numbers of rows and positions that are primes and divide nothing else in the model. How
often each of them divides a tensor's elements then tells how the tensor grows. With 7 rows of 2039 positions, 16-bit
hidden states of a model with 4096 channels take 7 * 2039 * 4096 * 2 = 116,924,416 bytes: once 7, once 2039, and
8,192 bytes for each position of each row. A mask of 7 * 2039 * 2039 bytes grows with the square of the positions, and
a weight not at all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Power = tuple[int, int, int]
"""Exponents of the rows of a micro-batch, of the positions of a row, and of the positions whose scores exist at a
time."""
Size = Mapping[Power, float]
"""Bytes, FLOPs or elements: a coefficient for each product of powers."""
CONSTANT: Power = (0, 0, 0)
PARTS: Power = (1, 1, -1)
"""Of the positions of a micro-batch, as many as there are for scores to exist at a time."""


@dataclass(frozen=True)
class MicroBatch:
    """The numbers that sizes depend on."""

    rows: int
    row_tokens: int
    """Positions of a row."""
    scored: int = 1
    """Positions whose scores exist at a time."""

    def value(self, size: Size) -> float:
        """A size for this micro-batch."""
        return sum(coefficient * self.product(power) for power, coefficient in size.items())

    def product(self, power: Power) -> float:
        """The product of the powers alone."""
        rows, tokens, scored = power
        return self.rows**rows * self.row_tokens**tokens * float(self.scored) ** scored

    def factored(self, number: int) -> tuple[Power, int]:
        """A number as powers of rows, positions, and positions with scores, and the coefficient; all must be primes."""
        powers = [0, 0, 0]
        for place, prime in enumerate((self.rows, self.row_tokens, self.scored)):
            while prime > 1 and number and number % prime == 0:
                number, powers[place] = number // prime, powers[place] + 1
        rows, tokens, scored = powers
        return (rows, tokens, scored), number

    def growth(self, shape: Sequence[int], number: int, *, is_of_weights: bool = False) -> tuple[Power, int]:
        """Bytes or elements of a tensor as powers and the coefficient.

        The size of a flat buffer is a sum, and that of a process's share of a weight a quotient: either may happen to
        be a multiple of one of the primes, and is hardly one of both.
        """
        if (is_of_weights or len(shape) == 1) and number % (self.rows * self.row_tokens):
            return CONSTANT, number
        return self.factored(number)


FEWEST_ROWS = 7
MOST_SCORED = 521
"""To trace with. More would take more time; a smaller prime would happen to divide numbers that it has no part in."""


def prime_micro_batch(row_tokens: int, dimensions: Iterable[int]) -> MicroBatch:
    """Rows, positions, and positions with scores to trace with: primes that divide none of the dimensions.

    Args:
        row_tokens: of a row that is asked about. The positions are as near to it as can be, but no more, so that
            whatever the length of a row decides (a sliding window, a limit of the model) is decided alike.
        dimensions: of the model's tensors.
    """
    others = set(dimensions)
    rows = _prime(FEWEST_ROWS, 1, others)
    tokens = _prime(row_tokens, -1, others | {rows})
    if tokens <= rows:  # rows too short for a prime of their own
        tokens = _prime(max(row_tokens, rows + 1), 1, others | {rows})
    return MicroBatch(rows, tokens, scored=_prime(min(MOST_SCORED, rows * tokens // 2), -1, others | {rows, tokens}))


def _prime(start: int, step: int, others: set[int]) -> int:
    """The first prime from a number on, up or down, that divides none of the others; 0 if there is none."""
    number = start
    while number > 1:
        is_prime = all(number % divisor for divisor in range(2, int(number**0.5) + 1))
        if is_prime and all(other % number for other in others if other):
            return number
        number += step
    return 0


def added(sizes: Iterable[Size]) -> dict[Power, float]:
    """The sum of sizes."""
    total: dict[Power, float] = {}
    for size in sizes:
        for power, coefficient in size.items():
            total[power] = total.get(power, 0) + coefficient
    return total


def multiplied(size: Size, times: Power) -> dict[Power, float]:
    """A size, so many times."""
    found: dict[Power, float] = {}
    for power, coefficient in size.items():
        rows, tokens, scored = (one + other for one, other in zip(power, times, strict=True))
        found[rows, tokens, scored] = coefficient
    return found
