"""What a prepared model is a part of, where a process has a part of it that no framework gathers."""

import torch

from finetune.distributed.expert_parallel import ExpertParallel
from finetune.distributed.held_parts import HeldParts, held_parts_of
from finetune.distributed.pipeline import Pipeline, pipeline_of
from finetune.distributed.strategy import Strategy
from finetune.distributed.tensor_parallel import TensorParallel


def part_of(model: torch.nn.Module) -> Pipeline | HeldParts | None:
    """The pipeline that a model is a stage of, or the parts that this process holds of its layers or experts.

    Of each it can be asked for whole weights, for a loss, and to clip gradients.
    """
    return pipeline_of(model) or held_parts_of(model)


def take_part(model: torch.nn.Module, strategy: Strategy, device: torch.device) -> Pipeline | HeldParts | None:
    """The part of a model that this process has, of which the parameters are settled then. Collective.

    A pipeline has left its stage when the optimizer was built.
    """
    if strategy.tensor > 1:
        TensorParallel(model, strategy, device)
    if strategy.experts > 1:
        ExpertParallel(model, strategy, device)
    part = part_of(model)
    if part:
        for module in model.modules():  # positions, for example, which every process has
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
    return part
