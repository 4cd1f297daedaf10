"""Random numbers as a function of numbers that a run knows: nothing random needs to be saved to go on the same way."""

import numpy as np


def seed_of(*numbers: int) -> int:
    """A seed (63 bits) for these numbers, say seed, step and process; other numbers, or another order, give others."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1
