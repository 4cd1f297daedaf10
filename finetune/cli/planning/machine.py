"""The machine that the planner runs on: its GPUs, memory and free disk space."""

import os
import shutil
from collections import Counter
from pathlib import Path

from finetune.errors import InputError
from finetune.hardware.cards import Gpu, Machines

NAME_THEM = "name the GPUs, for example --gpus 8x80GB or --gpus 1xH200"


def gpus_here(otherwise: str = NAME_THEM) -> Machines:
    """The GPUs of this machine; if they differ, all count as the smallest.

    Args:
        otherwise: what to do where there are none, as part of a sentence.

    Raises:
        InputError: if there are none.
    """
    if shutil.which("nvidia-smi") is None:
        raise InputError(f"No GPU found on this machine; {otherwise}.")
    import torch  # takes seconds, and is only needed without --gpus

    if not torch.cuda.is_available():
        raise InputError(f"PyTorch finds no GPU on this machine; {otherwise}.")
    found = _cards_here()
    return Machines(min(found, key=lambda gpu: gpu.memory_gib), len(found))


def _cards_here() -> list[Gpu]:
    import torch

    from finetune.distributed.gpus import card_of

    return [card_of(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]


def unequal_cards() -> list[str]:
    """A sentence on GPUs of this machine that differ."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = _cards_here()
    counted = Counter(gpu.name for gpu in found)
    if len(counted) == 1:
        return []
    there = " and ".join(f"{count}x {name}" for name, count in counted.items())
    by_memory = sorted(range(len(found)), key=lambda index: found[index].memory_gib)
    smallest, largest = found[by_memory[0]], by_memory[-1]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = visible.split(",")[largest].strip() if visible else largest
    return [
        f"This machine has {there}, planned as {len(found)}x {smallest.name}: each GPU gets the same share. For the "
        f"largest alone set CUDA_VISIBLE_DEVICES={number}, for the plan and for the run."
    ]


def host_memory_here() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of a folder that exists or will be created."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free
