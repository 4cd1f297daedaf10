"""The trained weights as they were at one moment, to compute with for a while. No second model is built.

Each process copies what it computes with of them: whole parameters (one process, DDP, ZeRO-1 and ZeRO-2), or the shards
that whole ones are gathered from (FSDP2, ZeRO-3). To use the copies, they and the weights of now trade places.
References change, and no value is moved: it takes no time, and a GPU may still read the other tensor from host memory.

Not under ZeRO-3 with weights on disk: ``config.compatibility`` refuses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from finetune.compat.deepspeed_private import drop_gathered_weights
from finetune.compat.torch_private import SHARD, free_gathered, sharded_parameters
from finetune.distributed.sharding import engine_of

Place = tuple[Any, str]
"""An object, and the name of its attribute that a forward pass reads a weight from."""


class RememberedWeights:
    """The part of this process of a prepared model's trained weights."""

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []

    def remember(self, model: torch.nn.Module) -> None:
        """Copy the weights as they are now."""
        self.copies = [_copied(getattr(*place)) for place in _places(model)]

    @contextmanager
    def in_place(self, model: torch.nn.Module) -> Iterator[None]:
        """Within it the model computes with the copies, without gradients. Every process must enter it."""
        places = _places(model)
        _drop_gathered(model)
        now = [getattr(*place) for place in places]
        try:
            _put(places, self.copies)
            yield
        finally:
            _put(places, now)
            _drop_gathered(model)


def _places(model: torch.nn.Module) -> list[Place]:
    """Of each trained weight, in the model's order."""
    if shards := sharded_parameters(model):
        return [(each, SHARD) for each in shards if each.sharded_param.requires_grad]
    trained: list[Any] = [each for each in model.parameters() if each.requires_grad]
    return [(each.ds_tensor if _cuts_parameters(model) else each, "data") for each in trained]


def _put(places: list[Place], tensors: list[torch.Tensor]) -> None:
    for (holder, name), tensor in zip(places, tensors, strict=True):
        setattr(holder, name, tensor)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    return copy.pin_memory() if tensor.is_pinned() else copy


def _drop_gathered(model: torch.nn.Module) -> None:
    """Have every weight gathered anew, also those that stay gathered from one pass to the next."""
    free_gathered(model)
    if _cuts_parameters(model):
        drop_gathered_weights(engine_of(model).optimizer)


def _cuts_parameters(model: torch.nn.Module) -> bool:
    """Whether it is under ZeRO-3."""
    engine = engine_of(model)
    return engine is not None and engine.zero_optimization_stage() == 3
