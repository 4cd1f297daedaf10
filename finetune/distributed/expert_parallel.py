"""Expert parallelism: the processes of a group share the experts of each layer, and exchange tokens.

All processes compute different rows, and are replicas in all that is no expert: what ddp does, written out, since the
gradients of experts are added up over fewer processes. Through the exchanges of a group (``models.expert_layers``) they
are already sums over its tokens.

Experts lie one after another in the first dimension of a layer's parameters: a process has one stretch of each. The
adapters of experts, in which they do not, every process has of all.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from finetune.compat.peft_private import adapt_own_experts
from finetune.config.strategy_names import EXPERTS
from finetune.distributed.held_parts import Held, HeldParts
from finetune.distributed.strategy import Strategy
from finetune.models.expert_layers import exchange_tokens, expert_modules
from finetune.models.tensor_plan import Share, Split


class ExpertParallel(HeldParts):
    """This process's share of a model, which from here on has no experts but those. Collective.

    Args:
        model: whole, with its adapter, not prepared yet. ``settle`` makes its own copy of the share.
    """

    split = EXPERTS
    proven_by = "experts"

    def __init__(self, model: Any, strategy: Strategy, device: torch.device) -> None:
        modules, size = expert_modules(model), strategy.experts
        names = [f"{name}.{own}" for name, module in modules.items() for own, _ in module.named_parameters()]
        super().__init__(model, strategy, device, size, dict.fromkeys(names, Share(Split(parts=size))))
        for name, parameter in model.named_parameters():
            held = self.held[name]
            if held.is_split:
                parameter.data = held.share.split.take(parameter.data, held.part)
        for module in modules.values():
            exchange_tokens(module, self.groups.parts.group)
        if hasattr(model, "peft_config"):
            adapt_own_experts(model, self.place, size)

    def settle(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            held = self.held[name]
            parameter.data = parameter.data.to(self.device, copy=held.is_split)  # with no memory of the others'
            dist.broadcast(parameter.data, held.part, group=self._owners(name))

    def _owners(self, name: str) -> Any:
        """The processes that have the same values of a parameter; None for all."""
        return self.groups.replicas.group if self.held[name].is_split else None

    def _reduce(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for is_split in (False, True):  # one after the other: NCCL may hang where two groups are on their way at once
            own = {name: each for name, each in gradients.items() if self.held[name].is_split == is_split}
            sums = [dist.all_reduce(each, group=self._owners(name), async_op=True) for name, each in own.items()]
            for work in sums:
                work.wait()

    def proves(self, held: Held) -> bool:
        return held.is_split
