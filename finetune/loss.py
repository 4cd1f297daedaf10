"""The loss of a causal language model as a sum over trained tokens.

A sum, because only a sum can be divided once, by the trained tokens of the whole global batch: means of
micro-batches with unequal numbers of trained tokens do not add up to the mean of the batch.
"""

import torch
import torch.nn.functional as F

IGNORED = -100
"""Label of a position that is not trained (the ``ignore_index`` of PyTorch and transformers)."""


def token_loss_sum(logits_BTV: torch.Tensor, next_tokens_BT: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy over the trained positions, in nats, computed in fp32.

    Args:
        logits_BTV: scores of the token that follows each position; batch, positions, vocabulary.
        next_tokens_BT: the token that follows each position (labels already shifted), or ``IGNORED``.

    Returns:
        A scalar on the logits' device; 0 with zero gradients where no position is trained.
    """
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), next_tokens_BT.flatten(), ignore_index=IGNORED, reduction="sum"
    )
