"""Bytes that the kernels of a decoder layer read and write beside their matrix products, counted kernel by kernel.

Of transformers' modules as they are written (no fused norms, no compilation), of PEFT's adapters, and of bitsandbytes'
layers. Caches between kernels are not counted on: tensors of a training step are larger.
"""

from dataclasses import dataclass

from finetune.planner.matrices import BYTES_OF_4_BIT, BYTES_OF_8_BIT, Matrices, adapted_linears, in_16_bits, met
from finetune.planner.shape import ModelShape
from finetune.trace.placement import Placement
from finetune.trace.setting import Setting

BACKWARD_TRAFFIC = 2.2
"""Bytes of the elementwise kernels backward for each byte forward: 460 bytes times hidden size a token and layer were
derived for both in an 8B Llama, of which the count below gives 144 forward."""
READS_ATTENTION_OR_PRODUCT = ("o_proj", "down_proj")
"""Linear layers that do not read the normalised residual stream."""


@dataclass(frozen=True)
class _Traffic:
    """Bytes that elementwise kernels read and write forward, for each element of what they work on."""

    norm: int
    """Squares, mean, scaling and weight, with the cast to fp32 and back where the stream has 16 bits."""
    residual: int
    rotary: int
    """Two products, half of it negated, both halves joined, one sum."""
    product: int
    """The activation function and its product with the other half."""
    cast: int = 0
    """Of a linear layer's input."""


_TRAFFIC = {
    "16 bits": _Traffic(norm=36, residual=6, rotary=20, product=10),
    # trained fp32 weights: the embedding is fp32, and so is the residual stream
    "autocast": _Traffic(norm=28, residual=10, rotary=36, product=10, cast=6),
    "32 bits": _Traffic(norm=28, residual=12, rotary=40, product=20),
}


def under_autocast(setting: Setting, placement: Placement) -> bool:
    return placement.computes_under_autocast and setting.precision != "no" and setting.weights == "fp32_master"


def elementwise_bytes(shape: ModelShape, setting: Setting, placement: Placement) -> float:
    """Of a token in a decoder layer, forward."""
    trains_all_in_fp32 = setting.adapter == "none" and under_autocast(setting, placement)
    kind = "32 bits" if not in_16_bits(setting) else "autocast" if trains_all_in_fp32 else "16 bits"
    traffic = _TRAFFIC[kind]
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    read = sum(linear.inputs for linear in shape.linears if linear.name not in READS_ATTENTION_OR_PRODUCT)
    int8 = sum(3 * linear.inputs + 6 * linear.outputs for linear in shape.linears) if setting.bits == 8 else 0
    return (
        traffic.norm * sum(norm.elements * norm.rows_per_token for norm in shape.norms)
        + traffic.residual * 2 * shape.hidden
        + traffic.rotary * rotated
        + traffic.product * shape.intermediate * shape.experts_per_token
        + traffic.cast * read
        + int8
    )


def adapter_bytes(shape: ModelShape, setting: Setting) -> tuple[float, float]:
    """Of a token in a decoder layer, forward and backward.

    PEFT multiplies, scales and adds in kernels of their own, so that each output is read and written several times.
    """
    adapted = adapted_linears(shape, setting)
    inputs = sum(met(linear, shape) * linear.inputs for linear in adapted)
    outputs = sum(met(linear, shape) * linear.outputs for linear in adapted)
    on_outputs = 12 + (4 if setting.bits == 4 else 0) + (14 if setting.adapter == "dora" else 0)
    dropped = 5 if setting.dropout else 0
    return (2 + dropped) * inputs + on_outputs * outputs, (10 + dropped) * inputs + 8 * outputs


def weight_bytes(count: Matrices, setting: Setting, placement: Placement) -> tuple[float, float]:
    """Of a micro-batch, forward and backward, whatever its tokens."""
    forward = backward = 0.0
    again = setting.activation_checkpointing
    if under_autocast(setting, placement):  # fp32 weights to 16 bits, their gradients back
        layers = count.all_layer_matrices if setting.adapter == "none" else 0
        forward += 6 * count.trained_base
        backward += 6 * count.trained_base + (6 * layers if again else 0)
    if placement.weight_shards > 1:  # out of the gathered buffer in each pass; gradients into that which is reduced
        forward += 2 * count.bytes
        backward += 2 * count.bytes + 6 * count.trained
    elif placement.framework == "zero":  # gradients into the bucket, and added up in fp32
        backward += 10 * count.trained
    if setting.accumulation > 1 and not placement.averages_each_micro_batch:
        backward += (12 if setting.weights == "fp32_master" else 6) * count.trained
    if setting.bits == 4:
        forward += (2 + BYTES_OF_4_BIT) * count.quantised
        backward += (2 if again else 1) * (2 + BYTES_OF_4_BIT) * count.quantised
    if setting.bits == 8:  # multiplied in 8 bits forward
        backward += (2 + BYTES_OF_8_BIT) * count.quantised
    if setting.adapter == "dora":  # the change of the weight: multiplied out, scaled, added, and its norm taken
        forward += 14 * count.adapted
        backward += 14 * count.adapted if again else 0
    return forward, backward


def kernels(shape: ModelShape, setting: Setting) -> float:
    """Of a decoder layer, forward."""
    base = 6 * len(shape.norms) + 15 + sum(met(linear, shape) for linear in shape.linears)
    return base + (5 + (6 if setting.adapter == "dora" else 0)) * len(adapted_linears(shape, setting))
