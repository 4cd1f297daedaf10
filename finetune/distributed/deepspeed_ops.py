"""DeepSpeed's C++ operations: compiled once, by one process, and never left locked.

DeepSpeed compiles them at first use, which takes minutes. A killed build leaves a ``lock`` file on which every later
start would wait forever. ``build`` uses an operating system lock, which ends with its process, and removes stale files.
Each environment has a folder of its own: in one that they share, each would compile what another has built.
``python -m finetune.distributed`` builds the operations in advance.
"""

import fcntl
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from finetune.cache import cache_folder, key_of

NO_LIBAIO = (
    "zero3_nvme needs the header and library of libaio, which were not found; install them "
    "(Debian and Ubuntu: apt-get install libaio-dev), or use zero3_offload."
)


def problems(*, nvme: bool) -> list[str]:
    """What is missing for DeepSpeed on this machine, as sentences."""
    if importlib.util.find_spec("deepspeed") is None:
        return ["The ZeRO strategies need DeepSpeed; install it with: pip install deepspeed."]
    if nvme:
        prepare_import()
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
            return [NO_LIBAIO]
    return []


def build(*, cpu: bool, offload: bool, nvme: bool) -> None:
    """Compile and load the operations of a launch; other processes wait on a file lock, not in a collective.

    Args:
        cpu: the processes communicate over CPU memory (a rehearsal).
        offload: the optimizer steps on the CPU.
        nvme: parameters or optimizer state are swapped to disk.
    """
    prepare_import()
    from deepspeed.accelerator import get_accelerator

    wanted = ["ShareMemCommBuilder"] * cpu + ["CPUAdamBuilder"] * offload
    wanted += ["PinMemoryBuilder", "AsyncIOBuilder"] * nvme  # the second loads the first
    builders = [get_accelerator().create_op_builder(name) for name in wanted]
    if not builders:
        return
    root = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    root.mkdir(parents=True, exist_ok=True)
    with (root / "finetune-build.lock").open("w") as key:
        fcntl.flock(key, fcntl.LOCK_EX)
        for builder in builders:
            for stale in root.glob(f"**/{builder.name}/lock"):
                stale.unlink()
            if not list(root.glob(f"**/{builder.name}/{builder.name}.so")):
                print(
                    f"Compiling DeepSpeed's {builder.name}; this happens once and takes minutes.",
                    flush=True,
                )
            builder.load(verbose=False)


def own_folder() -> Path:
    """Where the operations of this environment are built."""
    return cache_folder() / "operations" / key_of(sys.prefix)


def prepare_import() -> None:
    """Tell DeepSpeed its accelerator, which it would guess with a warning; where ninja is, beside this Python; and
    where it builds operations, unless the user has."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(own_folder()))
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja", path=scripts) and scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
