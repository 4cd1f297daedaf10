"""Floating-point operations of training, for model FLOP/s utilisation (MFU)."""


def training_flops_per_token(
    *,
    matrix_parameters: int,
    trained_matrix_parameters: int,
    layers: int,
    heads: int,
    head_dim: int,
    mean_row_length: float,
) -> float:
    """Model FLOPs of forward and backward per token.

    ``4 * matrix_parameters + 2 * trained_matrix_parameters + 6 * layers * heads * head_dim * mean_row_length``:
    Kaplan et al. (arXiv:2001.08361) for the matrices, of which frozen ones have no gradient to compute; attention
    scores and values with the causal half counted, since the other half need not be computed. Recomputed
    activations are not counted: utilisation is of useful work.

    Args:
        matrix_parameters: weights of all linear layers, output head and adapters included, the embedding lookup not.
        trained_matrix_parameters: those of them that are trained.
        mean_row_length: tokens a row attends over, on average.
    """
    matrices = 4.0 * matrix_parameters + 2.0 * trained_matrix_parameters
    return matrices + 6.0 * layers * heads * head_dim * mean_row_length
