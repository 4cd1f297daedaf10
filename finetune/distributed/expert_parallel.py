"""Expert parallelism: the processes of a group share the experts of each layer, and exchange tokens.

Neighbours are a group: of four processes in groups of two, ranks 0 and 1 share the experts of every layer, and ranks 2
and 3 have the same shares. All processes compute different rows, and are replicas in all that is no expert: what ddp
does, written out, since the gradients of experts are added up over fewer processes. Through the exchanges of a group
(``models.expert_layers``) they are already sums over its tokens.

Experts lie one after another in the first dimension of a layer's parameters: a process has one stretch of each. The
adapters of experts, in which they do not, every process has of all.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from finetune.compat.peft_private import adapt_own_experts
from finetune.distributed.strategy import Strategy
from finetune.models.expert_layers import exchange_tokens, expert_modules

LossSum = Callable[[torch.nn.Module, Any], torch.Tensor]


class ExpertParallel:
    """This process's share of a model, which from here on has no experts but those. Collective.

    Args:
        model: whole, with its adapter, not prepared yet.
    """

    def __init__(self, model: Any, strategy: Strategy, device: torch.device) -> None:
        self.size, self.device = strategy.experts, device
        ranks = [*range(strategy.world_size)]
        self.copy, self.place = divmod(strategy.rank, self.size)
        """Which of the groups this process is in, and which share it has."""
        self.copies = strategy.world_size // self.size
        """How many have the same share."""
        self.group = [dist.new_group(ranks[first : first + self.size]) for first in ranks[:: self.size]][self.copy]
        self.replicas = [dist.new_group(ranks[place :: self.size]) for place in range(self.size)][self.place]
        """The processes that have the same share."""
        modules = expert_modules(model)
        self.shared = {f"{name}.{own}" for name, module in modules.items() for own, _ in module.named_parameters()}
        """Names of the parameters of experts."""
        self.shapes = {name: each.shape for name, each in model.named_parameters()}
        """Of all parameters of the whole model."""
        for name, parameter in model.named_parameters():
            if name in self.shared:
                parameter.data = parameter.data.chunk(self.size)[self.place].to(device, copy=True)
        for module in modules.values():
            exchange_tokens(module, self.group)
        if hasattr(model, "peft_config"):
            adapt_own_experts(model, self.place, self.size)
        model.to(device)
        for name, parameter in model.named_parameters():  # all begin with the weights of the first
            dist.broadcast(parameter.data, self.place if name in self.shared else 0, group=self._owners(name))
        _known[model] = self

    def _owners(self, name: str) -> Any:
        """The processes that have the same values of a parameter; None for all."""
        return self.replicas if name in self.shared else None

    def begin(self, name: str, count: int) -> int:
        """Of ``count`` elements of a parameter that this process has, the index of the first in the whole parameter."""
        return self.place * count if name in self.shared else 0

    def same(self, name: str) -> tuple[int, int]:
        """Processes that have the same values of a parameter, and which of them this is."""
        if name in self.shared:
            return self.copies, self.copy
        return self.copies * self.size, self.copy * self.size + self.place

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
            The losses of this process.
        """
        losses = [self._backward(model, loss_sum, each, scale) for each in micro_batches]
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        for parameter in trained.values():
            if parameter.grad is None:  # of what no token of this process has passed
                parameter.grad = torch.zeros_like(parameter)
        sums = [dist.all_reduce(each.grad, group=self._owners(name), async_op=True) for name, each in trained.items()]
        for work in sums:
            work.wait()
        return losses

    @staticmethod
    def _backward(
        model: torch.nn.Module, loss_sum: LossSum, micro_batch: Any, scale: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The graph lives in this frame only."""
        loss = loss_sum(model, micro_batch)
        scale(loss).backward()
        return loss.detach()

    def clip(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip all gradients by their common norm, which is returned as it was before: each expert counts once.
        Collective."""
        learnt = [(name, each) for name, each in model.named_parameters() if each.grad is not None]
        of_experts = self._square([each for name, each in learnt if name in self.shared])
        dist.all_reduce(of_experts, group=self.group)
        norm = (of_experts + self._square([each for name, each in learnt if name not in self.shared])).sqrt()
        torch.nn.utils.clip_grads_with_norm_([each for _, each in learnt], max_norm, norm)
        return norm

    def _square(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        """Of the norm of their gradients."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).to(self.device, torch.float32).square()

    @torch.no_grad()
    def parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole value of each trained parameter. Collective over the group."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield name, self._whole(parameter.detach()) if name in self.shared else parameter.detach()

    def _whole(self, own: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.group)
        return torch.cat(every)


_known: "weakref.WeakKeyDictionary[torch.nn.Module, ExpertParallel]" = weakref.WeakKeyDictionary()


def expert_parallel_of(model: torch.nn.Module) -> ExpertParallel | None:
    """The share that a model is."""
    return _known.get(model)
