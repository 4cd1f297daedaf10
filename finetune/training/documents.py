"""Documents of a micro-batch: which of them a position belongs to, and what the model says of each."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from finetune.data.batches import collate, on_device, trained_positions
from finetune.data.encoding import Row
from finetune.training.loss import LossOfScores, token_losses


def document_numbers(documents: Sequence[Row], shape: torch.Size, *, flat: bool) -> torch.Tensor:
    """Numbers from 0, of the micro-batch's shape and int64.

    Args:
        documents: of the micro-batch, in its order.
        shape: as ``data.batches.collate`` makes it: one line of all documents, or padded a line of each.
    """
    number_D = torch.arange(len(documents))
    if flat:
        return number_D.repeat_interleave(torch.tensor([len(each.tokens) for each in documents]))[None]
    return number_D[:, None].expand(shape)


def of_documents(
    model: torch.nn.Module,
    next_tokens_BT: torch.Tensor,
    inputs: dict[str, Any],
    document_BT: torch.Tensor,
    documents: int,
    function: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A function of the log-probabilities of documents, (documents,): each the sum over its trained tokens.

    Args:
        next_tokens_BT: of the micro-batch, as ``inputs``, by ``data.batches.collate``.
        document_BT: by ``document_numbers``.
        documents: of the micro-batch.
    """
    positions_N = trained_positions(next_tokens_BT)
    targets_N = next_tokens_BT.flatten()[positions_N]
    number_D = torch.arange(documents, device=positions_N.device)
    is_its_DN = number_D[:, None] == document_BT.flatten()[positions_N]

    def of_all(losses_N: torch.Tensor) -> torch.Tensor:
        return function(-torch.where(is_its_DN, losses_N, 0.0).sum(1))

    wanted = LossOfScores(token_losses, positions_N, targets_N, of_all=of_all)
    found: torch.Tensor = model(**inputs, use_cache=False, loss_of_scores=wanted)
    return found


def log_probabilities(
    model: torch.nn.Module, documents: Sequence[Row], device: torch.device, *, flat: bool
) -> torch.Tensor:
    """Of each document the sum over its trained tokens, in nats, of shape (documents,); computed in one batch."""
    next_tokens, inputs = collate([[document] for document in documents], device, flat=flat)
    numbers = on_device(document_numbers(documents, next_tokens.shape, flat=flat), device)
    return of_documents(model, next_tokens, inputs, numbers, len(documents), lambda sums_D: sums_D).float()
