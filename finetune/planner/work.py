"""What one GPU computes and moves in its memory in a micro-batch and in an optimizer step.

Limits: attention is flash attention, within documents where rows are packed (models whose scores are capped, and
unpacked rows under a sliding window, take a slower kernel); the routing of experts and the lookup of embeddings cost
nothing.
"""

from dataclasses import dataclass

from finetune.models.flops import training_flops_per_token
from finetune.planner.kernel_count import BACKWARD_TRAFFIC, adapter_bytes, elementwise_bytes, kernels, weight_bytes
from finetune.planner.matrices import Matrices, adapted_linears
from finetune.planner.shape import ModelShape
from finetune.trace.placement import Placement
from finetune.trace.setting import Setting

LOSS_BYTES = 40
"""Of each logit, forward and backward, in ``cross_entropy(logits.float())``: the 16-bit logits are read and cast,
softmax and its logarithm run over fp32, and both gradients are written in fp32 and cast back."""
LOSS_FORWARD = 0.4
"""Share of it; derived from the same count."""
ATTENTION_BACKWARD = 2.5
"""Of flash attention, for each operation forward: five matrix products to two, the scores being computed again
(arXiv:2205.14135). Two of them count as useful."""
_OPTIMIZER_BYTES = {
    "fp32_master": {
        "adamw": 28,  # weight, gradient and both moments are read, all but the gradient written
        "adamw_8bit": 16,
        "paged_adamw_8bit": 16,
        "lion_8bit": 14,
        "adafactor": 70,  # a dozen kernels over a matrix, one after the other
        "sgd": 12,
    },
    "bf16": {
        "adamw": 210,  # in fp32 kernels one after the other, and 34 bytes to round each of three tensors stochastically
        "adamw_8bit": 62,
        "paged_adamw_8bit": 62,
        "lion_8bit": 60,
        "adafactor": 76,
        "sgd": 6,
    },
}
"""That the optimizer reads and writes for each trained weight, derived from its kernels, gradient clipping apart."""


@dataclass(frozen=True)
class Pass:
    """Forward or backward of a micro-batch."""

    matrix_flops: float
    attention_flops: float
    elementwise_bytes: float
    weight_bytes: float
    """Casts, dequantisation, and copies of gathered weights and of gradients."""
    loss_bytes: float
    kernels: float


@dataclass(frozen=True)
class Work:
    """Of one GPU."""

    forward: Pass
    backward: Pass
    """Recomputed activations included."""
    model_flops: float
    """Of a micro-batch: the useful ones, without what is recomputed."""
    optimizer_bytes: float
    """Of a step, over the weights that this process updates; the clipping of gradients included."""
    trained: int
    """Weights that are trained, over all processes."""
    gathered_bytes: float
    """Of all weights, in the form in which a layer computes with them or dequantises them."""


def work_of(shape: ModelShape, setting: Setting, placement: Placement, *, mean_document_tokens: float) -> Work:
    """Count the work of a setting; the arguments are those of ``speed.step_time``."""
    tokens, layers = setting.tokens, shape.layers
    count = Matrices.of(shape, setting)
    attended = _attended(shape, mean_document_tokens)
    model_flops = tokens * training_flops_per_token(
        matrix_parameters=count.layer_matrices + count.head + count.adapter,
        trained_matrix_parameters=count.trained_matrices,
        layers=layers,
        heads=shape.heads,
        head_dim=shape.head_dim,
        mean_row_length=attended,
    )
    attention = 2.0 * layers * shape.heads * shape.head_dim * attended * tokens
    matrices = 2.0 * (count.layer_matrices + count.head + count.adapter) * tokens
    whole_weights_flops = _dora_flops(shape, setting)
    again = 1 if setting.activation_checkpointing else 0
    elementwise = layers * elementwise_bytes(shape, setting, placement) * tokens
    forward_adapter, backward_adapter = (layers * each * tokens for each in adapter_bytes(shape, setting))
    loss = LOSS_BYTES * shape.vocabulary * tokens
    launched = layers * kernels(shape, setting)
    forward_weights, backward_weights = weight_bytes(count, setting, placement)
    forward = Pass(
        matrix_flops=matrices + whole_weights_flops,
        attention_flops=attention,
        elementwise_bytes=elementwise + forward_adapter,
        weight_bytes=forward_weights,
        loss_bytes=LOSS_FORWARD * loss,
        kernels=launched,
    )
    recomputed = matrices - 2.0 * (count.head + _never_recomputed(shape, setting)) * tokens + whole_weights_flops
    backward = Pass(
        matrix_flops=model_flops - 3 * attention - matrices + again * recomputed,
        attention_flops=(ATTENTION_BACKWARD + again) * attention,
        elementwise_bytes=BACKWARD_TRAFFIC * elementwise + backward_adapter + again * (elementwise + forward_adapter),
        weight_bytes=backward_weights,
        loss_bytes=(1 - LOSS_FORWARD) * loss,
        kernels=(2 + again) * launched,
    )
    gradient_bytes = 4 if setting.weights == "fp32_master" else 2
    touched = _OPTIMIZER_BYTES[setting.weights][setting.optimizer] + 3 * gradient_bytes
    return Work(
        forward=forward,
        backward=backward,
        model_flops=model_flops,
        optimizer_bytes=touched * count.trained / placement.optimizer_shards,
        trained=count.trained,
        gathered_bytes=count.bytes,
    )


def _attended(shape: ModelShape, mean_document_tokens: float) -> float:
    """Tokens that a row attends over, twice the mean of a token's own: within a window it is ``2w - w^2 / s``."""
    length, window = mean_document_tokens, shape.sliding_window
    if window is None or window >= length:
        return length
    within = 2 * window - window**2 / length
    return (shape.windowed_layers * within + (shape.layers - shape.windowed_layers) * length) / shape.layers


def _never_recomputed(shape: ModelShape, setting: Setting) -> int:
    """Elements of the matrices at the ends of the layers that checkpointing runs through once only.

    PyTorch stops to recompute a layer when the last tensor that its backward pass needs is there (``early_stop`` of
    torch.utils.checkpoint): the last product is needed by a norm behind it, or by an adapter beside it that was
    computed later, and else by none.
    """
    last = shape.linears[-1]
    needed = shape.experts > 1 or any(norm.name == "post_feedforward_layernorm" for norm in shape.norms)
    return 0 if needed or last in adapted_linears(shape, setting) else shape.layers * last.matrix_parameters


def _dora_flops(shape: ModelShape, setting: Setting) -> float:
    """DoRA's change of each weight, multiplied out once a pass: PEFT sends an identity through both matrices."""
    if setting.adapter != "dora":
        return 0.0
    adapted = adapted_linears(shape, setting)
    return sum(2.0 * setting.rank * each.inputs * (each.inputs + each.outputs) for each in adapted) * shape.layers
