"""Context parallelism: each process of a group gets its positions of the group's micro-batches, and trains on them."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from finetune.data.batches import IGNORED, document_bounds
from finetune.distributed.strategy import Strategy
from finetune.models.context_attention import ContextShare, How

Collate = Callable[..., Any]
HOW: dict[str, How] = {"cp": "gather", "ulysses": "exchange", "cp_tp": "gather"}
"""In which attention gets what other processes have."""


def shared(collate: Collate, strategy: Strategy) -> Collate:
    """``collate`` for one process of its context group, whose processes are given the same rows. Collective.

    The loss of each is the sum over its own positions, and what positions need of one another they find in attention.
    """
    if strategy.context == 1:
        return collate
    sharing: dict[tuple[int, int], list[int]] = {}
    for rank, share in enumerate(strategy.shares):  # those with the same part of each layer
        sharing.setdefault((share, rank % strategy.tensor), []).append(rank)
    groups = {place: dist.new_group(ranks) for place, ranks in sharing.items()}
    own = groups[strategy.shares[strategy.rank], strategy.rank % strategy.tensor]

    def collate_own(places: Any, device: torch.device) -> Any:
        return share_of(collate(places, torch.device("cpu")), own, strategy, device)

    return collate_own


def share_of(micro_batch: Any, group: Any, strategy: Strategy, device: torch.device) -> Any:
    """The positions of this process of a micro-batch on the host, whose rows lie end to end.

    Its end is filled up with a document that is not trained, to chunks of equal size.

    Args:
        micro_batch: tokens to predict and the model's keyword arguments; or an object that has them and others.
    """
    is_pair = isinstance(micro_batch, tuple)
    next_tokens_1T, inputs = micro_batch if is_pair else (micro_batch.next_tokens, micro_batch.inputs)
    bounds = inputs["cu_seq_lens_q"].tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if missing := -bounds[-1] % (2 * strategy.context):
        lengths.append(missing)
    share = ContextShare.of(lengths, group, HOW[strategy.name], device)

    def take(row_1T: torch.Tensor, *, filler: int = 0) -> torch.Tensor:
        return F.pad(row_1T, (0, missing), value=filler)[:, share.own].to(device)

    own_inputs = {
        "input_ids": take(inputs["input_ids"]),
        "position_ids": document_bounds(lengths, share.own.device)["position_ids"][:, share.own].to(device),
        "context_share": share,
    }
    next_tokens = take(next_tokens_1T, filler=IGNORED)
    if is_pair:
        return next_tokens, own_inputs
    return micro_batch.shared(take, next_tokens, own_inputs, counts=share.is_first)
