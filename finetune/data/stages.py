"""A run whose sources or whose batches change on its way: which rows are trained in which step.

Each step is made of units, as many rows as divide every batch of the run: of batches of 8 and 12 rows it is 4, and a
step of 12 rows is 3 units. A mix of sources is a stream of units that goes on where it was left when the batch grows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain

import numpy as np

from finetune.cache import key_of
from finetune.config.token_budget import Stage
from finetune.data.batches import Batch, Batches
from finetune.data.encoding import Row
from finetune.data.rows import Rows
from finetune.data.sampler import EMPTY


class Staged(Batches):
    """The batches of a run in stages. What ``Batches`` knows of each row by its number, its mix knows here.

    Args:
        stages: one after the other.
        batches_of_mix: makes the batches of a mix, by its number, of so many steps of so many rows each.
    """

    def __init__(self, stages: Sequence[Stage], batches_of_mix: Callable[[int, int, int], Batches]) -> None:
        self.stages = stages
        self.unit = math.gcd(*(stage.rows for stage in stages))
        units = [stage.steps * stage.rows // self.unit for stage in stages]
        mixes = range(max(stage.mix for stage in stages) + 1)
        of_mix = [sum(units[i] for i, stage in enumerate(stages) if stage.mix == mix) for mix in mixes]
        self.mixes = [batches_of_mix(mix, of_mix[mix], self.unit) for mix in mixes]
        self._first_place = [0, *accumulate(len(mix) for mix in self.mixes)]
        self._first_step = [0, *accumulate(stage.steps for stage in stages)]
        self._first_unit = [
            sum(units[j] for j in range(i) if stages[j].mix == stage.mix) for i, stage in enumerate(stages)
        ]
        first = self.mixes[0]
        self.rows, self.flat, self.paired = Joined([mix.rows for mix in self.mixes]), first.flat, first.paired
        self.micro_batch_size = first.micro_batch_size
        self.steps = self._first_step[-1]

    def __len__(self) -> int:
        return self._first_place[-1]

    def documents(self, place: int) -> list[Row]:
        """The documents of a row of the input; none for ``EMPTY``."""
        mix = np.searchsorted(self._first_place, place, side="right") - 1 if place != EMPTY else 0
        return self.mixes[mix].documents(place if place == EMPTY else place - self._first_place[mix])

    def step(self, step: int) -> Batch:
        """The rows of an optimizer step, from 1."""
        number = int(np.searchsorted(self._first_step, step - 1, side="right")) - 1
        stage = self.stages[number]
        mix, size = self._of_this_size(stage.mix), stage.rows // self.unit
        first = self._first_unit[number] + (step - 1 - self._first_step[number]) * size
        units = [mix.step(unit + 1) for unit in range(first, first + size)]
        places = [place for unit in units for place in unit.places]
        return Batch(
            [place if place == EMPTY else place + self._first_place[stage.mix] for place in places],
            trained_tokens=sum(unit.trained_tokens for unit in units),
            tokens=sum(unit.tokens for unit in units),
            total_tokens=sum(unit.total_tokens for unit in units),
            sources=lambda: [source for unit in units for source in unit.sources()],
        )

    def heaviest(self) -> list[list[Row]]:
        """Documents of the micro-batch with the most positions of the whole run."""
        found = [self._of_this_size(mix).heaviest() for mix in range(len(self.mixes))]
        return max(found, key=self._positions)

    def _positions(self, places: list[list[Row]]) -> int:
        tokens = [sum(len(row.tokens) for row in documents) for documents in places]
        return sum(tokens) if self.flat else len(places) * max(tokens)

    def _of_this_size(self, mix: int) -> Batches:
        """The batches of a mix, in micro-batches of the size that the run decided on after they were made."""
        self.mixes[mix].micro_batch_size = self.micro_batch_size
        return self.mixes[mix]

    @property
    def fingerprint(self) -> str:
        """Hash of tokens and masks, in order, and of where sources and batches change; a longer run has the same."""
        changes = [[stage.steps, stage.rows, stage.mix] for stage in self.stages[:-1]]
        last = self.stages[-1]
        return key_of([[mix.fingerprint for mix in self.mixes], changes, last.rows, last.mix])

    def newly_rejected(self) -> Iterator[str]:
        """Unused records as lines of JSON, each returned once."""
        return chain.from_iterable(mix.newly_rejected() for mix in self.mixes)

    def describe(self) -> list[str]:
        """Lines for the run's output."""
        return [*(line for mix in self.mixes for line in mix.describe()), *stage_lines(self.stages)]


def stage_lines(stages: Sequence[Stage]) -> list[str]:
    """Lines for the run's output: the steps of each stage, and what they train."""
    lines, before, changes = list[str](), 0, any(stage.mix for stage in stages)
    for stage in stages:
        sources = ", of data.train" if stage.mix == 0 else f", of data.stages {stage.mix}"
        last = before + stage.steps
        lines.append(f"steps {before + 1:,} to {last:,}: {stage.rows:,} rows each{sources if changes else ''}")
        before = last
    return lines


class Joined(Rows):
    """Rows of several mixes, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.trained_tokens = np.concatenate([part.trained_tokens for part in parts])
        self._first = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, index: int) -> Row:
        """Row by its number, from 0.

        Raises:
            IndexError: if there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} rows, so none with number {index}")
        part = int(np.searchsorted(self._first, index, side="right")) - 1
        return self.parts[part][index - self._first[part]]

    def column(self, name: str) -> np.ndarray:
        """One of the numbers that are kept for each row of the sources."""
        return np.concatenate([part.column(name) for part in self.parts])

    @property
    def fingerprint(self) -> str:
        """Hash of tokens and masks, in order."""
        return key_of([part.fingerprint for part in self.parts])
