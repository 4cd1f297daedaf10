"""Proof of the active strategy, from the prepared model; and whole weights."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from finetune.compat.torch_private import offload_policies
from finetune.config.strategy_names import TOGETHER, sharded_as
from finetune.distributed.held_parts import part_of
from finetune.distributed.sharding import engine_of, reshard, sharding_of
from finetune.distributed.strategy import Strategy
from finetune.hardware.cards import peak_flops


def prove_active(
    accelerator: Accelerator, strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Compare the active strategy with the requested one.

    Raises:
        RuntimeError: if the strategy or the number of processes differs, or the model is not sharded as it should be.
    """
    found = (active_name(model), accelerator.num_processes)
    wrapped = TOGETHER.get(strategy.name, strategy.name)
    if found != (wrapped, strategy.world_size):
        raise RuntimeError(
            f"The launch asked for {strategy.name} with {strategy.world_size} processes, but {found[0]} with "
            f"{found[1]} is active; nothing was trained. Launch with an unchanged file of accelerate_configs/."
        )
    if problem := sharding_of(strategy, model, optimizer).problem():
        raise RuntimeError(f"Under {strategy.name}, {problem}")


def active_name(model: torch.nn.Module) -> str:
    """The strategy of a prepared model, determined from the model itself."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if isinstance(model, FSDPModule):
        meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
        if len(meshes) < sum(not each.is_meta for each in model.parameters()):
            return "fsdp2 with unsharded parameters"
        offloads = all(isinstance(policy, CPUOffloadPolicy) for policy in offload_policies(model))
        if part := part_of(model):
            return sharded_as(part.strategy) or f"{part.strategy} with sharded parts"
        return ("hsdp" if meshes[0].ndim == 2 else "fsdp2") + ("_offload" if offloads else "")
    if part := part_of(model):
        return part.strategy
    if engine := engine_of(model):
        devices = {target.device for target in (engine.zero_offload_optimizer(), engine.zero_offload_param()) if target}
        suffix = "_nvme" if "nvme" in devices else "_offload" if "cpu" in devices else ""
        return f"zero{engine.zero_optimization_stage()}{suffix}"
    return "single"


def fuses(accelerator: Accelerator) -> bool:
    """Whether the optimizer may use a fused kernel.

    With a loss scaler, the kernel itself decides to skip a step, and Accelerate would count that step as done.
    """
    return accelerator.device.type == "cuda" and accelerator.scaler is None


def trained_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and whole shape of every trained parameter of a model before it is prepared: what a result must contain."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters() if p.requires_grad}


def full_parameters(
    accelerator: Accelerator, model: torch.nn.Module, *, with_frozen: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole value of each trained parameter, one at a time, so that only one gathered tensor is alive.

    Every process must iterate over all of them (gathering is collective). Values are the fp32 masters if there are
    any.

    Args:
        with_frozen: of all others too, as the model computes with them.
    """
    reshard(model)
    if engine := engine_of(model):
        from deepspeed.utils import safe_get_full_fp32_param
    if part := part_of(model):
        yield from part.parameters(model, with_frozen=with_frozen)
        return
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        if not (with_frozen or parameter.requires_grad):
            continue
        if engine and not parameter.requires_grad:
            with _gathered(engine, parameter):
                yield name, parameter.detach()
        elif isinstance(parameter, DTensor):
            device = parameter.device_mesh.device_type
            shard: Any = parameter.detach().to(device)
            yield name, shard.full_tensor()
        elif engine:
            yield name, safe_get_full_fp32_param(parameter)
        else:
            yield name, parameter.detach()


def working_parameters(accelerator: Accelerator, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole value of each trained parameter as the model computes with it, one at a time.

    They take another path than the masters of ``full_parameters``, so the two can be compared; but for parts of a
    model, which have one way to become whole. Collective.
    """
    if part := part_of(model):
        yield from part.parameters(model)
        return
    bare = accelerator.unwrap_model(model)
    sharded: list[tuple[str, Any]] = [
        (name, module) for name, module in bare.named_modules() if isinstance(module, FSDPModule)
    ]
    if sharded:
        names = {name for name, p in bare.named_parameters() if p.requires_grad}
        for prefix, module in sharded:
            module.unshard()
            for name, parameter in module.named_parameters(prefix):
                if name in names and not isinstance(parameter, DTensor):
                    yield name, parameter.detach()
            module.reshard()
        return
    engine = engine_of(model)
    for name, parameter in bare.named_parameters():
        if parameter.requires_grad:
            with _gathered(engine, parameter):
                yield name, parameter.detach()


def _gathered(engine: Any, parameter: torch.nn.Parameter) -> AbstractContextManager[object]:
    """Within it a parameter is whole, which only ZeRO-3 partitions. Collective.

    Args:
        engine: DeepSpeed's, or None.
    """
    if engine is None or engine.zero_optimization_stage() != 3:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    gathered: AbstractContextManager[object] = GatheredParameters(parameter)
    return gathered


def peak_flops_of(accelerator: Accelerator) -> float | None:
    """Peak FLOP/s of this process's device, None if unknown."""
    return peak_flops(torch.cuda.get_device_name()) if accelerator.device.type == "cuda" else None
