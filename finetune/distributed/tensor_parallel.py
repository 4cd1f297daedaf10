"""Tensor parallelism: the processes of a group have a part of each layer's weights, and compute the same rows.

They exchange hidden states in every layer, best over fast links. The groups are replicas, and compute different rows.

The model is the whole model's object, in which parameters have the values of a part (``models.tensor_plan``), and the
layers' forward passes exchange what they lack (``models.tensor_layers``). All that a process does with a parameter
alone stays as it is: optimizer, adapters, kernels, copies in 16 bits.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from finetune.config.strategy_names import TENSOR
from finetune.distributed.held_parts import HeldParts
from finetune.distributed.part_groups import Together
from finetune.distributed.strategy import Strategy
from finetune.models import quantization, tensor_layers, tensor_plan


class TensorParallel(HeldParts):
    """This process's part of a model, whose layers compute with the group's other processes from here on. Collective.

    Args:
        model: whole, with its adapter, not prepared yet. ``settle`` leaves its part of what its stage has.
    """

    split = TENSOR

    def __init__(self, model: Any, strategy: Strategy, device: torch.device) -> None:
        size = strategy.tensor
        layers, shares = tensor_plan.layers_of(model, size), tensor_plan.shares_of(model, size)
        splits_vocabulary = tensor_plan.splits_vocabulary(model, size)
        super().__init__(model, strategy, device, size, shares)
        numbers = sorted({held.copies for held in self.held.values()} - {1})
        self._same = {copies: self._of_same(copies, strategy) for copies in numbers}
        """By how many processes of a group hold the same part, where several do: those that hold this one's."""
        group = self.groups.parts.group
        tensor_layers.split_forward(model, layers, group)
        if splits_vocabulary:
            tensor_layers.split_embedding(model.get_input_embeddings(), self.place, group)

    def _of_same(self, copies: int, strategy: Strategy) -> Together:
        ranks = range(strategy.world_size)
        return self.groups.own([ranks[first : first + copies] for first in ranks[::copies]])

    def settle(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if not parameter.is_meta:  # of another stage
                parameter.data = self._own(model, name, parameter)

    def _own(self, model: torch.nn.Module, name: str, parameter: Any) -> torch.Tensor:
        """The values of this process, with no memory of the others'. All begin with those of the first. Collective."""
        held, own = self.held[name], parameter.data
        is_quantised = hasattr(parameter, "quant_state")  # of bitsandbytes
        if held.is_split and is_quantised:
            own = quantization.take_part(model.get_submodule(name.rpartition(".")[0]), held.share.split, held.part)
        elif held.is_split:
            own = held.share.split.take(own, held.part)
        if is_quantised:
            parameter.quant_state.to(self.device)
        own = own.to(self.device).clone(memory_format=torch.contiguous_format)
        for same in (self._same.get(held.copies), self.groups.replicas):
            if same and len(same.ranks) > 1:
                dist.broadcast(own, same.ranks[0], group=same.group)
        return own

    def _reduce(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Partial gradients of a group, then those of replicas; equal ones are the first one's, to the bit. Those of
        the processes that share a part have been added up in the backward pass."""
        for name, gradient in gradients.items():
            held = self.held[name]
            same = self._same.get(held.copies)
            if same and held.share.is_partial:
                dist.all_reduce(gradient, group=same.group)
            elif same:
                dist.broadcast(gradient, same.ranks[0], group=same.group)
        super()._reduce(gradients)
