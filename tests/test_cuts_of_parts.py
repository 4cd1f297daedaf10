"""Shards of parts of any shape hold each element of a parameter, and checkpoints write it once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from finetune.compat.fake_tensors import FakeStore
from finetune.distributed import flat_shards, sharded_state
from finetune.distributed.held_parts import held_of
from finetune.distributed.part_shards import share_of
from finetune.distributed.strategy import Strategy
from finetune.models.tensor_plan import Share, Split, join_flat

CUTS = {
    "columns of which shards have unequal numbers of rows": ((3, 4), Split(1, 2)),
    "one row, which one shard has": ((1, 8), Split(1, 2)),
    "columns over four": ((7, 8), Split(1, 4)),
    "rows": ((8, 2), Split(0, 2)),
    "whole, with fewer rows than shards": ((2, 3), Split()),
    "whole, a vector": ((5,), Split()),
    "experts, several outputs end to end": ((3, 8, 4), Split(1, 2, 2)),
    "experts, inputs": ((3, 4, 8), Split(2, 2)),
}


@contextmanager
def process(rank: int, processes: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def own_of(whole: torch.Tensor, split: Split, strategy: Strategy) -> tuple[Any, Any]:
    """Which part this process holds of a tensor, and its shard of it as FSDP2 cuts it."""
    size, rank = strategy.tensor, strategy.rank
    held = held_of(Share(split), whole.shape, strategy, size, None)
    part = split.take(whole, held.part).contiguous() if split.parts > 1 else whole
    shards = [*part.chunk(strategy.shards), *[part[:0]] * strategy.shards]
    mesh = DeviceMesh("cpu", [*range(strategy.world_size)][rank % size :: size])
    known: Any = {"run_check": False, "shape": part.shape, "stride": part.stride()}
    return held, DTensor.from_local(shards[strategy.shard].contiguous(), mesh, [Shard(0)], **known)


@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CUTS)
def test_each_element_is_in_its_place_and_written_by_one_process(name: str, size: int, shards: int):
    (shape, split), processes = CUTS[name], size * shards
    if size % split.parts:
        pytest.skip("fewer processes than parts")
    whole, found = torch.arange(torch.Size(shape).numel()).view(shape), {}
    for rank in range(processes):
        strategy = Strategy("fsdp2_tp", rank, processes, 1, "no", True, tensor=size)
        with process(rank, processes):
            held, own = own_of(whole, split, strategy)
            found[rank] = held, own.to_local().reshape(-1), [*flat_shards._of_part(held, "w", own)], strategy
            assert own.to_local().numel() <= share_of(own.numel(), own.shape, shards)
    written = torch.zeros(whole.numel(), dtype=torch.long)
    for rank, (held, values, cuts, strategy) in found.items():
        for cut in cuts:
            begin, group = cut.begin, rank // size * size
            if cut.stretches == 1:
                first, end = sharded_state._piece(strategy, "w", shape, begin, values, held=held).written
            else:  # the processes of a group have a range together
                values = join_flat(
                    [found[each][1] for each in range(group, group + size)][:: held.copies], cut.stretches
                )
                begin, parts = cut.begin_of_group, held.share.split.parts
                number, of = held.holder * parts + held.part, held.holders * parts
                first, end = sharded_state._shared(values.numel(), number, of)
            assert torch.equal(values, whole.flatten()[begin : begin + len(values)])
            written[begin + first : begin + end] += 1
    assert torch.equal(written, torch.ones_like(written))


def test_state_in_blocks_of_a_process_has_a_name_that_no_other_cut_has():
    """Of 16 processes, 8 or 4 for each layer: as many shards of the same size, with other elements in them."""
    whole, names = torch.arange(16 * 1376 * 8).view(16, -1), {}
    for size in (8, 4):
        strategy = Strategy("fsdp2_tp", 5, 16, 1, "bf16", True, tensor=size)
        with process(5, 16):
            held, own = own_of(whole, Split(1, size), strategy)
            (cut,) = flat_shards._of_part(held, "w", own)
            state = torch.zeros(cut.count, dtype=torch.uint8)
            piece = sharded_state._state_piece(strategy, cut, "state1", state, blockwise=True, writes=True)
        assert not cut.keeps_blocks
        names[piece.name] = piece.shape, own.to_local().flatten().tolist()
    (one, first), (other, second) = names.values()
    assert one == other == (whole.numel() // 16,)
    assert first != second
