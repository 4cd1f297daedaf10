"""Flat shards: which elements of each trained parameter this process holds, and in which tensor.

Under every strategy they are a contiguous range of the flattened parameter: all elements (one process, DDP), rows of
its first dimension (FSDP2, and experts under ep), or a part of a flat partition that several parameters share (ZeRO).
But for tensor parallelism, where they may be columns: then the processes of a group have the whole together, or of
shards of columns a range of it.

Example: a weight of shape (5, 3), 15 elements, on 2 processes. Process 1 holds the last two rows under FSDP2: begin 9,
count 6. ZeRO-3 cuts the weight into parts of 8, the last one padded: begin 8, count 7. ZeRO-2 puts the weight and a
bias of 5 end to end, 10 elements a process: weight begin 10, count 5, offset 0, and bias begin 0, count 5, offset 5.
Of a weight of shape (4, 6) whose columns two processes split, and two shard each part: the last of the four holds
columns 3 to 5 of rows 2 and 3, begin 15, count 6, in 2 stretches; the two of its group hold elements 12 to 23 together.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch.distributed.tensor import DTensor, Shard

from finetune.compat.deepspeed_private import flat_mapping, in_memory
from finetune.distributed.held_parts import Held, part_of
from finetune.distributed.sharding import engine_of
from finetune.distributed.strategy import Strategy

BLOCK = 256
"""Elements that share one scale in the 8-bit state of bitsandbytes."""


@dataclass(frozen=True)
class FlatShard:
    """The part of a trained parameter that this process holds."""

    name: str
    """Of the parameter in the bare model."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    begin: int
    """Index of its first element in the flattened parameter."""
    count: int
    """Number of elements, at least one."""
    holder: torch.Tensor
    """The tensor that the optimizer steps on and keys its state by: the parameter, or a flat partition of several."""
    offset: int
    """Index of its first element in the flattened holder."""
    keeps_blocks: bool
    """Whether the holders' blocks of ``BLOCK`` elements are also blocks of the whole parameter, on every process."""
    held: Held | None = None
    """Which part of the parameter it is, or is a shard of, where no process has the whole model."""
    stretches: int = 1
    """Ranges of the flattened parameter that it consists of, the first from ``begin`` on. Where there are several, the
    processes of a group have one range together."""

    @property
    def begin_of_group(self) -> int:
        """Index of the first element of that range."""
        return self.begin - self.held.part * self.held.stretch if self.held else self.begin


def trained_parameters(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Name in the bare model and trained parameter, in the model's order."""
    bare = extract_model_from_parallel(model)
    return [(name, parameter) for name, parameter in bare.named_parameters() if parameter.requires_grad]


def flat_shards(strategy: Strategy, model: torch.nn.Module, *, values: bool) -> Iterator[FlatShard]:
    """What this process holds of each trained parameter of a prepared model.

    Args:
        values: read holders on disk for their shards and write them back afterwards, so a shard is valid until the
            next one is requested. Without it, holders on disk are empty.
    """
    engine = engine_of(model)
    if part := part_of(model):
        for name, parameter in trained_parameters(model):
            yield from _of_part(part.held[name], name, parameter)
    elif engine is None:
        for name, parameter in trained_parameters(model):
            yield from _of_rows(name, parameter) if isinstance(parameter, DTensor) else _of_whole(name, parameter)
    elif engine.zero_optimization_stage() == 3:
        yield from _of_own_partitions(strategy, model, engine.optimizer, values)
    else:
        yield from _of_common_partitions(strategy, model, engine.optimizer)


def _of_whole(name: str, parameter: torch.Tensor) -> Iterator[FlatShard]:
    yield FlatShard(name, tuple(parameter.shape), 0, parameter.numel(), parameter, 0, keeps_blocks=True)


def _of_part(held: Held, name: str, parameter: torch.Tensor) -> Iterator[FlatShard]:
    """Pipelines, tensor and expert parallelism: the whole parameter, equal numbers of its rows, or of its columns; or
    shards of these."""
    begin, count, first_cut = _rows_of(parameter)
    if not count:
        return
    if held.is_split:  # a range of a part, or some rows of its columns
        is_of_columns = held.stretch < parameter.numel()
        begin = held.part * held.stretch + begin * (held.share.split.parts if is_of_columns else 1)
    keeps = _keeps_blocks(0, held.stretch, held.shape.numel()) and _keeps_blocks(0, first_cut, parameter.numel())
    stretches = -(-count // held.stretch)
    yield FlatShard(name, tuple(held.shape), begin, count, parameter, 0, keeps, held, stretches)


def _of_rows(name: str, parameter: DTensor) -> Iterator[FlatShard]:
    """FSDP2 and HSDP: equal numbers of rows; the last processes may have fewer or none."""
    begin, count, first_cut = _rows_of(parameter)
    if count:
        keeps = _keeps_blocks(0, first_cut, parameter.numel())
        yield FlatShard(name, tuple(parameter.shape), begin, count, parameter, 0, keeps)


def _rows_of(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Of the flattened parameter the first element that this process holds, how many it holds, and where the first
    process's end; all of one that is not sharded."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel(), parameter.numel()
    assert parameter.placements[-1] == Shard(0), parameter.placements
    mesh, coordinates = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    rows, columns = parameter.shape[0], parameter.shape[1:].numel()
    most = -(-rows // mesh.size(mesh.ndim - 1))
    first = min(most * coordinates[-1], rows)
    count = min(most, rows - first) * columns
    assert parameter.to_local().numel() == count
    return first * columns, count, most * columns


def _of_common_partitions(strategy: Strategy, model: torch.nn.Module, zero: Any) -> Iterator[FlatShard]:
    """ZeRO-1 and ZeRO-2: the parameters of a group lie end to end in a flat tensor, of which each process has a part.

    DeepSpeed records where.
    """
    for name, parameter in trained_parameters(model):
        mapping = flat_mapping(parameter)
        if mapping is None:
            continue
        place, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        (holder,) = zero.optimizer.param_groups[mapping.param_group_index]["params"]
        offset = (strategy.rank * holder.numel() + there.start - place.start) % holder.numel()
        keeps = _keeps_blocks(offset, holder.numel() - offset, parameter.numel())
        yield FlatShard(name, tuple(parameter.shape), place.start, place.numel, holder, there.start, keeps)


def _of_own_partitions(strategy: Strategy, model: torch.nn.Module, zero: Any, values: bool) -> Iterator[FlatShard]:
    """ZeRO-3: each parameter is cut into equal parts, the last one padded; the parts of a process lie end to end."""
    named = trained_parameters(model)
    for group, flat in enumerate(zero.fp32_partitioned_groups_flat):
        holding: AbstractContextManager[torch.Tensor] = in_memory(zero, group) if values else nullcontext(flat)
        with holding as holder:
            for name, parameter in named:
                own_group, offset, part = zero.grad_position[zero.get_param_id(parameter)]
                begin = strategy.rank * part
                count = min(part, parameter.ds_numel - begin)
                if own_group == group and count > 0:
                    keeps = _keeps_blocks(offset, part, parameter.ds_numel)
                    yield FlatShard(name, tuple(parameter.ds_shape), begin, count, holder, offset, keeps)


def _keeps_blocks(offset: int, first_cut: int, elements: int) -> bool:
    """Whether a parameter begins at the edge of a block and is only cut between blocks."""
    return offset % BLOCK == 0 and (first_cut >= elements or first_cut % BLOCK == 0)
