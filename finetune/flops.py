"""Floating-point operations of training, and the peak of known GPUs, for model FLOP/s utilisation (MFU)."""

import re

PEAK_TFLOPS = {
    # dense bf16 or fp16 tensor cores with fp32 accumulation, from NVIDIA's data sheets; the longest name that
    # a GPU's name contains as words counts ("RTX A4000" is no A40)
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.0,
    "A100": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A40": 149.7,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
}


def peak_flops(gpu_name: str) -> float | None:
    """Peak FLOP/s of a GPU, or None where it is not known."""
    known = [name for name in PEAK_TFLOPS if re.search(rf"\b{name}\b", gpu_name)]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


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
