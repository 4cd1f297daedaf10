"""The processes of a run on this machine, started as ``accelerate launch`` starts them. For ``finetune train``.

PyTorch's launcher, which ``accelerate launch`` uses for several processes, prints a traceback and exits with 1 whatever
its processes ended with, and kills them 30 seconds after a signal. Here the exit code is that of the first process that
failed, and a run that was asked to stop has the time to save. A port cannot be taken by another program while the
processes start: the launcher listens on it, as PyTorch's does.

Limits: one machine, and no restarts after a process has died. ``accelerate launch`` has both.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType, check_cuda_p2p_ib_support

from finetune.config.strategy_names import SIZES, Size
from finetune.distributed.launch_environment import launch_environment
from finetune.distributed.strategy import native_precision
from finetune.errors import InputError, first_line
from finetune.start_up import heard

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals upon which a run saves and ends; see ``interruption``."""
PATIENCE_SECONDS = 30.0
"""After one process has failed, until the others are killed."""
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class StrategyFile:
    """A strategy file, as far as a launch depends on it."""

    path: Path
    communicates: bool
    """Its processes know of each other, even where there is one."""
    mixed_precision: str
    sizes: tuple[Size, ...]
    """How many processes do together what the strategy is for."""

    @classmethod
    def read(cls, path: Path) -> "StrategyFile":
        """Read a file of ``accelerate_configs``, or one of that form.

        Raises:
            InputError: if it is none, or is for several machines.
        """
        try:
            settings = load_config_from_file(str(path))
        except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
            raise InputError(
                f"--strategy: {path} is not a strategy file ({first_line(error)}); give a file of accelerate_configs/."
            ) from error
        if settings.num_machines > 1:
            raise InputError(
                f"--strategy: {path} asks for {settings.num_machines} machines, and finetune train starts the "
                "processes of one; run accelerate launch on each machine, or remove num_machines."
            )
        parts: dict[str, Any] = {**(settings.parallelism_config or {}), **(settings.megatron_lm_config or {})}
        asked = {size for sizes in SIZES.values() for size in sizes if int(parts.get(size.key, 1)) > 1}
        sizes = next((each for each in SIZES.values() if set(each) == asked), ())
        communicates = settings.distributed_type != DistributedType.NO
        return cls(path, communicates, settings.mixed_precision or "no", sizes)

    def precision_here(self) -> str:
        """The precision to compute in: the file's, but fp32 where a CPU has no units for bf16 and would emulate it."""
        if self.mixed_precision == "bf16" and not torch.cuda.is_available():
            return native_precision()
        return self.mixed_precision


def gpu_count() -> int:
    """GPUs that PyTorch finds here. Takes no memory on them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def strategy_of_rehearsal(processes: int) -> str:
    """The strategy on a CPU, where there is no memory of a GPU to choose by: the simplest for so many processes."""
    return "single" if processes == 1 else "ddp"


def launch(
    file: StrategyFile,
    processes: int,
    mixed_precision: str,
    threads: int,
    script: Path,
    arguments: Sequence[str],
    *,
    flags: Sequence[str] = (),
) -> int:
    """Run a recipe's script on some processes of this machine; returns the exit code.

    Args:
        mixed_precision: as ``--mixed_precision`` of ``accelerate launch``.
        threads: of each process, where OMP_NUM_THREADS is not set.
        flags: others of ``accelerate launch``.

    Raises:
        InputError: if Accelerate refuses the strategy file, or the precision.
    """
    command = [sys.executable, "-u", str(script), *arguments]
    override = mixed_precision if mixed_precision != file.mixed_precision else None
    try:
        shared = launch_environment(file.path, processes, override, flags)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"{file.path} cannot be launched: {first_line(error)}; change it.") from error
    if "TOKENIZERS_PARALLELISM" not in os.environ:
        shared.pop("TOKENIZERS_PARALLELISM")  # is for processes that are forked
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    if not file.communicates:
        return run_together([command], [os.environ | shared])
    if not check_cuda_p2p_ib_support():  # cards on which NCCL would hang otherwise
        shared = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} | shared
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # connect to this port, and do not listen on it
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return run_together([command] * processes, [os.environ | shared | rank for rank in ranks])


def run_together(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> int:
    """Run processes that need each other. Signals to this process are passed on to them.

    Returns:
        0 if all succeeded; else the exit code of the first that did not, or 128 + the number of the signal that ended
        it. The others are ended then.
    """
    running: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for process in running:
            process.send_signal(number)

    earlier = {number: signal.signal(number, pass_on) for number in heard(PASSED_ON)}
    try:
        for command, environment in zip(commands, environments):
            running.append(subprocess.Popen(command, env=environment))
        for number in set(asked):  # while they were started
            for process in running:
                process.send_signal(number)
        return _first_failure(running, asked)
    finally:
        for process in running:
            process.kill()  # of a process that has ended, nothing
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _first_failure(processes: Sequence[subprocess.Popen[bytes]], asked: Sequence[int]) -> int:
    waiting, failed, deadline = dict(enumerate(processes)), 0, math.inf
    while waiting:
        for rank, process in list(waiting.items()):
            if process.poll() is None:
                continue
            del waiting[rank]
            if process.returncode and not failed:
                failed, deadline = process.returncode, time.monotonic() + PATIENCE_SECONDS
                if failed < 0 and -failed not in asked:
                    _tell(rank, signal.Signals(-failed))
                for other in waiting.values():
                    other.terminate()
        if time.monotonic() > deadline:
            for process in waiting.values():
                process.kill()
        if waiting:
            time.sleep(LOOK_SECONDS)
    return failed if failed >= 0 else 128 - failed


def _tell(rank: int, killed_by: signal.Signals) -> None:
    """Of a process that a signal ended, which could not say so itself."""
    why = "; most often the machine's memory was full" if killed_by == signal.SIGKILL else ""
    print(f"error: process {rank} of the run was ended by {killed_by.name}{why}.", file=sys.stderr)
