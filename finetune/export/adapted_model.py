"""Base and adapter in memory: separate, as they were trained, or merged into one model.

A layer is merged by PEFT, given its base weight in fp32 beside the adapter's matrices in fp32, and the sum is rounded
once. One layer is in fp32 at a time, except for 8-bit bases: their dequantised weights need more digits than 16-bit
formats have, and stay in fp32 until they are rounded.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from finetune.compat.transformers_private import forget_conversions
from finetune.export.adapter_source import AdapterSource, inject, saved_names
from finetune.models import adapter, new_tokens
from finetune.models import loading as models
from finetune.models.token_rows import compute_apart
from finetune.units import GIB


def load_as_trained(source: AdapterSource) -> PreTrainedModel:
    """The base with the values that training computed with, and the unmerged adapter in fp32.

    Weights that are not quantised are the stored ones. 4-bit weights are dequantised to the dtype of training, which
    takes as much memory as merging does. 8-bit layers stay as they are, since they round what comes in as well.
    """
    model = _load_base(source, source.bits, source.dtype if source.bits else models.stored_dtype(source.config))
    if source.bits == 4:
        _dequantize(model)
    _attach(model, source)
    return on_device(model)


@contextmanager
def rounding_to(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While a module computes, its weights are what a merge in this dtype would store; afterwards they are restored.

    So the unmerged model shows what rounding alone does. Not for 8-bit layers.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def weights_of(module: Any) -> list[torch.nn.Parameter]:
        own = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        return [weight for weight in own.parameters(recurse=False) if weight.is_floating_point()]

    def narrow(module: Any, _: Any) -> None:
        for weight in weights_of(module):
            kept.setdefault(weight, weight.data)  # PEFT nests layers around experts, one for each of their parameters
            weight.data = weight.data.to(torch.float32, copy=True)
        if module in layers:
            module.merge()
        for weight in weights_of(module):
            weight.data = weight.data.to(dtype)

    def restore(module: Any, *_: Any) -> None:
        for weight in weights_of(module):
            if weight in kept:
                weight.data = kept.pop(weight)
        if module in layers:
            module.merged_adapters.clear()

    layers = {module for module in model.modules() if isinstance(module, BaseTunerLayer)}
    inside = {part for layer in layers for part in layer.modules()} - layers
    with ExitStack() as hooks:
        for module in model.modules():
            if module not in inside:
                hooks.callback(module.register_forward_pre_hook(narrow).remove)
                hooks.callback(module.register_forward_hook(restore).remove)
        yield


def load_to_answer(source: AdapterSource, dtype: torch.dtype) -> PreTrainedModel:
    """The base, quantised where it was for training, and the unmerged adapter in fp32.

    Modules that were saved whole are in the dtype of those whose place they take: they do not cast what comes in.

    Args:
        dtype: of computation, and of weights that are not quantised.
    """
    model = _load_base(source, source.bits, dtype)
    _attach(model, source)
    _cast_whole_modules(model)
    compute_apart(model)
    return on_device(model)


def load_merged(source: AdapterSource, *, dequantized: bool, dtype: torch.dtype) -> PreTrainedModel:
    """Base and adapter as one model, on the CPU.

    Args:
        dequantized: merge onto the values that the quantised base computed with, instead of its stored weights.
        dtype: of the result. What transformers keeps in fp32 beside a 16-bit model stays in fp32.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base_dtype = source.dtype if dequantized else models.stored_dtype(source.config)
    model: Any = _load_base(source, source.bits if dequantized else None, base_dtype)
    kept = {name for name, p in model.named_parameters() if p.is_floating_point() and p.dtype != base_dtype}
    if dequantized:
        _dequantize(model)
        if not source.random_weights:
            model.hf_quantizer.remove_quantization_config(model)
            forget_conversions(model)
    tuner = _attach(model, source)
    for module in list(tuner.modules()):
        if isinstance(module, BaseTunerLayer):
            _merge_layer(module, dtype)
    model = tuner.unload()
    for name, parameter in model.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.to(dtype)
    _tie_if_equal(model)
    return model


def on_device(model: Any) -> Any:
    """The model on the GPU, if it fits with one weight in fp32 and its activations."""
    room = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    in_fp32 = 4 * max(parameter.numel() for parameter in model.parameters())
    fits = 1.2 * model.get_memory_footprint() + in_fp32 + 4 * GIB < room
    return model.to("cuda") if fits and model.device.type != "cuda" else model


def _load_base(source: AdapterSource, bits: int | None, dtype: torch.dtype) -> PreTrainedModel:
    model = models.load_model(
        source.base,
        copy.deepcopy(source.new_tokens.as_stored(source.config)),  # transformers notes in it how it quantised
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        attention="auto",
        dtype=dtype,
        seed=source.seed,
        bits=bits,
        random_weights=source.random_weights,
        device=torch.device("cuda" if bits and torch.cuda.is_available() else "cpu"),
    )
    new_tokens.give_rows(model, source.new_tokens)
    return model


def _attach(model: PreTrainedModel, source: AdapterSource) -> Any:
    """Put the saved adapter into its base, as PEFT's LoraModel."""
    from peft import set_peft_model_state_dict

    tuner = inject(model, source.folder)
    state = load_file(source.folder / adapter.WEIGHTS)
    for parameter, names in saved_names(model).items():
        parameter.data = parameter.data.float()  # PEFT made modules saved whole in the dtype of the base
        saved = next(state[name] for name in names if name in state)
        for name in names:  # PEFT wants a tensor that modules share under the name of each
            state.setdefault(name, saved)
    set_peft_model_state_dict(model, {name.removeprefix(adapter.PREFIX): value for name, value in state.items()})
    model.requires_grad_(False)
    return tuner


def _cast_whole_modules(model: PreTrainedModel) -> None:
    """Give modules that were saved whole the dtypes of the base's own."""
    from peft.utils import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            own: Any = module
            for saved in own.modules_to_save.values():
                for parameter, replaced in zip(saved.parameters(), own.original_module.parameters()):
                    parameter.data = parameter.data.to(replaced.dtype)


def _dequantize(model: Any) -> None:
    """Ordinary linear layers in place of quantised ones, one after the other, on the CPU.

    4-bit layers give the 16-bit values that their products are computed from, 8-bit layers the products of integers
    and fp32 scales.
    """
    import bitsandbytes as bnb
    from peft.utils.integrations import dequantize_module_weight

    for name, layer in list(model.named_modules()):
        if isinstance(layer, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            with torch.device("meta"):
                new = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            weight = dequantize_module_weight(layer).data.cpu()
            new.weight = torch.nn.Parameter(weight, requires_grad=False)
            new.bias = layer.bias
            model.set_submodule(name, new)
    model.to("cpu")


def _merge_layer(layer: Any, dtype: torch.dtype) -> None:
    base = layer.get_base_layer()
    for name, parameter in list(base.named_parameters(recurse=False)):
        # a weight of its own: a head that is adapted must not change the embedding that it is tied to
        setattr(base, name, torch.nn.Parameter(parameter.data.to(torch.float32, copy=True), requires_grad=False))
    layer.merge()
    for parameter in base.parameters(recurse=False):
        parameter.data = parameter.data.to(dtype)


def _tie_if_equal(model: Any) -> None:
    """A tied embedding and output head stay tied if they are equal; otherwise both are saved."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    text_config = model.config.get_text_config()
    if not getattr(text_config, "tie_word_embeddings", False) or head.weight is embedding.weight:
        return
    if torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
    else:
        text_config.tie_word_embeddings = model.config.tie_word_embeddings = False
