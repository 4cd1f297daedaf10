"""Tensors of a micro-batch: rows padded to the longest, or laid end to end with the bounds of their documents."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from finetune.data.encoding import Row

IGNORED = -100
"""Label of a position that is not trained (the ``ignore_index`` of PyTorch and transformers)."""


def collate(
    places: Sequence[Sequence[Row]], device: torch.device, *, packed: bool
) -> tuple[torch.Tensor, dict[str, Any]]:
    """One micro-batch on its device: the tokens to predict, and the model's keyword arguments.

    Padded on the right to the longest row, without an attention mask: with causal attention nothing looks at what
    stands to its right, and no loss is taken at padded positions; so attention keeps its fastest path. Packed: one
    flat row of all documents without padding, with their bounds, which ``finetune.models.attention`` respects.

    Args:
        places: the documents of each row of the input. A row without documents becomes one of a single token that is
            not trained.

    Returns:
        ``next_tokens`` (labels, shifted already; ``IGNORED`` where nothing is trained) and ``input_ids``, each of
        shape (rows, positions) and int64; packed, of shape (1, positions), and with the bounds of the documents.
    """
    empty = Row(np.zeros(1, np.int32), [], "")
    lines = [list(documents) or [empty] for documents in places]
    if packed:
        lines = [[document for documents in lines for document in documents]]
    positions = max(sum(len(row.tokens) for row in documents) for documents in lines)
    input_ids = torch.zeros(len(lines), positions, dtype=torch.int64)
    next_tokens = torch.full_like(input_ids, IGNORED)
    for line, documents in enumerate(lines):
        start = 0
        for row in documents:
            tokens = torch.from_numpy(np.asarray(row.tokens, np.int64))
            input_ids[line, start : start + len(tokens)] = tokens
            for first, end in row.spans:
                next_tokens[line, start + first - 1 : start + end - 1] = tokens[first:end]
            start += len(tokens)
    bounds = document_bounds([len(row.tokens) for row in lines[0]], device) if packed else {}
    return next_tokens.to(device), {"input_ids": input_ids.to(device), **bounds}


def document_bounds(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Keyword arguments for the model's forward, built on the host once per batch: no layer waits for the device.

    Args:
        lengths: tokens of each document in the row, in its order. They cover the whole row: padding, where there
            is some, is a document too.

    Returns:
        ``position_ids``, of shape (1, T) and int64, from 0 in each document; ``cu_seq_lens_q`` and
        ``cu_seq_lens_k``, the same tensor of shape (documents + 1,) and int32: where each document begins, and T;
        ``max_length_q`` and ``max_length_k``, the tokens of the longest document.

    Raises:
        ValueError: if there is no document, or an empty one.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"documents have {list(lengths)[:8]} tokens; give at least one document, none of them empty")
    sizes = torch.tensor(lengths, dtype=torch.int64)
    ends = sizes.cumsum(0)
    positions = torch.arange(int(ends[-1])) - (ends - sizes).repeat_interleave(sizes)
    bounds = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    if device.type == "cuda":  # from pinned memory the copies run beside the host
        positions, bounds = positions.pin_memory(), bounds.pin_memory()
    bounds = bounds.to(device, non_blocking=True)
    longest = max(lengths)
    return {
        "position_ids": positions[None].to(device, non_blocking=True),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
