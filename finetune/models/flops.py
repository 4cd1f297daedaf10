"""Floating-point operations of training, for model FLOP/s utilisation (MFU)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class TrainingFlops:
    """Of forward and backward."""

    per_token: float
    """Of a row, in all layers."""
    per_trained_token: float
    """Beside them, in the output head: a token that is not trained has no scores."""

    def of(self, tokens: float, trained_tokens: float) -> float:
        """Of so many tokens, so many of them trained."""
        return self.per_token * tokens + self.per_trained_token * trained_tokens


def products_of(module: torch.nn.Module, config: Any) -> tuple[float, float]:
    """Weights of a module itself that a token is multiplied by, and those of them that are trained. Of the experts of a
    mixture, which are stacked in one parameter, as many as a token chooses."""
    if isinstance(module, torch.nn.Linear):
        size = float(module.in_features * module.out_features)  # of packed bits, too
        return size, size * module.weight.requires_grad
    if isinstance(module, Conv1D):
        return float(module.nx * module.nf), float(module.nx * module.nf) * module.weight.requires_grad
    found = trained = 0.0
    for each in module.parameters(recurse=False):
        shape = getattr(each, "ds_shape", each.shape)
        if len(shape) == 3:
            size = math.prod(shape) * min(1.0, (experts_of_a_token(config) or shape[0]) / shape[0])
            found, trained = found + size, trained + size * each.requires_grad
    return found, trained


def experts_of_a_token(config: Any) -> int | None:
    """As model families call it; None for all."""
    named = (getattr(config, key, None) for key in ("num_experts_per_tok", "top_k_experts", "moe_topk"))
    return next((each for each in named if isinstance(each, int) and each), None)


def training_flops(
    *,
    matrix_parameters: float,
    trained_matrix_parameters: float,
    head_parameters: float,
    trained_head_parameters: float,
    layers: int,
    heads: int,
    head_dim: float,
    mean_row_length: float,
) -> TrainingFlops:
    """Model FLOPs of forward and backward.

    For a token ``4 * matrix_parameters + 2 * trained_matrix_parameters + 6 * layers * heads * head_dim *
    mean_row_length``, and for one that is trained the same of the head's parameters: Kaplan et al. (arXiv:2001.08361)
    for the matrices, of which frozen ones have no gradient to compute; attention scores and values with the causal half
    counted, since the other half need not be computed. Recomputed activations are not counted: utilisation is of useful
    work.

    Args:
        matrix_parameters: weights of all linear layers and of the experts that a token meets, adapters included, the
            embedding lookup not.
        trained_matrix_parameters: those of them that are trained.
        head_parameters: of the output head, which are not among them; ``trained_head_parameters`` likewise.
        mean_row_length: tokens a row attends over, on average.
    """
    matrices = 4.0 * matrix_parameters + 2.0 * trained_matrix_parameters
    return TrainingFlops(
        matrices + 6.0 * layers * heads * head_dim * mean_row_length,
        4.0 * head_parameters + 2.0 * trained_head_parameters,
    )
