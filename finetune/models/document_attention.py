"""Attention to documents that lie end to end, for devices without a kernel for it: short ones together, others alone.

On two cores, forward and backward, 9 query heads and 3 key heads of 64 in bf16: eight documents of 64 tokens take
PyTorch's ``scaled_dot_product_attention`` 12 ms in eight calls and 6 ms in one; products and a softmax take 2.6 ms. At
256 tokens both take as long, and above it PyTorch's is faster. It keeps no scores for the backward pass, and neither
does what is here: they are made again.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

SHORT = 128
"""Tokens of the longest document that is computed together with others."""
AT_ONCE = 4096
"""Tokens of documents that are computed together, padding included: their scores in fp32 take 2 MiB a head at most."""


def each_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: list[int],
    scaling: float | None,
    sliding_window: int | None,
    dropout: float,
    key_bounds: list[int] | None = None,
) -> torch.Tensor:
    """Causal attention within each document.

    Args:
        query: of shape (1, heads, T, head size); ``key`` and ``value`` likewise, with as many heads or fewer.
        bounds: where each document begins, and T.
        scaling: of the scores; None for one over the root of the head size.
        sliding_window: how many positions a token sees, its own and those before it.
        key_bounds: of what the queries of each document see, where that begins before the first of them: their last
            query stands at its end. None where it does not.

    Returns:
        Of shape (1, T, heads, head size).
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # as PyTorch's own attention does
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if key_bounds is not None and key_bounds != bounds:
        return _runs(query, key, value, bounds, key_bounds, scaling, sliding_window, dropout)
    spans = list(itertools.pairwise(bounds))
    short = [(start, end) for start, end in spans if end - start <= SHORT and not dropout]
    pieces: list[torch.Tensor | None] = [None] * len(spans)
    if short:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        groups = [_Group.of(each, query.device, sliding_window) for each in _alike(short)]
        output_THD = _Together.apply(*(each[0].transpose(0, 1) for each in (query, key, value)), groups, scale)
        if len(short) == len(spans):
            return output_THD[None]
        pieces[:] = output_THD[None].split([end - start for start, end in spans], dim=1)
    for place, (start, end) in enumerate(spans):
        if end - start <= SHORT and not dropout:
            continue
        band = None
        if sliding_window is not None and end - start > sliding_window:
            band = _seen(end - start, sliding_window, query.device)
        pieces[place] = _alone(
            query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], band, scaling, dropout
        )
    return torch.cat([each for each in pieces if each is not None], dim=1)


def _runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: list[int],
    key_bounds: list[int],
    scaling: float | None,
    sliding_window: int | None,
    dropout: float,
) -> torch.Tensor:
    """As ``each_document``: those that see what is before them each by itself, the others between them together."""
    places = list(zip(itertools.pairwise(bounds), itertools.pairwise(key_bounds), strict=True))
    found = list[torch.Tensor]()
    runs = itertools.groupby(enumerate(places), key=lambda each: each[0] if _earlier(*each[1]) else -1)
    for _, run in runs:
        inside = [each for _, each in run]
        (start, _), (start_of_keys, _) = inside[0]
        (_, end), (_, end_of_keys) = inside[-1]
        own_query = query[:, :, start:end]
        own_key, own_value = (each[:, :, start_of_keys:end_of_keys] for each in (key, value))
        if earlier := _earlier(*inside[0]):
            seen = _seen(end - start, sliding_window, query.device, earlier)
            found.append(_alone(own_query, own_key, own_value, seen, scaling, dropout))
        else:
            moved = [each - start for each in bounds if start <= each <= end]
            found.append(each_document(own_query, own_key, own_value, moved, scaling, sliding_window, dropout))
    return torch.cat(found, dim=1)


def _earlier(queries: tuple[int, int], keys: tuple[int, int]) -> int:
    """Keys before that of the first query."""
    return keys[1] - keys[0] - (queries[1] - queries[0])


