"""The training state as flat shards of tensors, in one form for all strategies: the contents of a checkpoint.

``pieces`` returns live views of the trained parameters (fp32 masters if there are any) and of their optimizer state. To
save, read them. To load, call ``make_optimizer_state``, overwrite them, then call ``set_optimizer_steps`` and
``sync_compute_weights``. 8-bit state is quantised in blocks of 256 elements of this process's shard. If those are not
blocks of the whole tensor, its pieces get names that only the same launch looks for. Columns of a tensor, which tensor
parallelism gives a process, are put together with the others' for as long as they are read or overwritten.

Example: a weight of shape (5, 3) under FSDP2 on 2 processes. Process 1 yields ``weights/w`` with begin 9 and 6 values,
then ``optimizer/exp_avg/w`` alike. Under HSDP on 4 processes, ranks 1 and 3 hold these same 6 values: rank 1 writes
values 0 to 2, rank 3 writes 3 to 5. Of 8-bit state of 2,048 elements, process 1 of 2 has scales 4 to 7 of 8.
Of a weight of shape (3, 4) whose columns two processes split, each yields all 12 values, and writes 6 of them; where
each part is sharded over two more, the group that has rows 0 and 1 yields 8 values, and the other one 4.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from finetune.compat.deepspeed_private import drop_gathered_weights, in_memory, step_partition, write_compute_weights
from finetune.distributed.flat_shards import BLOCK, FlatShard, flat_shards
from finetune.distributed.held_parts import Held, part_of
from finetune.distributed.sharding import engine_of, reshard
from finetune.distributed.strategy import Strategy
from finetune.errors import InputError
from finetune.optim.averaging import AVERAGED_STEPS
from finetune.optim.optimizer import state_of
from finetune.optim.rounding import local_shard

WEIGHTS = "weights/"
OF_THIS_LAUNCH = "@"
"""In the names of pieces that no other launch looks for."""
STEPS = ("step", AVERAGED_STEPS)
"""State entries that count steps; both have the same value, and SGD has only the second."""
LEFT_OUT = (*STEPS, "RMS", "qmap1", "qmap2")
"""State entries that are not pieces: steps are saved by ``optimizer_steps``, the others are computed."""


@dataclass(frozen=True)
class Piece:
    """The shard of a flattened tensor that this process holds."""

    name: str
    """``weights/<parameter name>`` or ``optimizer/<state key>/<parameter name>``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    begin: int
    """Index of its first element in the flattened tensor."""
    values: torch.Tensor
    """Shape (elements,): a live view of the values that training uses; writing to it changes them."""
    written: tuple[int, int]
    """Begin and end of the ``values`` that this process writes (possibly none), so that all processes together write
    each element of the tensor once."""


