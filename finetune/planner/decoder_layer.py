"""A decoder layer on tensors without values: attention, then the MLP, each beside the residual stream."""

from finetune.planner.attending import attend, attend_eagerly, needs_mask
from finetune.planner.dialects import Dialect, dialect_of
from finetune.planner.experts import run_experts
from finetune.planner.linear import Matrix, linear
from finetune.planner.operations import Operations
from finetune.planner.shape import ModelShape
from finetune.planner.tape import Parameter, Tensor


class Layer:
    """Parameters of one decoder layer, by the last names that transformers gives them."""

    def __init__(self, matrices: dict[str, Matrix], norms: dict[str, Parameter]) -> None:
        self.matrices, self.norms = matrices, norms


def run_norm(ops: Operations, dialect: Dialect, x: Tensor, weight: Parameter) -> Tensor:
    return ops.norm(x, weight, weighs_in_fp32=dialect.weighs_in_fp32, adds_one=dialect.adds_one)


def run_layer(
    ops: Operations,
    shape: ModelShape,
    layer: Layer,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    dropout: float,
    is_windowed: bool,
) -> Tensor:
    """Norms lie before attention and MLP, after them, or both."""
    dialect = dialect_of(shape.model_type)
    normed_after = "post_feedforward_layernorm" in layer.norms
    residual = x
    if "input_layernorm" in layer.norms:
        x = run_norm(ops, dialect, x, layer.norms["input_layernorm"])
    x = run_attention(ops, shape, layer, x, angles, dropout, is_windowed)
    if normed_after:
        x = run_norm(ops, dialect, x, layer.norms["post_attention_layernorm"])
    if dialect.scales_branches:
        x = ops.scale(x)
    x = ops.add(residual, x)
    residual = x
    before_mlp = "pre_feedforward_layernorm" if normed_after else "post_attention_layernorm"
    if before_mlp in layer.norms:
        x = run_norm(ops, dialect, x, layer.norms[before_mlp])
    x = run_mlp(ops, shape, layer, x, dropout)
    if normed_after:
        x = run_norm(ops, dialect, x, layer.norms["post_feedforward_layernorm"])
    if dialect.scales_branches:
        x = ops.scale(x)
    return ops.add(residual, x)


def run_attention(
    ops: Operations,
    shape: ModelShape,
    layer: Layer,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    dropout: float,
    is_windowed: bool,
) -> Tensor:
    dialect, matrices, norms = dialect_of(shape.model_type), layer.matrices, layer.norms
    if "qkv_proj" in matrices:
        together = linear(ops, x, matrices["qkv_proj"], dropout)
        query, key, value = (ops.view(together, ops.tokens * size) for size in (shape.q, shape.kv, shape.kv))
        del together
    else:
        query, key, value = (linear(ops, x, matrices[name], dropout) for name in ("q_proj", "k_proj", "v_proj"))
    del x
    if "q_norm" in norms:
        query, key = run_norm(ops, dialect, query, norms["q_norm"]), run_norm(ops, dialect, key, norms["k_norm"])
    joins, keeps_width = dialect.joins_rotated, dialect.rotates_in_fp32
    query, key = (ops.rotate(each, *angles, joins=joins, keeps_width=keeps_width) for each in (query, key))
    if dialect.attends_eagerly:
        output = attend_eagerly(ops, query, key, value, shape.heads)
    else:
        output = attend(ops, query, key, value, shape.heads, masked=is_windowed and needs_mask(ops, shape))
        if joins:  # heads lie one after the other, and tokens shall
            output = ops.clone(output)
    del query, key, value
    return linear(ops, output, matrices["o_proj"], dropout)


def run_mlp(ops: Operations, shape: ModelShape, layer: Layer, x: Tensor, dropout: float) -> Tensor:
    """``down(activation(gate(x)) * up(x))``, SwiGLU (arXiv:2002.05202)."""
    matrices, wide = layer.matrices, ops.tokens * shape.intermediate
    if shape.experts > 1:
        return run_experts(ops, shape, matrices, x)
    if "gate_up_proj" in matrices:
        together = linear(ops, x, matrices["gate_up_proj"], dropout)
        gate, up = ops.view(together, wide), ops.view(together, wide)
        del together
        product = ops.multiply(up, ops.activate(gate))
        del gate, up
    else:
        activated = ops.activate(linear(ops, x, matrices["gate_proj"], dropout))
        product = ops.multiply(activated, linear(ops, x, matrices["up_proj"], dropout))
        del activated
    del x
    return linear(ops, product, matrices["down_proj"], dropout)
