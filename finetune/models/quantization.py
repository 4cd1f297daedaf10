"""Frozen weights in 4 or 8 bits, through bitsandbytes.

4 bits are NF4 with double quantisation (QLoRA, arXiv:2305.14314): 0.516 bytes a weight. 8 bits are LLM.int8
(arXiv:2208.07339). Linear layers are quantised, the output head, embeddings and norms are not. Weights are quantised
one by one as they are read, so that the device never holds the model in 16 bits.

Of PEFT's ``prepare_model_for_kbit_training`` nothing is used: freezing is what an adapter does anyway; casting every
other weight to fp32 costs 2 GiB for an 8B model and makes its whole residual stream fp32, while norms compute in
fp32 in any case; and the gradient hook on the embedding serves reentrant checkpointing, which is not used.
"""

import sys
import types
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from finetune.models.tensor_plan import Split, take_flat


def stored_bits(config: PreTrainedConfig) -> int | None:
    """Bits of a model that was published quantised with bitsandbytes; None if it is not quantised."""
    stored = _stored(config)
    if stored.get("quant_method") != "bitsandbytes" and not {"load_in_4bit", "load_in_8bit"} & set(stored):
        return None
    return 4 if stored.get("load_in_4bit") else 8


def problems(config: PreTrainedConfig, bits: int | None) -> list[str]:
    """Why a model cannot be quantised to these bits, as sentences.

    Args:
        bits: 4, 8 or None, as the recipe asks.
    """
    stored, found = _stored(config), stored_bits(config)
    if stored and found is None:
        return [
            f"model.path: this model is published quantised with {stored.get('quant_method', 'an unknown method')}, "
            "which is not supported; use its 16-bit version and set quantization.bits to 4 or 8."
        ]
    if found is not None and bits not in (None, found):
        return [
            f"quantization.bits: this model is published in {found} bits and cannot be loaded in {bits}; set it to "
            f"{found}, or use the 16-bit version of the model."
        ]
    return []


def model_problems(model: PreTrainedModel) -> list[str]:
    """A sentence if quantisation would miss most of the model.

    Args:
        model: its modules; weights may be on the meta device.
    """
    outside = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    matrices = [p for p in model.parameters() if p.ndim > 1 and id(p) not in outside]
    linear = [m.weight for m in model.modules() if type(m) is torch.nn.Linear and id(m.weight) not in outside]
    share = sum(p.numel() for p in linear) / max(1, sum(p.numel() for p in matrices))
    if share > 0.9:
        return []
    return [
        f"quantization.bits: only {100 * share:.0f} % of this model's matrix weights are in linear layers, "
        "which can be "
        "quantised; the others (for example experts) would stay in 16 bits. Set quantization.bits to none, and "
        "shard over "
        "more GPUs."
    ]


def quantised_bytes(model: PreTrainedModel, bits: int) -> int:
    """Bytes of a model whose linear layers, except the output head, have this many bits, and the rest 16.

    Args:
        model: its modules; weights may be on the meta device.
    """
    head = model.get_output_embeddings()
    linear = sum(m.weight.numel() for m in model.modules() if type(m) is torch.nn.Linear and m is not head)
    return int(linear * (bits / 8 + 1 / 63)) + 2 * (sum(p.numel() for p in model.parameters()) - linear)


def _stored(config: PreTrainedConfig) -> dict[str, Any]:
    stored = getattr(config, "quantization_config", None) or {}
    return dict(stored if isinstance(stored, dict) else stored.to_dict())


