"""Cores, memory and disk of this machine, as far as this process may use them."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from finetune.cli.health.finding import Finding
from finetune.cli.planning.machine import free_disk
from finetune.hardware import cores
from finetune.units import GIB

LITTLE_MEMORY, LITTLE_DISK, LITTLE_SHARED = 4 * GIB, 20 * GIB, GIB
NO_DISK = GIB // 10
SHARED_MEMORY = Path("/dev/shm")


def examine() -> Iterator[Finding]:
    """Look at the machine but for its GPUs."""
    yield threads(cores.usable(), os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS"), torch.cuda.device_count())
    memory = psutil.virtual_memory()
    seen = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < LITTLE_MEMORY:
        yield Finding("memory", "warning", seen, "End other programs; models of billions of weights need more to load.")
    else:
        yield Finding("memory", "ok", seen)
    if torch.cuda.device_count() > 1 and SHARED_MEMORY.exists() and free_disk(SHARED_MEMORY) < LITTLE_SHARED:
        seen = f"{free_disk(SHARED_MEMORY) / GIB:.2f} GiB free in {SHARED_MEMORY}, through which processes talk"
        yield Finding("shared memory", "warning", seen, "Start the container with --shm-size=8g, or --ipc=host.")
    for name, folder in {"disk here": Path.cwd(), "disk of caches": hub_cache()}.items():
        yield disk(name, folder, free_disk(folder))


def hub_cache() -> Path:
    """Where models of the hub are kept."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def threads(usable: int, there: int, asked: str | None, gpus: int) -> Finding:
    """Cores that this process may use, and the threads that PyTorch was told to use.

    Args:
        usable: by affinity and quota.
        there: cores of the machine.
        asked: OMP_NUM_THREADS.
    """
    seen = f"{usable} of {there} usable; OMP_NUM_THREADS is {asked or 'not set'}"
    if asked is not None and asked.isdecimal() and int(asked) > usable:
        return Finding("cores", "warning", seen, f"Unset OMP_NUM_THREADS, or set it to at most {usable}.")
    if usable < gpus:
        return Finding("cores", "warning", seen, f"Allow at least {gpus} cores: each of {gpus} GPUs is fed by one.")
    return Finding("cores", "ok", seen)


def disk(name: str, folder: Path, free: int) -> Finding:
    """Free space for runs, or for what is downloaded."""
    seen = f"{free / GIB:.1f} GiB free in {folder}"
    elsewhere = "set train.output_dir elsewhere" if name == "disk here" else "set HF_HOME to another disk"
    if free < LITTLE_DISK:
        return Finding(name, "error" if free < NO_DISK else "warning", seen, f"Free space there, or {elsewhere}.")
    return Finding(name, "ok", seen)
