"""Which of a model's modules each stage of a pipeline has."""

import inspect
from typing import Any

import torch

from finetune.models.flops import products_of
from finetune.models.recomputation import layers_of
from finetune.models.stage_cuts import cuts

OTHERWISE = {
    *("bamba", "codegen", "deepseek_v4", "falcon", "falcon_h1", "gemma3n_text", "gptj", "mpt", "rwkv", "xlstm"),
}
"""Types of models whose layers do not hand on one hidden state for a position: they return tuples, or several."""
BESIDE = ("hidden_size_per_layer_input", "num_kv_shared_layers")
"""In a configuration, not 0 where layers take more than that: an embedding each, or keys of an earlier layer."""
CHOSEN_BEFORE = "prev_topk_indices"
"""What layers take that attend to the positions which an earlier one has chosen (GLM-5, HY-V4, Mistral Large 4)."""


def units_of(model: Any) -> list[list[torch.nn.Module]]:
    """The modules that have weights, in the order in which a row passes them: a list for each layer.

    The embedding is with the first, what comes after the layers with the last. Empty where a model has other weights
    beside its layers, or not one list of them, or hands on more than hidden states.
    """
    base, layers = model.base_model, layers_of(model)
    config = model.config.get_text_config()
    if config.model_type in OTHERWISE or any(getattr(config, name, None) for name in BESIDE):
        return []
    if any(CHOSEN_BEFORE in inspect.signature(type(layer).forward).parameters for layer in layers):
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
    parts = [[part for each in unit if each is not embedding for part in each.modules()] for unit in units_of(model)]
    return [sum(products_of(part, config)[0] for part in unit) for unit in parts]


def _has_weights(module: torch.nn.Module) -> bool:
    return any(True for _ in module.parameters())
