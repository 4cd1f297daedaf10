"""What a trace must know of a model before it: its sizes, and which of its layers are alike."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.errors import InputError
from finetune.hardware.cards import AMPERE
from finetune.models import (
    deferred_gradients,
    expert_layers,
    packing_support,
    pipeline_stages,
    routers,
    tensor_plan,
    text_part,
)
from finetune.models.attention import PACKED
from finetune.models.flops import experts_of_a_token
from finetune.trace.layers import Anatomy, repetition
from finetune.trace.placement import SPLITS
from finetune.trace.tensor_parts import DIVIDED

OF_A_PLACE = {"layer_idx", "layer_index", "training"}
"""Attributes of modules that tell where a layer stands, and not what it is."""


def anatomy_of(config: PreTrainedConfig, skeleton: PreTrainedModel) -> Anatomy:
    """Look at a model without weights.

    Raises:
        InputError: if it has no list of decoder layers, or does not generate text.
    """
    if packing_support.reads_both_ways(skeleton):
        raise InputError(f"{config.model_type} shows each token those that follow it; use a model that generates text.")
    text = config.get_text_config()
    layers = decoder_layers(skeleton, text.num_hidden_layers)
    lead, period = repetition([_kind(layer) for layer in layers])
    head = skeleton.get_output_embeddings()
    every = dict(skeleton.named_parameters())
    linear = [module.weight for module in skeleton.modules() if type(module) is torch.nn.Linear and module is not head]
    total = sum(each.numel() for each in every.values())
    return Anatomy(
        parameters=total,
        active_parameters=total - _idle(text, every),
        linear_parameters=sum(each.numel() for each in linear),
        largest_parameter=max(each.numel() for each in every.values()),
        dimensions=tuple(sorted({size for each in every.values() for size in each.shape})),
        layers=text.num_hidden_layers,
        lead=lead,
        period=period,
        positions=getattr(text, "max_position_embeddings", None),
        keeps_apart=not packing_support.problems(config, attention=PACKED, dtype=torch.bfloat16, capability=AMPERE),
        heads=packing_support.heads_of(config),
        width=text.hidden_size,
        costs=tuple(pipeline_stages.costs_of(skeleton)),
        deferrable_share=deferred_gradients.share_of(skeleton),
        deferrable_width=deferred_gradients.width_of(skeleton),
        ties=head is not None and head.weight is skeleton.get_input_embeddings().weight,
        not_spread=tuple(packing_support.why_not_spread(config, dtype=torch.bfloat16, capability=AMPERE)),
        sizes=_shared_sizes(text, skeleton) if config is text else (),
        experts=expert_layers.experts_of(skeleton),
        not_split=tuple(
            (parts, bits, reason)
            for parts in SPLITS
            for bits in (None, 4)
            for reason in list(tensor_plan.why_not(skeleton, parts, bits=bits))[:1]
        ),
        split_names=tuple(sorted(tensor_plan.split_names(skeleton))),
        router_coefficient=routers.own_coefficient(skeleton),
        balances=routers.top_k_of(skeleton) is not None,
    )


def _shared_sizes(text: PreTrainedConfig, skeleton: PreTrainedModel) -> tuple[tuple[str, int], ...]:
    """By which a part of the model is one like it: not where outputs of a layer are put together again in it."""
    if tensor_plan.puts_together(skeleton):
        return ()
    known = {key: getattr(text, key, None) for key in DIVIDED}
    head_size = getattr(text, "head_dim", None) or text.hidden_size // packing_support.heads_of(text)[0]
    return (*((key, size) for key, size in known.items() if isinstance(size, int)), ("head_dim", head_size))


def decoder_layers(model: torch.nn.Module, layers: int) -> torch.nn.ModuleList:
    """A model's decoder layers: the first list of so many modules in it.

    Raises:
        InputError: if there is none.
    """
    for module in text_part.decoder_of(model).modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers:
            return module
    raise InputError(f"The model has no list of {layers} layers, so its step cannot be traced layer by layer.")


def _kind(layer: torch.nn.Module) -> object:
    """What tells a layer from others: its modules, their shapes, and their settings."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple((key, tuple(each.shape)) for key, each in module.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, int | float | str | None) and key not in OF_A_PLACE
            ),
        )
        for name, module in layer.named_modules()
    )


def _idle(text: PreTrainedConfig, parameters: dict[str, torch.nn.Parameter]) -> int:
    """Elements of experts that a token does not meet."""
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    chosen = experts_of_a_token(text)
    if not experts or not chosen:
        return 0
    stacked = sum(each.numel() for each in parameters.values() if each.ndim == 3 and each.shape[0] == experts)
    return stacked * (experts - chosen) // experts
