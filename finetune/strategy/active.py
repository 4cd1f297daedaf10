"""What is really active, read off the prepared model; and the two things that depend on it: norms and whole weights."""

import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..flops import peak_flops
from .request import Strategy


def prove_active(
    accelerator: Accelerator, strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Hold what is active against what was asked for.

    Raises:
        RuntimeError: if it is another strategy, another number of processes, or not sharded as it should be.
    """
    found = (active_name(model), accelerator.num_processes)
    if found != (strategy.name, strategy.world_size):
        raise RuntimeError(
            f"The launch asked for {strategy.name} with {strategy.world_size} processes, but {found[0]} with "
            f"{found[1]} is active; nothing was trained. Launch with an unchanged file of accelerate_configs/."
        )
    total, held = trained_elements(model, optimizer)
    if held > 1.1 * total / strategy.shards + 4096 * strategy.world_size:  # shards are padded to equal sizes
        raise RuntimeError(
            f"{strategy.name} should leave {total / strategy.shards:.0f} of {total} trained elements to each of "
            f"{strategy.world_size} processes, but this one holds {held}; nothing was trained. Please report this."
        )


def active_name(model: torch.nn.Module) -> str:
    """The strategy that a prepared model is really under, read off the model itself."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if isinstance(model, FSDPModule):
        meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
        if len(meshes) < len(list(model.parameters())):
            return "fsdp2 with unsharded parameters"
        groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
        offloads = all(isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups if g is not None)
        return ("hsdp" if meshes[0].ndim == 2 else "fsdp2") + ("_offload" if offloads else "")
    if engine := _engine(model):
        devices = {target.device for target in (engine.zero_offload_optimizer(), engine.zero_offload_param()) if target}
        suffix = "_nvme" if "nvme" in devices else "_offload" if "cpu" in devices else ""
        return f"zero{engine.zero_optimization_stage()}{suffix}"
    return "single"


def _engine(model: torch.nn.Module) -> Any:
    """The model, if it is a DeepSpeed engine; DeepSpeed is optional, and not imported to ask."""
    deepspeed: Any = sys.modules.get("deepspeed")
    return model if deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine) else None


def trained_elements(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Trained elements of the whole model, and those whose optimizer state this process holds."""
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if (engine := _engine(model)) and engine.zero_optimization_stage() == 3:
        return sum(p.ds_numel for p in trained), sum(p.ds_tensor.ds_numel for p in trained)
    total = sum(p.numel() for p in trained)
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    return total, sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in owned)


def clip_grad_norm(accelerator: Accelerator, model: torch.nn.Module, max_grad_norm: float) -> torch.Tensor | float:
    """Clip the accumulated gradients to a global norm (0: do not), and return the norm before clipping.

    DeepSpeed has stepped inside ``backward`` by then, clipped as ``start`` told it to; it reports its norm.
    """
    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def fuses(accelerator: Accelerator) -> bool:
    """Whether the optimizer may step in a fused kernel.

    Under a loss scaler the kernel decides by itself to skip a step, which Accelerate then takes for a done one.
    """
    return accelerator.device.type == "cuda" and accelerator.scaler is None


def full_parameters(accelerator: Accelerator, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole value of each parameter, one after the other, so that one gathered tensor is alive at a time.

    Every process must run through all of them (gathering is collective). Values are the fp32 masters where
    there are any.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves some parameters gathered, rounded to the precision of computation
    if engine := _engine(model):
        from deepspeed.utils import safe_get_full_fp32_param
    for name, parameter in accelerator.unwrap_model(model).named_parameters():
        if isinstance(parameter, DTensor):
            device = parameter.device_mesh.device_type
            shard: Any = parameter.detach().to(device)
            yield name, shard.full_tensor()
        elif engine and parameter.requires_grad:
            yield name, safe_get_full_fp32_param(parameter)
        else:
            yield name, parameter.detach()


def peak_flops_of(accelerator: Accelerator) -> float | None:
    """Peak FLOP/s of this process's device, where it is known."""
    return peak_flops(torch.cuda.get_device_name()) if accelerator.device.type == "cuda" else None