def pieces(strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
    """Trained parameters and their optimizer state, in the same order at every call. Collective under tensor
    parallelism.

    A piece is valid until the next one is requested. Iterate over all of them: state on disk is written back, and so
    are columns.

    Args:
        model, optimizer: as ``prepare`` returned them.
    """
    for piece, shard in _own(strategy, model, optimizer):
        if shard.held is None or shard.stretches == 1 or OF_THIS_LAUNCH in piece.name:
            yield piece
            continue
        held = shard.held
        whole = held.joined(piece.values, shard.stretches)
        begin = shard.begin_of_group // (shard.count // piece.values.numel())
        parts = held.share.split.parts
        written = _shared(whole.numel(), held.holder * parts + held.part, held.holders * parts)
        yield replace(piece, begin=begin, values=whole, written=written)
        piece.values.copy_(held.own(whole, shard.stretches))


def own_values(
    strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of each piece as this process holds them, whichever elements they are. None lies on disk."""
    for piece, _ in _own(strategy, model, optimizer):
        yield piece.name, piece.values


def _own(
    strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Piece, FlatShard]]:
    """The pieces of each shard; those that are no one range have the values of this process alone."""
    reshard(model)
    part = part_of(model)
    inner = inner_optimizer(model, optimizer)
    for shard in flat_shards(strategy, model, values=True):
        first, end = shard.offset, shard.offset + shard.count
        values = _flat(shard.holder)[first:end]
        writes = part is None or part.owns(shard.name)
        known: dict[str, Any] = {"writes": writes, "held": shard.held}
        yield _piece(strategy, f"{WEIGHTS}{shard.name}", shard.shape, shard.begin, values, **known), shard
        state = state_of(inner, shard.holder)
        for key, value in state.items():
            if key not in LEFT_OUT:
                blockwise = f"absmax{key[-1]}" in state
                yield _state_piece(strategy, shard, key, value, blockwise=blockwise, writes=writes), shard


def _state_piece(
    strategy: Strategy, shard: FlatShard, key: str, value: torch.Tensor, *, blockwise: bool, writes: bool
) -> Piece:
    """One tensor of optimizer state: one element per weight, one per block, or a shape of its own."""
    name, shape, begin, flat = f"optimizer/{key}/{shard.name}", shard.shape, shard.begin, _flat(value)
    first, end = shard.offset, shard.offset + shard.count
    held = local_shard(shard.holder).numel()
    if key.startswith("absmax"):
        first, end = first // BLOCK, -(-end // BLOCK)
        shape, begin = (-(-torch.Size(shape).numel() // BLOCK),), begin // BLOCK
    elif flat.numel() != held:
        assert shard.count == held == torch.Size(shape).numel(), f"{name} cannot be cut"
        first, end, shape = 0, flat.numel(), tuple(value.shape)
    if blockwise and not shard.keeps_blocks:
        cut, number = f"{strategy.world_size} processes", strategy.shard
        if shard.held is not None:  # replicas, however many, hold the same
            cut = f"{shard.held.share.split.parts} processes" + (f", {strategy.shards} shards" * (strategy.shards > 1))
            number += shard.held.part * strategy.shards
        name += f"{OF_THIS_LAUNCH}{strategy.name}, {cut}, shard {number}"
        shape, begin = (end - first,), 0
    return _piece(strategy, name, shape, begin, flat[first:end], writes=writes, held=shard.held)


def _piece(
    strategy: Strategy,
    name: str,
    shape: tuple[int, ...],
    begin: int,
    values: torch.Tensor,
    *,
    writes: bool = True,
    held: Held | None = None,
) -> Piece:
    """The processes that hold the same shard write equal parts of it.

    Args:
        held: as ``FlatShard.held``.
    """
    replicas, replica = strategy.world_size // strategy.shards, strategy.rank // strategy.shards
    if held is not None:
        replicas, replica = held.holders, held.holder
    return Piece(name, shape, begin, values, _shared(values.numel() if writes else 0, replica, replicas))


def _shared(elements: int, number: int, processes: int) -> tuple[int, int]:
    """Begin and end of the elements that one of so many processes writes."""
    return elements * number // processes, elements * (number + 1) // processes


def make_optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the optimizer would create at its first step, if it has none; nothing else changes.

    It takes a step with zero gradients and zero learning rate, so each optimizer creates its state in its own way.
    Training continues from it exactly as without state.
    """
    inner, zero = inner_optimizer(model, optimizer), _zero(model)
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = 0.0
    if zero is not None and _has_own_partitions(model):
        for number in range(len(zero.fp32_partitioned_groups_flat)):
            with in_memory(zero, number) as holder:
                _step_on_zeros(inner, [holder], partial(step_partition, zero, number))
    else:
        _step_on_zeros(inner, [p for group in inner.param_groups for p in group["params"]], inner.step)
    for group, rate in zip(inner.param_groups, rates):
        group["lr"] = rate


def _step_on_zeros(inner: torch.optim.Optimizer, holders: list[torch.Tensor], step: Callable[[], object]) -> None:
    gradients = [holder.grad for holder in holders]
    without = [holder for holder in holders if not state_of(inner, holder)]
    for holder in holders:
        holder.grad = None  # it is not stepped on
    for holder in without:
        holder.grad = torch.zeros_like(holder)
    if without:
        step()
    for holder, gradient in zip(holders, gradients):
        holder.grad = gradient
    for holder in without:
        state = state_of(inner, holder)
        _set_step(state, 0)
        for number in "12":
            if f"absmax{number}" in state:  # of nothing but zeros, bitsandbytes makes any code
                state[f"state{number}"].fill_(int(state[f"qmap{number}"].abs().argmin()))


def optimizer_steps(strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Name and optimizer steps of each parameter of which this process holds a part."""
    return {
        name: int(next(state[key] for key in STEPS if key in state))
        for name, state in _counted(strategy, model, optimizer)
    }


def set_optimizer_steps(
    strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: dict[str, int]
) -> None:
    """Set what ``optimizer_steps`` returned, merged from all processes.

    Raises:
        InputError: if parameters have different step counts, and share one count under this strategy.
    """
    if engine_of(model) and len(counts := set(steps.values())) > 1:
        raise InputError(
            f"The optimizer took between {min(counts)} and {max(counts)} steps on different parameters, but "
            f"{strategy.name} keeps one count for all; resume with the strategy file of the checkpoint."
        )
    counted = dict(_counted(strategy, model, optimizer))
    for name, state in counted.items():
        _set_step(state, steps[name])
    if engine_of(model):
        _multiply_powers(inner_optimizer(model, optimizer), max((steps[name] for name in counted), default=0))


def _multiply_powers(inner: torch.optim.Optimizer, steps: int) -> None:
    """Let DeepSpeed's CPU Adam compute the powers of its betas as in training, by multiplying step after step: powers
    computed at once differ in the last bit."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if not isinstance(inner, DeepSpeedCPUAdam):
        return
    group = inner.param_groups[0]  # Accelerate passes on the groups' own values, and leaves the defaults
    (beta1, beta2), epsilon = group["betas"], group["eps"]
    element = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):
        inner.ds_opt_adam.adam_update(inner.opt_id, step, 0.0, beta1, beta2, epsilon, 0.0, True, *element)


def _counted(
    strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Any]]]:
    inner = inner_optimizer(model, optimizer)
    for shard in flat_shards(strategy, model, values=False):
        state = state_of(inner, shard.holder)
        if any(key in state for key in STEPS):
            yield shard.name, state


