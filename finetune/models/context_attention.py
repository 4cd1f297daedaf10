"""Attention of rows whose positions are spread over the processes of a group: context parallelism.

A row of T positions is cut into 2 n chunks for n processes. Process i computes chunks i and 2 n - 1 - i, one from each
end: of a long document every token looks at all before it, so that late chunks take longer than early ones, and each
process gets one of both. With n = 2, chunks 0 1 2 3 go to the processes as 0 3 and 1 2.

Each layer then needs what other processes have. ``gather``: each keeps its queries and gathers the keys and values of
the whole row (arXiv:2407.21783, section 3.3.2), which are few where heads share them. ``exchange``: an all-to-all gives
each the whole row of its share of the heads, and another one brings the outputs back (DeepSpeed-Ulysses,
arXiv:2309.14509). Everything else in a layer computes each position by itself.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from finetune.compat.torch_private import all_gather_single, reduce_scatter_single
from finetune.models.exchange import Exchanged, Ordered

How = Literal["gather", "exchange"]
Part = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Bounds", "Bounds"], torch.Tensor]
"""Attention of some queries: queries, keys and values, each (1, heads, positions, head size), and the bounds of the
documents among queries and among keys, to (1, positions, heads, head size). The last query of a document stands at its
last key."""


@dataclass(frozen=True)
class Bounds:
    """Where documents that lie end to end begin, and where the last ends."""

    on_host: list[int]
    on_device: torch.Tensor
    """The same, int32."""

    @classmethod
    def of(cls, bounds: list[int], device: torch.device) -> "Bounds":
        return cls(bounds, torch.tensor(bounds, dtype=torch.int32).to(device, non_blocking=True))

    @property
    def longest(self) -> int:
        return longest(self.on_host)


def longest(bounds: Sequence[int]) -> int:
    """Tokens of the longest of documents that lie end to end."""
    return max(end - start for start, end in itertools.pairwise(bounds))


@dataclass(frozen=True)
class ContextShare:
    """What of a row is computed here, as a keyword argument of the model's forward."""

    group: Any
    """Of the processes that share the row."""
    how: How
    own: torch.Tensor
    """Positions of the row that this process has; on the host."""
    order: torch.Tensor
    """Where each position of the row is, in what the processes of the group have, end to end."""
    positions: torch.Tensor
    """The reverse: of the row, that of what they have."""
    keys: tuple[torch.Tensor, ...]
    """Likewise, of the positions that each of the two chunks here sees: from where the document of its first query
    begins to its last query."""
    query_bounds: Bounds
    """Of the documents, or parts of them, in both chunks."""
    key_bounds: Bounds
    """Of what each of them sees."""
    whole: Bounds
    """Of the documents in the row."""

    @classmethod
    def of(cls, lengths: Sequence[int], group: Any, how: How, device: torch.device) -> "ContextShare":
        """The share of this process.

        Args:
            lengths: tokens of each document in the row, a multiple of twice the size of the group together.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        bounds = [0, *itertools.accumulate(lengths)]
        chunks = torch.arange(bounds[-1]).view(2 * size, -1)
        by_process = [chunks[[each, 2 * size - 1 - each]].flatten() for each in range(size)]
        positions, tokens = torch.cat(by_process), chunks.shape[1]
        order = positions.argsort()
        keys, queries, seen = list[torch.Tensor](), [0], [0]
        for chunk in (rank, 2 * size - 1 - rank):
            first, end = chunk * tokens, (chunk + 1) * tokens
            begin = max(each for each in bounds if each <= first)
            ends = [*(each for each in bounds if first < each < end), end]
            keys.append(order[begin:end].to(device))
            queries += [queries[-1] + each - first for each in ends]
            seen += [seen[-1] + each - begin for each in ends]
        return cls(
            group,
            how,
            by_process[rank],
            order.to(device),
            positions.to(device),
            tuple(keys),
            query_bounds=Bounds.of(queries, device),
            key_bounds=Bounds.of(seen, device),
            whole=Bounds.of(bounds, device),
        )

    @property
    def is_first(self) -> bool:
        """Whether this process counts what is counted once for the row."""
        return bool(dist.get_rank(self.group) == 0)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Part) -> torch.Tensor:
        """Outputs of the positions of this process, (1, positions, heads, head size).

        Args:
            query: of these positions, (1, heads, positions, head size); ``key`` and ``value`` likewise.
        """
        if self.how == "exchange":
            return self._exchanging(query, key, value, part)
        sizes = key.shape[-1], value.shape[-1]
        own_TKD = torch.cat((key, value), dim=-1)[0].transpose(0, 1).contiguous()
        seen_TKD = _GatheredContext.apply(own_TKD, self.keys, self.group)
        seen_key, seen_value = seen_TKD.transpose(0, 1)[None].split(sizes, dim=-1)
        return part(query, seen_key, seen_value, self.query_bounds, self.key_bounds)

    def _exchanging(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Part) -> torch.Tensor:
        size = dist.get_world_size(self.group)
        times = max(1, size // key.shape[1])  # keys and values of fewer heads than processes are sent several times
        key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
        query, key, value = (self._to_heads(each, size) for each in (query, key, value))
        return self._to_positions(part(query, key, value, self.whole, self.whole)[0], size)[None]

    def _to_heads(self, own: torch.Tensor, size: int) -> torch.Tensor:
        """This process's share of the heads at all positions, given all heads at its own, as queries are."""
        parts_NTHD = own[0].transpose(0, 1).unflatten(1, (size, -1)).transpose(0, 1).contiguous()
        row_THD = Ordered.apply(Exchanged.apply(parts_NTHD, self.group).flatten(0, 1), self.order, self.positions)
        return row_THD.transpose(0, 1)[None]

    def _to_positions(self, row_THD: torch.Tensor, size: int) -> torch.Tensor:
        """The reverse, of outputs."""
        parts_NTHD = Ordered.apply(row_THD, self.positions, self.order).unflatten(0, (size, -1))
        return Exchanged.apply(parts_NTHD, self.group).transpose(0, 1).flatten(1, 2)


class _GatheredContext(torch.autograd.Function):
    """What each chunk sees of all processes' tensors; backward, each process gets the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, keys: tuple[torch.Tensor, ...], group: Any) -> torch.Tensor:
        ctx.keys, ctx.group, ctx.positions = keys, group, own.shape[0]
        whole = own.new_empty(dist.get_world_size(group) * own.shape[0], *own.shape[1:])
        all_gather_single(whole, own, group=group)
        return whole.index_select(0, torch.cat(keys))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_seen: torch.Tensor) -> Any:
        of_own = of_seen.new_empty(ctx.positions, *of_seen.shape[1:])
        of_whole = of_seen.new_zeros(dist.get_world_size(ctx.group) * ctx.positions, *of_seen.shape[1:])
        parts = of_seen.split([len(each) for each in ctx.keys])
        for each, of_part in zip(ctx.keys, parts, strict=True):  # one after the other: they may see the same positions
            of_whole.index_add_(0, each, of_part)
        reduce_scatter_single(of_own, of_whole, group=ctx.group)
        return of_own, None, None
