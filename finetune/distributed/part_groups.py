"""Which processes do something together, where each has a part of the model: in the order of Megatron-LM.

Those that have parts of the same layers, or of the same experts, follow one another; then come the others of a stage,
which have the same parts, then the next stage: rank = (stage * copies + copy) * size + place.

Example: of 8 processes with 2 for each layer and 2 stages, ranks 0 and 1 have the parts of the layers of the first
stage, and so have ranks 2 and 3; ranks 4 to 7 have the second one. Rank 5 takes hidden states from rank 1, and has the
same as rank 7. Ranks 2, 3, 6 and 7 have the whole model between them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist


class Place(NamedTuple):
    """Of a process."""

    stage: int
    copy: int
    """Which copy of the model, or shard of each part of it."""
    place: int
    """Which of the processes that have parts of the same layers."""


class Grid(NamedTuple):
    """Of the processes of a launch."""

    world_size: int
    stages: int
    size: int
    """Processes that have parts of the same layers."""

    def of(self, rank: int) -> Place:
        """The place of a process."""
        stage, rest = divmod(rank, self.world_size // self.stages)
        return Place(stage, *divmod(rest, self.size))

    def alike(self, *axes: str) -> list[list[int]]:
        """The ranks of all processes, those in one list that agree in these fields of their places."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(tuple(getattr(self.of(rank), axis) for axis in axes), []).append(rank)
        return [*found.values()]


class Together(NamedTuple):
    """A process group, of which this process is one."""

    ranks: list[int]
    """None of them where this process is in none: in the middle of a line, and asked for its ends."""
    group: Any


class Groups:
    """The groups of a process, each made once, since every one may take memory of a GPU. Collective."""

    def __init__(self, grid: Grid, rank: int) -> None:
        self._rank, self._made = rank, dict[tuple[int, ...], Any]()
        lines = grid.alike("copy", "place")
        self.parts = self.own(grid.alike("stage", "copy"))
        """Those that have parts of the same layers."""
        self.replicas = self.own(grid.alike("stage", "place"))
        """Those that have the same parts, or shards of them."""
        self.line = self.own(lines)
        """Those with the same place in each stage, in the order of these."""
        self.ends = self.own([[*dict.fromkeys((line[0], line[-1]))] for line in lines])
        """The first and the last of a line."""
        self.stage = self.own(grid.alike("stage"))
        self.model = self.own(grid.alike("copy"))
        """Those that have the whole model between them, or a shard of each part of it."""

    def own(self, every: Sequence[Sequence[int]]) -> Together:
        """The group of this process; of ranks that it is not one of, no group. All processes ask for the same."""
        for ranks in map(tuple, every):
            if ranks not in self._made:
                is_all = len(ranks) == dist.get_world_size()
                self._made[ranks] = dist.group.WORLD if is_all else dist.new_group(list(ranks))
        ranks = next((tuple(each) for each in every if self._rank in each), ())
        return Together([*ranks], self._made.get(ranks, dist.GroupMember.NON_GROUP_MEMBER))
