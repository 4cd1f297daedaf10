"""Which of a model's modules each stage of a pipeline has."""

from typing import Any

import torch

from finetune.models.recomputation import layers_of
from finetune.models.stage_cuts import cuts

OTHERWISE = {"codegen", "falcon", "gemma3n_text", "gptj", "mpt"}
"""Types of models whose layers do not hand on one hidden state for a position: they return tuples, or several."""


def units_of(model: Any) -> list[list[torch.nn.Module]]:
    """The modules that have weights, in the order in which a row passes them: a list for each layer.

    The embedding is with the first, what comes after the layers with the last. Empty where a model has other weights
    beside its layers, or not one list of them, or hands on more than hidden states.
    """
    base, layers = model.base_model, layers_of(model)
    if model.config.get_text_config().model_type in OTHERWISE:
        return []
    children = list(base.children())
    lists = [each for each in children if isinstance(each, torch.nn.ModuleList) and list(each) == layers]
    if not lists or not layers:
        return []
    place, head = children.index(lists[0]), model.get_output_embeddings()
    units: list[list[torch.nn.Module]] = [[layer] for layer in layers]
    units[0] = [model.get_input_embeddings(), *units[0]]
    units[-1] += [*filter(_has_weights, children[place + 1 :]), head]
    known = {parameter for unit in units for each in unit for parameter in each.parameters()}
    return units if known == set(model.parameters()) else []


def stages_of(model: Any, stages: int) -> list[list[torch.nn.Module]]:
    """The modules of each stage, of which the dearest costs as little as can be."""
    units = units_of(model)
    return [[module for unit in units[first:end] for module in unit] for first, end in cuts(costs_of(model), stages)]


def costs_of(model: Any) -> list[float]:
    """Of each unit, the multiplications for a token; the last has those of the head."""
    config, embedding = model.config.get_text_config(), model.get_input_embeddings()
    return [sum(_cost(each, config) for each in unit if each is not embedding) for unit in units_of(model)]


def _has_weights(module: torch.nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _cost(module: torch.nn.Module, config: Any) -> float:
    """Multiplications for each token."""
    found = 0.0
    for part in module.modules():
        if isinstance(part, torch.nn.Linear):
            found += part.in_features * part.out_features
        else:  # of experts, which each token passes some of
            used, there = getattr(config, "num_experts_per_tok", 1), _experts_of(config)
            found += sum(each.numel() * used / there for each in part.parameters(recurse=False) if each.ndim == 3)
    return found


def _experts_of(config: Any) -> int:
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
