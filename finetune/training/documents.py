"""Which document of a micro-batch a position belongs to."""

from collections.abc import Sequence

import torch

from finetune.data.encoding import Row


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