def _alike(spans: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Documents to compute together: of lengths up to the same power of two, and no more than ``AT_ONCE`` tokens."""
    classes: dict[int, list[tuple[int, int]]] = {}
    for start, end in spans:
        classes.setdefault((end - start - 1).bit_length(), []).append((start, end))
    for power, alike in classes.items():
        count = max(1, AT_ONCE >> power)
        for first in range(0, len(alike), count):
            yield alike[first : first + count]


def _alone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """One document by PyTorch's own attention, causal unless it is told what is seen."""
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=seen,
        is_causal=seen is None,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


def _seen(queries: int, sliding_window: int | None, device: torch.device, earlier: int = 0) -> torch.Tensor:
    """Which keys a query sees, of shape (queries, earlier + queries).

    Args:
        earlier: keys before that of the first query.
    """
    seen = torch.ones(queries, earlier + queries, dtype=torch.bool, device=device).tril(earlier)
    return seen if sliding_window is None else seen.triu(earlier + 1 - sliding_window)


@dataclass(frozen=True)
class _Group:
    """Documents that are computed together, padded on the right to the longest of them: no key to the right is seen.

    Documents of 3 and 2 tokens, at 5 and 11 of the row, are tokens 5 6 7 11 12, at places 0 1 2 3 4 of 2 x 3.
    """

    documents: int
    longest: int
    tokens: torch.Tensor
    """Of the row."""
    places: torch.Tensor
    """Of these tokens, among documents of the longest length, end to end."""
    hidden: torch.Tensor
    """Which keys a query does not see."""

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], device: torch.device, sliding_window: int | None) -> "_Group":
        longest = max(end - start for start, end in spans)
        tokens = torch.cat([torch.arange(start, end) for start, end in spans])
        places = torch.cat([torch.arange(end - start) + n * longest for n, (start, end) in enumerate(spans)])
        hidden = ~_seen(longest, sliding_window, device)
        return cls(len(spans), longest, tokens.to(device), places.to(device), hidden)

    def padded(self, row_THD: torch.Tensor, key_heads: int) -> torch.Tensor:
        """With N documents, K key heads and G query heads to each: of shape (N, K, G * longest, size)."""
        size = row_THD.shape[-1]
        padded = row_THD.new_zeros(self.documents * self.longest, *row_THD.shape[1:])
        padded.index_copy_(0, self.places, row_THD.index_select(0, self.tokens))
        by_head = padded.view(self.documents, self.longest, -1, size).transpose(1, 2)
        return by_head.reshape(self.documents, key_heads, -1, size)

    def put(self, padded: torch.Tensor, row_THD: torch.Tensor) -> None:
        """The reverse: write the documents where they are in the row."""
        by_head = padded.view(self.documents, -1, self.longest, padded.shape[-1])
        row_THD.index_copy_(0, self.tokens, by_head.transpose(1, 2).flatten(0, 1).index_select(0, self.places))

    def weights(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        """Softmax of the scores, which are fp32: of shape (N, K, G * longest, longest)."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2)
        by_query = scores.view(*scores.shape[:2], -1, *self.hidden.shape)
        return by_query.mul_(scale).masked_fill_(self.hidden, -torch.inf).softmax(-1).flatten(2, 3)


class _Together(torch.autograd.Function):
    """Documents of some groups; zero where others are."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        groups: list[_Group],
        scale: float,
    ) -> torch.Tensor:
        ctx.groups, ctx.scale = groups, scale
        ctx.save_for_backward(query_THD, key_TKD, value_TKD)
        output_THD = value_TKD.new_zeros(*query_THD.shape[:2], value_TKD.shape[-1])
        with torch.autocast(query_THD.device.type, enabled=False):
            for group in groups:
                query, key, value = (group.padded(each, key_TKD.shape[1]) for each in (query_THD, key_TKD, value_TKD))
                group.put(group.weights(query, key, scale).to(value.dtype) @ value, output_THD)
        return output_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output_THD: torch.Tensor) -> Any:
        inputs = ctx.saved_tensors
        found = [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in inputs]
        with torch.autocast(of_output_THD.device.type, enabled=False):
            for group in ctx.groups:
                heads = inputs[1].shape[1]
                query, key, value, of_output = (group.padded(each, heads) for each in (*inputs, of_output_THD))
                weights = group.weights(query, key, ctx.scale)
                of_value = weights.to(value.dtype).transpose(-1, -2) @ of_output
                of_weights = (of_output @ value.transpose(-1, -2)).to(weights.dtype)
                of_scores = of_weights.sub_((of_weights * weights).sum(-1, keepdim=True)).mul_(weights).mul_(ctx.scale)
                of_scores = of_scores.to(query.dtype)
                gradients = (of_scores @ key, of_scores.transpose(-1, -2) @ query, of_value)
                for padded, row_THD in zip(gradients, found, strict=True):
                    group.put(padded, row_THD)
        return *found, None, None
