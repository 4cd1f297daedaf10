"""What a process has of a model of which no process has all: layers of one stage, parts of layers, some experts.

Processes that have parts of the same layers, or of the same experts, are a group: of four processes in groups of two,
ranks 0 and 1 are one. Groups of a stage are replicas of one another: where there is one stage, ranks 0 and 2 hold the
same. What is not split, every process of a group has in full. What is of another stage, no process of a group has.
Where parts are sharded (``part_shards``), ranks 0 and 2 hold shards of the same instead.

Gradients are added up within a group, then over replicas, and at last those of embeddings that are the head's weights
too, which the first and the last stage have.

Example: a weight of shape (8, 6) whose rows are split. Rank 3 holds part 1, rows 4 to 7, as does rank 1: of the 2
processes that hold this part it is number 1. Of a norm, which is whole, it is number 3 of 4.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from finetune.compat.torch_private import all_gather_single
from finetune.config.strategy_names import STAGES, Size, in_parts
from finetune.distributed import pipeline_step
from finetune.distributed.clipping import clip_parts
from finetune.distributed.part_groups import Grid, Groups
from finetune.distributed.part_shards import share_of, whole_part
from finetune.distributed.pipeline import PassedOn, Pipeline
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
    """What this process holds of a parameter, or would if it were of its stage.

    Args:
        shape: of the whole parameter.
        size: of a group.
        group: this process's own.
    """
    _, number, place = Grid(strategy.world_size, strategy.stages, size).of(strategy.rank)
    copies = size // share.split.parts
    part, copy = divmod(place, copies)
    groups, number = (1, 0) if strategy.shards_parts else (strategy.world_size // strategy.stages // size, number)
    return Held(share, part, copies, copy, groups * copies, number * copies + copy, group, shape)


class HeldParts:
    """This process's parts of a model, and what is done with those of all processes. As it is, of a model whose layers
    are whole: a stage of a pipeline, which ``Pipeline`` leaves. Collective.

    Args:
        model: whole, with its adapter, not prepared yet.
        size: of a group.
        shares: of the parameters that are split, by name.
    """

    split: ClassVar[Size | None] = None
    """Over how many processes layers or experts are split."""
    proven_by: ClassVar[str] = "weights"
    """Whose bytes show that the strategy is active."""

    def __init__(
        self,
        model: Any,
        strategy: Strategy,
        device: torch.device,
        size: int = 1,
        shares: Mapping[str, Share] | None = None,
    ) -> None:
        grid, shares = Grid(strategy.world_size, strategy.stages, size), shares or {}
        self.size, self.place, self.device = size, grid.of(strategy.rank).place, device
        self.groups = Groups(grid, strategy.rank)
        self.shards = strategy.shards
        """Into which each part is cut."""
        *_, last_stage = grid.alike("stage")
        self.knowing = [rank for rank in last_stage if rank % strategy.tensor == 0]
        """Processes that count the loss of what they compute: one of those that compute the same."""
        self.shares = [rank // strategy.tensor % len(self.knowing) for rank in range(strategy.world_size)]
        """Which of these counts what each process computes."""
        self.counts = strategy.rank in self.knowing
        self.held = {
            name: held_of(shares.get(name, Share()), each.shape, strategy, size, self.groups.parts.group)
            for name, each in model.named_parameters()
        }
        """Of all parameters of the whole model; a process has those of its stage."""
        self.pipeline: Pipeline | None = None
        """Of which the model is a stage."""
        _known[model] = self

    @property
    def strategy(self) -> str:
        """The one that leaves such parts, told from what there is."""
        found = in_parts([*filter(None, [self.split]), *([STAGES] if self.pipeline else [])])
        assert found is not None
        return found

    def owns(self, name: str) -> bool:
        """Whether this stage counts a parameter."""
        return self.pipeline is None or self.pipeline.owns(name)

    def settle(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Leave of some parameters of a model, by their names, what this process has of them, on its device. All begin
        with the values of the first that has them. Collective."""
        replicas = self.groups.replicas
        for name, each in parameters.items():
            if not each.is_meta:
                model.get_submodule(name.rpartition(".")[0]).to(self.device)  # quantised weights with their scales
                if len(replicas.ranks) > 1:
                    dist.broadcast(each.data, replicas.ranks[0], group=replicas.group)

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
        if self.pipeline:
            losses = pipeline_step.backward(self.pipeline, model, loss_sum, micro_batches, scale)
        else:
            losses = [self._backward(model, loss_sum, each, scale) for each in micro_batches]
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        has_one = torch.tensor([each.grad is not None for each in trained.values()], dtype=torch.uint8).to(self.device)
        if trained:  # in this stage
            dist.all_reduce(has_one, op=dist.ReduceOp.MAX, group=self.groups.stage.group)
        for parameter, is_known in zip(trained.values(), has_one.tolist(), strict=True):
            if is_known and parameter.grad is None:  # of experts that no token of this process has passed, for example
                parameter.grad = torch.zeros_like(parameter)
        gradients = {name: local_shard(each.grad) for name, each in trained.items() if each.grad is not None}
        self._reduce(gradients)
        if self.pipeline:
            self.pipeline.add_up_ends(gradients)
        return losses if self.counts else [each * 0 for each in losses]

    def try_out(self, model: torch.nn.Module, loss_sum: LossSum, micro_batch: Any, micro_batches: int) -> None:
        """The memory of a step of so many micro-batches like this one, with a loss that is multiplied by 0.
        Collective."""
        every, buffers = [micro_batch], None
        if self.pipeline:
            every, buffers = pipeline_step.shortest_alike(self.pipeline, model, micro_batch, micro_batches)
        self.backward(model, loss_sum, every, lambda loss: loss * 0)
        del buffers

    @staticmethod
    def _backward(
        model: torch.nn.Module, loss_sum: LossSum, micro_batch: Any, scale: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The graph lives in this frame only."""
        loss = loss_sum(model, micro_batch)
        scale(loss).backward()
        return loss.detach()

    def _reduce(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add up, in place, what the processes of a stage have of each gradient; where parts are sharded, what those of
        a group have of it, since the backward pass has added up the rest. Collective."""
        replicas = self.groups.replicas
        if self.shards == 1 < len(replicas.ranks):
            sums = [dist.all_reduce(each, group=replicas.group, async_op=True) for each in gradients.values()]
            for work in sums:
                work.wait()

    def clip(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the gradients of all parts by their common norm, which is returned as it was before. Each part counts
        once. Collective."""
        groups = self.shards, self.groups.model.group, self.groups.replicas.group
        return clip_parts(model, max_norm, *groups, counts=self._counts_gradient, device=self.device)

    def _counts_gradient(self, name: str) -> bool:
        """Whether that of this process counts, of all that are the same."""
        return self.held[name].copy == 0 and self.owns(name)

    def proves(self, held: Held) -> bool:
        """Whether the bytes of a parameter show that the strategy is active."""
        return True

    def bytes_of_shares(self, model: torch.nn.Module) -> tuple[int, int, int]:
        """Of the parameters that prove it: in the whole model, what a process should hold, and what this one does."""
        every = [(each, self.held[name]) for name, each in model.named_parameters() if name in self.held]
        proof = [(each, held) for each, held in every if self.proves(held)]
        of_stage = {*(self.pipeline.own_parameters() if self.pipeline else model.parameters())}
        whole = [held.shape.numel() * each.element_size() for each, held in proof]
        shares = [
            share_of(size // held.share.split.parts, each.shape, self.shards)
            for size, (each, held) in zip(whole, proof, strict=True)
            if each in of_stage
        ]
        return sum(whole), sum(shares), sum(local_shard(each).nbytes for each, _ in proof if not each.is_meta)

    @torch.no_grad()
    def parameters(self, model: torch.nn.Module, *, with_frozen: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole value of each trained parameter of all stages. Collective.

        Args:
            with_frozen: of all others too.
        """
        known, shells = dict(model.named_parameters()), self.pipeline.shells if self.pipeline else {}
        for name in (name for name in known if name in self.held):
            if not (with_frozen or known[name].requires_grad or name in shells):
                continue
            held, own = self.held[name], known[name].detach()
            if self.owns(name):
                part = whole_part(own).view(-1)
                whole = held.joined(part, part.numel() // held.stretch).view(held.shape)
            else:
                whole = torch.empty(held.shape, dtype=own.dtype, device=self.device)
            if self.pipeline:
                self.pipeline.broadcast(whole, name)
            yield name, whole

    def told(self, function: Callable[[], torch.Tensor], *shape: int) -> torch.Tensor:
        """What a function of forward passes returns, in the process that counts it; zeros of its shape in others.
        Collective over the processes that compute the same rows."""
        try:
            found = function()
        except PassedOn:
            return torch.zeros(shape, device=self.device)
        return found if self.counts else torch.zeros_like(found)

    def figures(self, found: dict[str, Any]) -> dict[str, Any]:
        """Figures of the loss, in the process that counts them; of the same names with zeros in others. Collective."""
        names = self.pipeline.from_the_last([*found]) if self.pipeline else [*found]
        zero = torch.zeros((), device=self.device)
        return found if self.counts else dict.fromkeys(names, (zero, zero))


_known: "weakref.WeakKeyDictionary[torch.nn.Module, HeldParts]" = weakref.WeakKeyDictionary()


def part_of(model: torch.nn.Module) -> HeldParts | None:
    """What this process has of a model, where no process has all of it, and no framework gathers the parts."""
    return _known.get(model)


def pipeline_of(model: torch.nn.Module) -> Pipeline | None:
    """The pipeline that a model is a stage of."""
    part = part_of(model)
    return part.pipeline if part else None
