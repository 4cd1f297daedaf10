"""The loss of a causal language model as a sum over trained tokens.

A sum, because only a sum can be divided once, by the trained tokens of the whole global batch: means of
micro-batches with unequal numbers of trained tokens do not add up to the mean of the batch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from finetune.data.batches import IGNORED
from finetune.models.head import LossOfScores

LossSum = Callable[[torch.nn.Module, Any], torch.Tensor]
"""What a recipe learns: a model and a micro-batch to the sum of the loss over its trained tokens, a scalar."""


def next_token_loss_sum(model: torch.nn.Module, micro_batch: tuple[torch.Tensor, dict[str, Any]]) -> torch.Tensor:
    """The loss of supervised fine-tuning, summed over the trained tokens of a micro-batch, in nats.

    The run, its held-out loss, the memory check, the dry run and the probe all call it. Scores are made of trained
    positions alone, and of some at a time (``models.head``).

    Args:
        model: prepared by ``models.head.take_losses``.
        micro_batch: ``next_tokens`` and the model's keyword arguments, as ``data.batches.collate`` makes them.
    """
    next_tokens, inputs = micro_batch
    positions_N = trained_positions(next_tokens)
    wanted = LossOfScores(token_loss_sum, positions_N, next_tokens.flatten()[positions_N])
    found: torch.Tensor = model(**inputs, use_cache=False, loss_of_scores=wanted)
    return found


def trained_positions(next_tokens_BT: torch.Tensor) -> torch.Tensor:
    """Positions whose next token is trained, rows end to end; the first of all where none is. Waits for a GPU to copy
    the tokens."""
    found = (next_tokens_BT.flatten() != IGNORED).nonzero().flatten()
    return found if len(found) else found.new_zeros(1)


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