def bitsandbytes_config(bits: int, dtype: torch.dtype) -> BitsAndBytesConfig:
    """How transformers quantises while it reads the weights.

    Args:
        dtype: of computation. 4-bit weights are stored in tensors of this dtype too: sharded training gathers tensors
            of one dtype together, and would cast any other.
    """
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def quantize(model: PreTrainedModel, bits: int, dtype: torch.dtype, device: torch.device) -> None:
    """Quantise the linear layers of a model in memory, one after the other; each moves to ``device``."""
    import bitsandbytes as bnb

    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if type(layer) is not torch.nn.Linear or layer is head:
            continue
        rows, columns, bias = layer.out_features, layer.in_features, layer.bias is not None
        new: Any
        if bits == 4:
            nf4: Any = {"quant_type": "nf4", "quant_storage": dtype, "compress_statistics": True}
            new = bnb.nn.Linear4bit(columns, rows, bias, compute_dtype=dtype, device="meta", **nf4)
            weight: Any = bnb.nn.Params4bit(layer.weight.data, module=new, **nf4)
        else:
            new = bnb.nn.Linear8bitLt(columns, rows, bias, has_fp16_weights=False, threshold=6.0, device="meta")
            weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        new.weight = weight.to(device)
        new.bias = layer.bias
        new.requires_grad_(False)
        model.set_submodule(name, new)


@torch.no_grad()
def take_part(layer: Any, split: Split, part: int) -> torch.Tensor:
    """One part of a layer's weights in 4 bits, packed; the layer has the scales of this part from here on.

    They are no longer quantised themselves: those of a part are not the blocks in which they were. The weights are the
    same to the bit.
    """
    import bitsandbytes.functional as quantisation

    weight, state = layer.weight, layer.weight.quant_state
    scales = state.absmax
    if state.nested:
        scales = quantisation.dequantize_blockwise(scales, state.state2).float() + state.offset
    stretches, shape = split.stretches(state.shape), list(state.shape)
    shape[split.dim] //= split.parts
    own = take_flat(scales.view(-1), part, split.parts, stretches)
    kept = {"code": state.code, "blocksize": state.blocksize, "quant_type": state.quant_type, "dtype": state.dtype}
    weight.quant_state = layer.quant_state = quantisation.QuantState(own, torch.Size(shape), **kept)
    packed = take_flat(weight.data.view(-1).view(torch.uint8), part, split.parts, stretches)
    return packed.view(weight.dtype).view(-1, 1)


def settle(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give quantised layers, however they were made, the same compute and storage dtypes."""
    import bitsandbytes as bnb

    for layer in model.modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            layer.compute_dtype, layer.compute_type_is_set = dtype, True
            # in evaluation this would repack the weights in place, for a kernel that training and sharding cannot read
            layer.support_avx512bf16_for_cpu = False
            if layer.weight.dtype != dtype:  # the same bytes, under another name
                weight: Any = layer.weight
                weight.data = weight.data.view(-1).view(dtype).view(-1, 1)
                layer.quant_storage = weight.quant_storage = dtype


def keep_partitioned(model: torch.nn.Module) -> None:
    """Have layers in 4 bits keep no gathered weights for the backward pass, before which ZeRO-3 gathers them again.

    bitsandbytes keeps the values that it has multiplied by: once the forward pass is over, the whole model, also with
    recomputed activations. Autograd keeps the parameter, whose values ZeRO-3 takes away and brings back.
    """
    if "bitsandbytes" in sys.modules:  # else no layer is one of its own
        from bitsandbytes.nn import Linear4bit

        for layer in model.modules():
            if isinstance(layer, Linear4bit) and not (layer.bias is not None and layer.bias.requires_grad):
                layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = _Product.apply(x, self.weight, self)
    return product


class _Product(torch.autograd.Function):
    """What a layer in 4 bits computes, of whose weight the parameter is kept, not the values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Any) -> torch.Tensor:
        found: torch.Tensor = type(layer).forward(layer, x)
        ctx.save_for_backward(weight)
        ctx.state = layer.weight.quant_state
        return found

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return of_out @ dequantised(weight, ctx.state, of_out.dtype), None, None


def dequantised(weight: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """The values of a weight in 4 bits."""
    import bitsandbytes.functional

    found: torch.Tensor = bitsandbytes.functional.dequantize_4bit(weight.view(-1, 1), state)
    return found.to(dtype)
