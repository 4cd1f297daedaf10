"""How a strategy affects loading, and what is changed before it takes the model: in partitions or whole, by which
processes, and to which device."""

import contextlib
import os
from collections.abc import Iterable, Iterator

import torch
from accelerate import Accelerator

from finetune.compat.transformers_private import read_whole
from finetune.distributed.strategy import Strategy
from finetune.errors import InputError
from finetune.units import GIB


def loading_device(accelerator: Accelerator, strategy: Strategy, quantised_bytes: int) -> torch.device:
    """Device that quantised weights are read to: the GPU if it has room for all of them.

    FSDP can also shard them from host memory, and parts of the model can be taken from there.

    Args:
        quantised_bytes: of the whole model; 0 if it is not quantised.

    Raises:
        InputError: if the strategy needs them on the GPU and they do not fit.
    """
    if strategy.rehearsal:
        return accelerator.device
    free = torch.cuda.mem_get_info(accelerator.device)[0]
    from_host = strategy.is_fsdp or strategy.takes_parts
    needed = 2 * quantised_bytes if strategy.is_fsdp else quantised_bytes  # whole beside its shards, for a moment
    if needed < 0.9 * free:
        return accelerator.device
    if from_host:
        return torch.device("cpu")
    raise InputError(
        f"{strategy.name} first puts the whole quantised model, {quantised_bytes / GIB:.1f} GiB, on each GPU, but only "
        f"{free / GIB:.1f} GiB are free; use the strategy file fsdp2, which can shard it from host memory."
    )


@contextlib.contextmanager
def whole_weights(parameters: Iterable[torch.nn.Parameter], *, writes: bool = False) -> Iterator[None]:
    """Within it weights of a model that is not prepared yet are whole, also where ZeRO-3 has partitioned them.

    Collective.

    Args:
        writes: what the first process writes into them stays; else they are only read.
    """
    partitioned = list({id(each): each for each in parameters if hasattr(each, "ds_id")}.values())
    if not partitioned:
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters(partitioned, modifier_rank=0 if writes else None):
        yield


@contextlib.contextmanager
def loading(accelerator: Accelerator, strategy: Strategy, *, whole: bool, by_every_process: bool) -> Iterator[None]:
    """The context to load a model in.

    Args:
        whole: even under ZeRO-3, which partitions weights while they are read. Random weights drawn in partitions
            would differ, and quantised ones cannot be read in partitions.
        by_every_process: even under FSDP, which lets one process read and the others receive.
    """
    if by_every_process and strategy.is_fsdp:
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # where transformers looks
    with read_whole() if whole else contextlib.nullcontext():
        yield


def counts(accelerator: Accelerator, strategy: Strategy, *, quantised: bool) -> bool:
    """Whether what this process writes into a model that is not prepared yet stays.

    All strategies give every process the first one's weights, when the model is prepared; but under FSDP each process
    cuts its shards from its own, where Accelerate does not load on the first one alone, as of a model in 4 bits. So
    does each process that takes a part of the model.
    """
    if accelerator.is_main_process or strategy.takes_parts:
        return True
    return strategy.is_fsdp and (quantised or not accelerator.state.fsdp_plugin.cpu_ram_efficient_loading)