def _set_step(state: dict[str, Any], step: int) -> None:
    for key in STEPS:
        if isinstance(state.get(key), torch.Tensor):
            state[key].fill_(step)
        elif key in state:
            state[key] = step


@torch.no_grad()
def sync_compute_weights(model: torch.nn.Module) -> None:
    """Update the weights that the model computes with from the masters, after pieces were overwritten. Collective."""
    zero = _zero(model)
    if zero is None:
        return  # the masters are what is computed with
    if not _has_own_partitions(model):
        zero.update_lp_params()
        return
    drop_gathered_weights(zero)
    for number in range(len(zero.fp32_partitioned_groups_flat)):
        with in_memory(zero, number):
            write_compute_weights(zero, number)
    zero.invalidate_secondary_tensor()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return local_shard(tensor.detach()).view(-1)


def inner_optimizer(model: torch.nn.Module, optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that steps, without Accelerate's wrapper and DeepSpeed's."""
    zero = _zero(model)
    return optimizer.optimizer if zero is None else zero.optimizer


def _zero(model: torch.nn.Module) -> Any:
    """DeepSpeed's optimizer around the inner one, None without DeepSpeed."""
    engine = engine_of(model)
    return None if engine is None else engine.optimizer


def _has_own_partitions(model: torch.nn.Module) -> bool:
    return engine_of(model).zero_optimization_stage() == 3
