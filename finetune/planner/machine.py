"""The machine that the planner runs on: its GPUs, its memory, and the room on its disk."""

import os
import shutil
from pathlib import Path

from finetune.errors import InputError
from finetune.hardware.cards import Gpu, Machines, lookup


def gpus_here() -> Machines:
    """The GPUs of this machine; of several kinds, as many of the smallest.

    Raises:
        InputError: if there are none.
    """
    if shutil.which("nvidia-smi") is None:
        raise InputError(
            "This machine has no GPU that could be asked; say which are meant, --gpus 8x80GB or 1xH200 say."
        )
    import torch  # takes seconds, and is needed where nobody said which GPUs are meant

    if not torch.cuda.is_available():
        raise InputError("PyTorch sees no GPU on this machine; say which are meant, --gpus 8x80GB or 1xH200 say.")
    found: list[Gpu] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(lookup(properties.name, properties.total_memory))
    return Machines(min(found, key=lambda gpu: gpu.memory_gib), len(found))


def host_memory_here() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_disk(folder: Path) -> int:
    """Bytes that are free where a folder is, or will be made."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free
