"""Which layers of a model get an adapter, and which modules are trained whole beside it, by their names for PEFT."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune.models import text_part

OTHER_PRODUCTS = ("Llama4Router", "PhimoeTopKRouter", "DeepseekV4GroupedLinear")
"""Classes of transformers that derive from ``Linear`` but return scores and choices, or multiply in groups."""


def linear_layers(model: torch.nn.Module) -> dict[str, Any]:
    """By whole names, the layers that an adapter can add its own product to.

    Of a Mamba block that is ``in_proj`` alone: its kernels read the weights of the others, and would pass adapters by.
    """
    mamba = {name for name, each in model.named_modules() if hasattr(each, "conv1d") and hasattr(each, "D")}
    found = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear | Conv1D)}
    return {
        name: each
        for name, each in found.items()
        if type(each).__name__ not in OTHER_PRODUCTS
        and (name.rpartition(".")[0] not in mamba or name.endswith(".in_proj"))
    }


def target_names(model: PreTrainedModel, targets: str | list[str]) -> str | list[str]:
    """Names for PEFT: whole ones where the model has layers that get no adapter."""
    parts, linear = text_part.unreached(model), linear_layers(model)
    if not parts and len(linear) == sum(isinstance(each, torch.nn.Linear | Conv1D) for each in model.modules()):
        return targets if isinstance(targets, str) else list(targets)
    head = model.get_output_embeddings()
    reached = {name: each for name, each in linear.items() if not text_part.is_within(name, parts)}
    if targets == "all-linear":
        return [name for name, each in reached.items() if each is not head]
    return [name for name in reached if any(f".{name}".endswith(f".{target}") for target in targets)]


def saved_modules(model: PreTrainedModel, modules_to_save: Sequence[str]) -> list[str]:
    """Names for PEFT: whole ones of the text where modules that rows of text do not reach end with the same.

    ``ddp`` would wait for the gradients of those, and the saved adapter would hold a copy of them.
    """
    parts, named = text_part.unreached(model), list[str]()
    for saved in modules_to_save:
        every = ending_with(model, saved)
        text = [name for name in every if not text_part.is_within(name, parts)]
        named += [saved] if text == every else text
    return list(dict.fromkeys(named))


def ending_with(model: PreTrainedModel, saved: str) -> list[str]:
    """Whole names of modules that one name in adapter.modules_to_save stands for to PEFT."""
    return [name for name, _ in model.named_modules() if name.endswith(saved)]
