"""GPUs, their driver, and the links between them."""

import re
import shutil
import subprocess
from collections.abc import Iterator

import torch

from finetune.cli.health.finding import Finding
from finetune.units import GIB

IN_USE = 0.05
"""Part of a GPU's memory that other programs may hold before it is said."""
NVIDIA_SMI_SECONDS = 10.0


def examine() -> Iterator[Finding]:
    """Look at the GPUs."""
    listed = [line for line in _nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader") if line]
    if not torch.cuda.is_available():
        yield without_gpu(listed, torch.version.cuda)
        return
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    memory = [torch.cuda.mem_get_info(index) for index in range(count)]
    least = min(total for _, total in memory)
    yield Finding("GPUs", "ok", f"{count} x {', '.join(sorted(names))}, {least / GIB:.1f} GiB each")
    busy = [index for index, (free, total) in enumerate(memory) if free < (1 - IN_USE) * total]
    if busy:
        seen = ", ".join(f"{memory[index][0] / GIB:.1f} GiB are free on GPU {index}" for index in busy)
        yield Finding("GPU memory", "warning", seen, "See nvidia-smi for the programs that hold the rest; end them.")
    driver = f"driver {listed[0].split(',')[1].strip()}, " if listed else ""
    yield Finding("CUDA", "ok", f"{driver}PyTorch for CUDA {torch.version.cuda}")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("precision", "warning", "no bf16 on this GPU", "Launch with --mixed-precision fp16.")
    if count > 1:
        peers = all(torch.cuda.can_device_access_peer(0, other) for other in range(1, count))
        yield links(_nvidia_smi("nvlink", "--status"), peers=peers)


def without_gpu(listed: list[str], built_for: str | None) -> Finding:
    """PyTorch finds no GPU: there is none, or it cannot use those that the driver lists."""
    if not listed:
        return Finding(
            "GPUs", "warning", "none found", "Runs rehearse on the CPU. finetune plan --gpus answers for GPUs."
        )
    name, driver = (part.strip() for part in listed[0].rsplit(",", 1))
    seen = f"the driver ({driver}) lists {len(listed)} x {name}, which PyTorch cannot use"
    if built_for is None:
        return Finding("GPUs", "error", f"{seen}: it was built without CUDA", "Install a build of PyTorch for CUDA.")
    update = f"Update the driver to one for CUDA {built_for}, or unset CUDA_VISIBLE_DEVICES if it hides them."
    return Finding("GPUs", "error", seen, update)


def links(status: list[str], *, peers: bool) -> Finding:
    """How GPUs of one machine reach each other.

    Args:
        status: lines of ``nvidia-smi nvlink --status``.
        peers: they read each other's memory.
    """
    speeds = re.findall(r"Link \d+: ([\d.]+) GB/s", "\n".join(status))
    gpus = sum(line.startswith("GPU ") for line in status)
    if speeds:
        return Finding("links", "ok", f"NVLink, {len(speeds) // max(1, gpus)} links of {speeds[0]} GB/s for each GPU")
    if peers:
        return Finding("links", "ok", "PCIe, with direct access from GPU to GPU")
    slow = "Sharded strategies will be slow; prefer those that hold the whole model on each GPU where it fits."
    return Finding("links", "warning", "PCIe, and through host memory from GPU to GPU", slow)


def _nvidia_smi(*arguments: str) -> list[str]:
    """Lines that it prints; none where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
