"""Floating-point operations of training, for model FLOP/s utilisation (MFU)."""

from dataclasses import dataclass


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


def training_flops(
    *,
    matrix_parameters: int,
    trained_matrix_parameters: int,
    head_parameters: int,
    trained_head_parameters: int,
    layers: int,
    heads: int,
    head_dim: int,
    mean_row_length: float,
) -> TrainingFlops:
    """Model FLOPs of forward and backward.

    For a token ``4 * matrix_parameters + 2 * trained_matrix_parameters + 6 * layers * heads * head_dim *
    mean_row_length``, and for one that is trained the same of the head's parameters: Kaplan et al. (arXiv:2001.08361)
    for the matrices, of which frozen ones have no gradient to compute; attention scores and values with the causal half
    counted, since the other half need not be computed. Recomputed activations are not counted: utilisation is of useful
    work.

    Args:
        matrix_parameters: weights of all linear layers, adapters included, the embedding lookup not.
        trained_matrix_parameters: those of them that are trained.
        head_parameters: of the output head, which are not among them; ``trained_head_parameters`` likewise.
        mean_row_length: tokens a row attends over, on average.
    """
    matrices = 4.0 * matrix_parameters + 2.0 * trained_matrix_parameters
    return TrainingFlops(
        matrices + 6.0 * layers * heads * head_dim * mean_row_length,
        4.0 * head_parameters + 2.0 * trained_head_parameters,
    )
