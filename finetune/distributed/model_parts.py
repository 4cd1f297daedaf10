"""How a process comes to its parts of a model: a stage of its layers, a part of each layer, some of its experts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from finetune.distributed.expert_parallel import ExpertParallel
from finetune.distributed.held_parts import HeldParts, part_of, pipeline_of
from finetune.distributed.pipeline import Pipeline
from finetune.distributed.strategy import Strategy
from finetune.distributed.tensor_parallel import TensorParallel
from finetune.models.deferred_gradients import DeferredGradients, deferring_layers
from finetune.models.pipeline_order import Order


def take_part(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    device: torch.device,
    dtype: torch.dtype,
    order: Order,
) -> HeldParts | None:
    """The parts of a model that this process has, of which the parameters are settled then. Collective.

    What is done around a layer comes one after another: it defers gradients, its processes put parts together, and a
    pipeline takes its turns.

    Args:
        optimizer: of the whole model, by which its rates and groups go; it keeps what this process steps.
        dtype: in which the model computes.
        order: in which micro-batches pass the stages of a pipeline.
    """
    if known := part_of(model):  # of a dry run, whose model is a part by itself
        return known
    deferred = DeferredGradients(deferring_layers(model)) if order.zero_bubble else None
    if strategy.tensor > 1:
        part: HeldParts = TensorParallel(model, strategy, device)
    elif strategy.experts > 1:
        part = ExpertParallel(model, strategy, device)
    elif strategy.stages > 1:
        part = HeldParts(model, strategy, device)
    else:
        return None
    if strategy.stages > 1:
        part.pipeline = Pipeline(model, strategy, part.groups, device, dtype, order, deferred)
        part.pipeline.leave_own(optimizer)
    for module in model.modules():  # positions, for example, which every process has
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return part


@contextmanager
def trained_everywhere(model: torch.nn.Module) -> Iterator[None]:
    """Within it parameters that other stages train are trained ones of this model, too: for the list of a result."""
    shells = pipeline.shells.values() if (pipeline := pipeline_of(model)) else ()
    for shell in shells:
        shell.requires_grad = True
    try:
        yield
    finally:
        for shell in shells:
            shell.requires_grad = False
