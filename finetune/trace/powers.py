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
"""Exponents of the rows of a micro-batch, of the positions of a row, and of the documents of a packed micro-batch."""
Size = Mapping[Power, float]
"""Bytes, FLOPs or elements: a coefficient for each product of powers."""
CONSTANT: Power = (0, 0, 0)


@dataclass(frozen=True)
class MicroBatch:
    """The numbers that sizes depend on."""

    rows: int
    row_tokens: int
    """Positions of a row."""
    documents: float = 0.0
    """Of a packed micro-batch."""

    def value(self, size: Size) -> float:
        """A size for this micro-batch."""
        return sum(coefficient * self.product(power) for power, coefficient in size.items())

    def product(self, power: Power) -> float:
        """The product of the powers alone."""
        rows, tokens, documents = power
        return float(self.rows**rows * self.row_tokens**tokens * self.documents**documents)

    def factored(self, number: int) -> tuple[Power, int]:
        """A number as powers of rows and positions, and the coefficient; both must be primes."""
        rows = tokens = 0
        if number:
            while number % self.rows == 0:
                number, rows = number // self.rows, rows + 1
            while number % self.row_tokens == 0:
                number, tokens = number // self.row_tokens, tokens + 1
        return (rows, tokens, 0), number

    def growth(self, shape: Sequence[int], number: int, *, is_of_weights: bool = False) -> tuple[Power, int]:
        """Bytes or elements of a tensor as powers and the coefficient.

        The size of a flat buffer is a sum, and that of a process's share of a weight a quotient: either may happen to
        be a multiple of one of the primes, and is hardly one of both.
        """
        if (is_of_weights or len(shape) == 1) and number % (self.rows * self.row_tokens):
            return CONSTANT, number
        return self.factored(number)


def prime_micro_batch(row_tokens: int, dimensions: Iterable[int], *, fewest_rows: int = 7) -> MicroBatch:
    """Rows and positions to trace with: primes that divide none of the dimensions.

    Args:
        row_tokens: of a row that is asked about. The positions are as near to it as can be, but no more, so that
            whatever the length of a row decides (a sliding window, a limit of the model) is decided alike.
        dimensions: of the model's tensors.
    """
    others = set(dimensions)
    rows = _prime(fewest_rows, 1, others)
    tokens = _prime(row_tokens, -1, others | {rows})
    if tokens <= rows:  # rows too short for a prime of their own
        tokens = _prime(max(row_tokens, rows + 1), 1, others | {rows})
    return MicroBatch(rows, tokens)


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
