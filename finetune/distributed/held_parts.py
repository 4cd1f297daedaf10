"""A model of which each process of a group holds parts of some parameters: what tensor and expert parallelism share.

Neighbours are a group: of four processes in groups of two, ranks 0 and 1 are one. Groups are replicas of one another:
ranks 0 and 2 hold the same. What is not split, every process of a group has in full.

Where parts are sharded (``part_shards``), ranks 0 and 2 hold shards of the same instead.

Example: a weight of shape (8, 6) whose rows are split. Rank 3 holds part 1, rows 4 to 7, as does rank 1: of the 2
processes that hold this part it is number 1. Of a norm, which is whole, it is number 3 of 4.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from finetune.compat.torch_private import all_gather_single
from finetune.distributed.clipping import clip_parts
from finetune.distributed.part_shards import share_of, whole_part
from finetune.distributed.strategy import Strategy
from finetune.models.tensor_plan import Share, join_flat, take_flat
from finetune.optim.rounding import local_shard

LossSum = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Held:
    """What this process holds of a parameter."""

    share: Share
    part: int
    """Which of the parts."""
    copies: int
    """Processes of the group that hold the same."""
    copy: int
    """Which of them this is."""
    holders: int
    """Processes of the launch that hold the same, or the same shard of it."""
    holder: int
    """Which of them this is."""
    group: Any
    """The whole group."""
    shape: torch.Size
    """Of the whole parameter."""

    @property
    def is_split(self) -> bool:
        return self.share.split.parts > 1

    @property
    def stretch(self) -> int:
        """Elements of a part that follow one another in the flattened parameter: it consists of ranges of so many."""
        split = self.share.split
        return self.shape.numel() // split.parts // split.stretches(self.shape)

    @torch.no_grad()
    def joined(self, own: torch.Tensor, stretches: int) -> torch.Tensor:
        """The flattened parameter from its flattened parts, or what there is for each few elements of it; or a range of
        it from shards of parts. Collective over the group.

        Args:
            stretches: that ``own`` consists of.
        """
        if not self.is_split:
            return own
        size = dist.get_world_size(self.group)
        if stretches == self.copies == 1:  # the parts lie one after another: no second copy
            whole = own.new_empty(size * own.numel())
            all_gather_single(whole, own, group=self.group)
            return whole
        every = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(every, own, group=self.group)
        return join_flat(every[:: self.copies], stretches)

    def own(self, whole: torch.Tensor, stretches: int) -> torch.Tensor:
        """The reverse."""
        return take_flat(whole, self.part, self.share.split.parts, stretches)


def held_of(share: Share, shape: torch.Size, strategy: Strategy, size: int, group: Any) -> Held:
    """What this process holds of a parameter.

    Args:
        shape: of the whole parameter.
        size: of a group.
        group: this process's own.
    """
    number, place = divmod(strategy.rank, size)
    copies = size // share.split.parts
    part, copy = divmod(place, copies)
    groups, number = (1, 0) if strategy.shards_parts else (strategy.world_size // size, number)
    return Held(share, part, copies, copy, groups * copies, number * copies + copy, group, shape)


class HeldParts(ABC):
    """This process's parts of a model, and what is done with those of all processes.

    Args:
        model: whole, with its adapter, not prepared yet.
        size: of a group.
        shares: of the parameters that are split, by name.
    """

    strategy: ClassVar[str]
    """By which it is launched."""
    proven_by: ClassVar[str] = "weights"
    """Whose bytes show that the strategy is active."""

    def __init__(
        self, model: Any, strategy: Strategy, device: torch.device, size: int, shares: Mapping[str, Share]
    ) -> None:
        self.size, self.place, self.device = size, strategy.rank % size, device
        ranks = [*range(strategy.world_size)]
        self.groups = [ranks[first : first + size] for first in ranks[::size]]
        self.group = [dist.new_group(each) for each in self.groups][strategy.rank // size]
        self.same_place = ranks[self.place :: size]
        self.replicas = [dist.new_group(ranks[place::size]) for place in range(size)][self.place]
        """The processes in the same place of each group, which hold the same parts, or shards of the same."""
        self.shards = strategy.shards
        """Into which each part is cut."""
        self.shares = strategy.shares
        """Of the rows, that of each process."""
        self.knowing = [self.shares.index(share) for share in range(strategy.data_processes)]
        """The process that counts the loss, for each share of the rows."""
        self.counts = strategy.rank in self.knowing
        self.held = {
            name: held_of(shares.get(name, Share()), each.shape, strategy, size, self.group)
            for name, each in model.named_parameters()
        }
        _known[model] = self

    @abstractmethod
    def settle(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Leave of some parameters of a model, by their names, what this process has of them, on its device. All begin
        with the values of the first that has them. Collective."""

    def backward(
        self,
        model: torch.nn.Module,
        loss_sum: LossSum,
        micro_batches: Iterable[Any],
        scale: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[torch.Tensor]:
        """The gradients of a step, of all micro-batches and processes. Collective.

        Args:
            scale: a loss to what gradients are of.

        Returns:
            The losses, in the process that counts them; zeros in others that compute the same, and NaN for one that is
            not finite.
        """
        losses = [self._backward(model, loss_sum, each, scale) for each in micro_batches]
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        has_one = torch.tensor([each.grad is not None for each in trained.values()], dtype=torch.uint8).to(self.device)
        dist.all_reduce(has_one, op=dist.ReduceOp.MAX)
        for parameter, is_known in zip(trained.values(), has_one.tolist(), strict=True):
            if is_known and parameter.grad is None:  # of experts that no token of this process has passed, for example
                parameter.grad = torch.zeros_like(parameter)
        self._reduce({name: local_shard(each.grad) for name, each in trained.items() if each.grad is not None})
        return losses if self.counts else [each * 0 for each in losses]

    @staticmethod
    def _backward(
        model: torch.nn.Module, loss_sum: LossSum, micro_batch: Any, scale: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The graph lives in this frame only."""
        loss = loss_sum(model, micro_batch)
        scale(loss).backward()
        return loss.detach()

    @abstractmethod
    def _reduce(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add up, in place, what the processes of the launch have of each gradient; where parts are sharded, those of a
        group have of it. Collective."""

    def clip(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the gradients of all parts by their common norm, which is returned as it was before. Each part counts
        once. Collective."""
        groups = self.shards, self.group, self.replicas
        return clip_parts(model, max_norm, *groups, counts=lambda name: self.held[name].copy == 0, device=self.device)

    def proves(self, held: Held) -> bool:
        """Whether the bytes of a parameter show that the strategy is active."""
        return True

    def bytes_of_shares(self, model: torch.nn.Module) -> tuple[int, int, int]:
        """Of the parameters that prove it: in the whole model, what a process should hold, and what this one does."""
        proof = [(each, held) for name, each in model.named_parameters() if self.proves(held := self.held[name])]
        whole = [held.shape.numel() * each.element_size() for each, held in proof]
        shares = [
            share_of(size // held.share.split.parts, each.shape, self.shards)
            for size, (each, held) in zip(whole, proof, strict=True)
        ]
        return sum(whole), sum(shares), sum(local_shard(each).nbytes for each, _ in proof)

    def parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole value of each trained parameter. Collective over the group."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                held = self.held[name]
                part = whole_part(parameter.detach()).view(-1)
                yield name, held.joined(part, part.numel() // held.stretch).view(held.shape)

    def told(self, function: Callable[[], torch.Tensor], *shape: int) -> torch.Tensor:
        """What a function of forward passes returns, in the process that counts it; zeros in others, which compute the
        same. Collective over the group."""
        found = function()
        return found if self.counts else torch.zeros_like(found)

    def figures(self, found: dict[str, Any]) -> dict[str, Any]:
        """Figures of the loss, in the process that counts them; zeros in others, which have the same."""
        if self.counts:
            return found
        return {name: type(each)(*(torch.zeros_like(value) for value in each)) for name, each in found.items()}


_known: "weakref.WeakKeyDictionary[torch.nn.Module, HeldParts]" = weakref.WeakKeyDictionary()


def held_parts_of(model: torch.nn.Module) -> HeldParts | None:
    """The parts that this process holds of a model."""
    return _known.get(model)
