"""Activation checkpointing: layers that keep their input alone, and are computed again in the backward pass.

The first layers are recomputed, and the last ones keep what they computed: when the backward pass comes to a recomputed
layer, what the others kept is gone. Of 32 layers of which 12 are recomputed, at most 20 layers' activations, 12 inputs,
and those of one layer beside them exist at a time, and not all of these together.
"""

import warnings
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.config.refusals import recomputation_problems
from finetune.models.activation_offload import offload_activations
from finetune.models.text_part import decoder_of


def recompute_activations(model: PreTrainedModel, layers: int | None = None, *, offloads: bool = False) -> None:
    """Keep the input of each layer alone, and compute the rest again in the backward pass.

    Args:
        layers: of how many, the first ones; None for all.
        offloads: keep these inputs in host memory, and what attention returned, which is not computed again.
    """
    with warnings.catch_warnings():  # transformers has renamed it in 5.20; under the old name it is there until 6
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if layers is not None:
        for layer in layers_of(model)[layers:]:
            layer.gradient_checkpointing = False
    if offloads:
        model.disable_input_require_grads()  # of frozen embeddings a graph would keep what they return
        offload_activations(layers_of(model))


def layers_of(model: torch.nn.Module) -> list[Any]:
    """The layers that can be recomputed one by one, in their order."""
    return [module for module in decoder_of(model).modules() if isinstance(module, GradientCheckpointingLayer)]


def recomputed_parts(model: torch.nn.Module) -> set[torch.nn.Module]:
    """All modules that compute twice in a step."""
    layers = layers_of(model)
    if not layers:  # of a model whose decoder recomputes all of them by itself
        layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    return {part for layer in layers if layer.gradient_checkpointing for part in layer.modules()}


def problems(model: PreTrainedModel, layers: int | None, *, offloads: bool = False) -> list[str]:
    """Why so many of a model's layers cannot be recomputed, as a sentence.

    Args:
        model: its weights may be on the meta device.
        offloads: what they keep is in host memory.
    """
    there = len(layers_of(model))
    if layers != 0 and not model.supports_gradient_checkpointing:
        return [
            f"{type(model).__name__} of transformers cannot recompute activations; set "
            "train.activation_checkpointing to none."
        ]
    if (layers or offloads) and not there:
        asked = "offload" if offloads else layers
        return [
            f"train.activation_checkpointing is {asked}, but the layers of this model cannot be recomputed one by "
            "one; set it to none or full."
        ]
    return recomputation_problems(layers, there)
