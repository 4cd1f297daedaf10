"""Random weights that training begins with, where a model's own way to draw them is not enough."""

import torch
from transformers import PreTrainedModel

from finetune.errors import InputError

INTO_THE_RESIDUAL = ("o_proj", "down_proj", "out_proj", "c_proj", "wo", "w2", "fc2", "dense_4h_to_h")
"""What transformers calls matrices whose output is added to the residual stream."""


@torch.no_grad()
def scale_by_depth(model: PreTrainedModel) -> int:
    """Make the matrices that write into the residual stream smaller by sqrt(2 x layers) (GPT-2; arXiv:1909.08053).

    2 x layers sums then have about the variance of one. Of 32 layers the factor is 1/8.

    Returns:
        How many matrices there were.

    Raises:
        InputError: if not two of each layer are known by their names.
    """
    layers = model.config.get_text_config().num_hidden_layers
    found = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and name.removesuffix(".weight").rpartition(".")[2] in INTO_THE_RESIDUAL
    ]
    if len(found) < 2 * layers:  # of attention and of the MLP
        raise InputError(
            f"pretrain.depth_scaled: {type(model).__name__} has {len(found)} matrices named "
            f"{', '.join(INTO_THE_RESIDUAL)}, and not two for each of its {layers} layers; set it to false."
        )
    for parameter in found:
        parameter.mul_((2 * layers) ** -0.5)
    return len(found)
