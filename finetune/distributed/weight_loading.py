"""How a model is loaded, where a strategy has a say in it: in partitions or whole, by whom, and where to."""

import contextlib
import os
from collections.abc import Iterator

import torch
from accelerate import Accelerator

from finetune.compat.transformers_private import read_whole
from finetune.distributed.strategy import Strategy
from finetune.errors import InputError
from finetune.units import GIB


def loading_device(accelerator: Accelerator, strategy: Strategy, quantised_bytes: int) -> torch.device:
    """Where quantised weights are put while they are read: on the GPU, if it has room for all of them.

    FSDP can also split them from host memory.

    Args:
        quantised_bytes: of the whole model; 0 if it is not quantised, and stays where it is read to.

    Raises:
        InputError: if a GPU has no room for them, and the strategy needs it to.
    """
    if strategy.rehearsal:
        return accelerator.device
    free = torch.cuda.mem_get_info(accelerator.device)[0]
    needed = 2 * quantised_bytes if strategy.is_fsdp else quantised_bytes  # whole beside its shards, for a moment
    if needed < 0.9 * free:
        return accelerator.device
    if strategy.is_fsdp:
        return torch.device("cpu")
    raise InputError(
        f"{strategy.name} puts the whole quantised model, {quantised_bytes / GIB:.1f} GiB, on each GPU at first, and "
        f"{free / GIB:.1f} GiB are free; take the strategy file fsdp2, which can split it from host memory."
    )


@contextlib.contextmanager
def loading(accelerator: Accelerator, strategy: Strategy, *, whole: bool, by_every_process: bool) -> Iterator[None]:
    """The context to load a model in.

    Args:
        whole: where ZeRO-3 would partition weights as they are read. Random weights drawn in partitions would be
            others, and quantised ones cannot be read in partitions.
        by_every_process: where FSDP would let one process read and the others receive.
    """
    if by_every_process and strategy.is_fsdp:
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # where transformers looks
    with read_whole() if whole else contextlib.nullcontext():
        yield
