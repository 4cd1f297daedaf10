"""Tensors that the processes of a group exchange, with gradients that go back the same way."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


class Ordered(torch.autograd.Function):
    """The elements of a first dimension in another order, with its reverse, so that gradients need no sums."""

    @staticmethod
    def forward(ctx: Any, row: torch.Tensor, order: torch.Tensor, reverse: torch.Tensor) -> torch.Tensor:
        ctx.reverse = reverse
        return row.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_row: torch.Tensor) -> Any:
        return of_row.index_select(0, ctx.reverse), None, None


class Exchanged(torch.autograd.Function):
    """The i-th part of a first dimension goes to the i-th process, and in its place comes what that process had for
    this one: an all-to-all. Parts are of equal size, or as large as ``sent`` and ``received`` say."""

    @staticmethod
    def forward(
        ctx: Any,
        parts: torch.Tensor,
        group: Any,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> torch.Tensor:
        ctx.known = group, received, sent
        return exchange(parts, group, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_parts: torch.Tensor) -> Any:
        return exchange(of_parts.contiguous(), *ctx.known), None, None, None


def exchange(
    parts: torch.Tensor, group: Any, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> torch.Tensor:
    """As ``Exchanged``, of contiguous parts and without gradients."""
    size = parts.shape[0] if received is None else sum(received)
    found = parts.new_empty(size, *parts.shape[1:])
    sizes: dict[str, Any] = {}
    if sent is not None and received is not None:
        sizes = {"input_split_sizes": [*sent], "output_split_sizes": [*received]}
    dist.all_to_all_single(found, parts, group=group, **sizes)
    return found
