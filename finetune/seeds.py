"""Random numbers as a function of numbers that a run knows, so that no random state needs to be saved to resume."""

import numpy as np


def seed_of(*numbers: int) -> int:
    """A 63-bit seed from numbers such as seed, step and process; other numbers or another order give another seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1
