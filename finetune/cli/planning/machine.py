"""The machine that the planner runs on: its GPUs, memory and free disk space."""

import os
import shutil
from pathlib import Path

from finetune.errors import InputError
from finetune.hardware.cards import Gpu, Machines, lookup

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
    found: list[Gpu] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(lookup(properties.name, properties.total_memory))
    return Machines(min(found, key=lambda gpu: gpu.memory_gib), len(found))


def host_memory_here() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of a folder that exists or will be created."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free
