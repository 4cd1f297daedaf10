"""One decoder layer, the embedding and the head: matrix products, activations and seconds on one GPU of a layout.

Activations follow Korthikanti et al. (arXiv:2205.05198), table 2, for layers without dropout and with FlashAttention:
there each token and hidden element had 10 + 24 / t + 5 a s / (h t) bytes, of which dropout had 2 of the 10, and the
scores of attention the last term. With sequence parallelism all of it is divided by t.
Limits: experts are taken to be loaded evenly; biases and the router cost nothing.
"""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from finetune.planner.paper.cluster import Assumptions, Cluster
from finetune.planner.paper.layout import Job, Layout

if TYPE_CHECKING:
    from finetune.planner.shape import Linear, ModelShape

INTO_INTERMEDIATE = ("gate_proj", "up_proj", "gate_up_proj")
OUT_OF_INTERMEDIATE = "down_proj"


def met_copies(linear: "Linear", shape: "ModelShape") -> int:
    """Copies of a linear layer that one token meets: all but for experts, of which it meets some."""
    return shape.experts_per_token if linear.copies > 1 else 1


def met_matrix_elements(shape: "ModelShape") -> int:
    """Of one layer: elements of the matrices that a token meets."""
    return sum(linear.inputs * linear.outputs * met_copies(linear, shape) for linear in shape.linears)


def attended_tokens(shape: "ModelShape", row_tokens: int) -> float:
    """Positions that a position attends to, on average over a row and over the layers; causal."""
    window = min(shape.sliding_window or row_tokens, row_tokens)
    windowed = window - window**2 / (2 * row_tokens)
    share = shape.windowed_layers / shape.layers
    return share * windowed + (1 - share) * row_tokens / 2


def kept_bytes_per_token(shape: "ModelShape", *, tensor: int = 1, sequence_parallel: bool = False) -> float:
    """Saved by a layer for its backward pass, in 16 bits: of one token on one of the tensor parallel GPUs.

    Split by the tensor factor alone: q, k, v, the output of attention, its log-sum-exp (4 bytes a head), and what
    enters and leaves the activation function. Split with sequence parallelism only: the inputs and outputs of both
    norms, and the tokens dealt to the experts and back.
    """
    sequence = 8.0 * shape.hidden + (4.0 * shape.hidden * shape.experts_per_token if shape.experts > 1 else 0.0)
    tensors = 4.0 * shape.q + 4.0 * shape.kv + 4.0 * shape.heads
    for linear in shape.linears:
        if linear.name in INTO_INTERMEDIATE:
            tensors += 2.0 * linear.outputs * met_copies(linear, shape)
        elif linear.name == OUT_OF_INTERMEDIATE:
            tensors += 2.0 * linear.inputs * met_copies(linear, shape)
    return sequence / (tensor if sequence_parallel else 1) + tensors / tensor


def wave_efficiency(rows: float, columns: float, processors: int, copies: int = 1) -> float:
    """Share of a matrix product's time in which no processor waits for the last wave of tiles.

    Tile and wave quantisation as in NVIDIA's "Matrix Multiplication Background", chapter 3, for tiles of 128 x 256 or
    256 x 128, whichever is better.
    """
    best = 0.0
    for height, width in ((128, 256), (256, 128)):
        tiles = copies * ceil(rows / height) * ceil(columns / width)
        useful = copies * rows * columns / (height * width)
        best = max(best, useful / (ceil(tiles / processors) * processors))
    return best


@dataclass(frozen=True)
class Products:
    """Seconds of a layer's matrix products for one micro-batch on one GPU."""

    forward: float
    backward: float


def matrix_seconds(
    shape: "ModelShape", layout: Layout, tokens: int, cluster: Cluster, assumptions: Assumptions
) -> Products:
    """Of one layer. Products that share an input (q, k, v; gate, up) are taken as one, as Megatron-LM does."""
    rate = cluster.peak_tflops * 1e12 * assumptions.matrix_share
    t = layout.tensor
    forward = backward = 0.0
    for inputs, outputs, experts in _products(shape, t):
        copies = max(experts // layout.expert, 1)
        rows = tokens * shape.experts_per_token / experts * layout.expert if experts > 1 else tokens
        flops = 2.0 * inputs * outputs * (tokens * shape.experts_per_token if experts > 1 else tokens)
        forward += flops / (rate * wave_efficiency(rows, outputs, cluster.processors, copies))
        backward += flops / (rate * wave_efficiency(rows, inputs, cluster.processors, copies))
        backward += flops / (rate * wave_efficiency(inputs, outputs, cluster.processors, copies))
    return Products(forward, backward)


def _products(shape: "ModelShape", tensor: int) -> list[tuple[float, float, int]]:
    """Inputs, outputs and copies of the matrix products of a layer on one of the tensor parallel GPUs."""
    found = [(shape.hidden, (shape.q + 2 * shape.kv) / tensor, 1), (shape.q / tensor, shape.hidden, 1)]
    into = [linear for linear in shape.linears if linear.name in INTO_INTERMEDIATE]
    out = [linear for linear in shape.linears if linear.name == OUT_OF_INTERMEDIATE]
    found.append((into[0].inputs, sum(linear.outputs for linear in into) / tensor, into[0].copies))
    return [*found, *((linear.inputs / tensor, linear.outputs, linear.copies) for linear in out)]


@dataclass(frozen=True)
class LayerSeconds:
    """Forward and backward of one micro-batch through one layer on one GPU, without what it waits for others."""

    matrices: float
    attention: float
    elementwise: float
    recomputed: float
    """Of the forward pass, again, under activation checkpointing."""

    @property
    def total(self) -> float:
        return self.matrices + self.attention + self.elementwise + self.recomputed


def layer_seconds(
    shape: "ModelShape", layout: Layout, job: Job, cluster: Cluster, assumptions: Assumptions
) -> LayerSeconds:
    """Of one layer; a third of attention and of the elementwise traffic is taken to be forward."""
    tokens = job.tokens(layout)
    products = matrix_seconds(shape, layout, tokens, cluster, assumptions)
    flops = 12.0 * shape.q * attended_tokens(shape, job.row_tokens) * tokens / layout.tensor
    attention = flops / (cluster.peak_tflops * 1e12 * assumptions.attention_share)
    parts = layout.tensor if layout.sequence_parallel else 1
    traffic = assumptions.elementwise_bytes * shape.hidden * tokens / parts
    elementwise = traffic / (cluster.memory_gb_per_second * 1e9 * assumptions.memory_share)
    again = products.forward + attention / 3 + elementwise / 3 if job.activation_checkpointing == "full" else 0.0
    return LayerSeconds(products.forward + products.backward, attention, elementwise, again)


def head_seconds(shape: "ModelShape", layout: Layout, job: Job, cluster: Cluster, assumptions: Assumptions) -> float:
    """Output head and loss of one micro-batch, forward and backward; never recomputed."""
    tokens, words = job.tokens(layout), shape.vocabulary / layout.tensor
    rate = cluster.peak_tflops * 1e12 * assumptions.matrix_share
    sizes = ((tokens, words), (tokens, shape.hidden), (shape.hidden, words))
    efficiencies = [wave_efficiency(rows, columns, cluster.processors) for rows, columns in sizes]
    products = sum(2.0 * tokens * words * shape.hidden / (rate * efficiency) for efficiency in efficiencies)
    bandwidth = cluster.memory_gb_per_second * 1e9 * assumptions.memory_share
    return products + assumptions.logit_traffic_bytes * tokens * words / bandwidth
