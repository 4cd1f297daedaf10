"""DeepSpeed's C++ operations: compiled once, by one process, and never left locked.

DeepSpeed compiles them at first use, which takes minutes, and a build that is killed leaves a ``lock`` file
on which every later start waits for ever. ``build`` holds a lock of the operating system, which dies with
its process, and removes what a dead build left. ``python -m finetune.distributed`` builds them beforehand.
"""

import fcntl
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

NO_LIBAIO = (
    "zero3_nvme needs the header and library of libaio, which this machine lacks; install them "
    "(Debian and Ubuntu: apt-get install libaio-dev), or use zero3_offload."
)


def problems(*, nvme: bool) -> list[str]:
    """What DeepSpeed lacks on this machine, as sentences."""
    if importlib.util.find_spec("deepspeed") is None:
        return ["The ZeRO strategies need DeepSpeed; install it with: pip install deepspeed."]
    if nvme:
        prepare_import()
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
            return [NO_LIBAIO]
    return []


def build(*, cpu: bool, offload: bool, nvme: bool) -> None:
    """Compile and load what a launch needs; other processes wait on the file system, not in a collective.

    Args:
        cpu: the processes communicate over CPU memory (a rehearsal).
        offload: the optimizer steps on the CPU.
        nvme: parameters or optimizer state are swapped to disk.
    """
    prepare_import()
    from deepspeed.accelerator import get_accelerator

    wanted = ["ShareMemCommBuilder"] * cpu + ["CPUAdamBuilder"] * offload + ["AsyncIOBuilder"] * nvme
    builders = [get_accelerator().create_op_builder(name) for name in wanted]
    if not builders:
        return
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    with (root / "finetune-build.lock").open("w") as key:
        fcntl.flock(key, fcntl.LOCK_EX)
        for builder in builders:
            for stale in root.glob(f"**/{builder.name}/lock"):
                stale.unlink()
            if not list(root.glob(f"**/{builder.name}/{builder.name}.so")):
                print(f"Compiling DeepSpeed's {builder.name}, once; this takes up to a few minutes.", flush=True)
            builder.load(verbose=False)


def prepare_import() -> None:
    """Tell DeepSpeed what to run on, which it would guess with a warning, and where ninja lies: beside this Python."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja", path=scripts) and scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
