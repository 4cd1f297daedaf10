"""A process group that lives as long as the tests and runs one scenario after another.

Starting processes and importing PyTorch takes most of the time of a tiny run; here it is paid once per world
size. Each scenario gets the environment that ``accelerate launch`` would give it, and Accelerate's state anew.
"""

import functools
import gc
import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.distributed.launch_environment import launch_environment

ROOT = Path(__file__).parent.parent
STRATEGY_FILES = ROOT / "accelerate_configs"


class Ranks:
    """``world_size`` processes that share a gloo group; world size 1 is one process without a group."""

    def __init__(self, world_size: int, log_folder: Path) -> None:
        self.world_size, self.log_folder = world_size, log_folder
        self.processes: list[Any] = []

    def run(
        self, function: Callable[..., Any], *args: Any, strategy: str, mixed_precision: str = "no", timeout: float = 180
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank under a strategy file; returns what each rank returned.

        Raises:
            AssertionError: with the traceback of the ranks that failed.
        """
        if not self.processes:
            self._start()
        environment = launch_environment(STRATEGY_FILES / f"{strategy}.yaml", self.world_size, mixed_precision)
        for connection in self.connections:
            connection.send((function, args, environment))
        answers = []
        for rank, connection in enumerate(self.connections):
            if any(not ok for ok, _ in answers):
                timeout = 5  # the others may wait in a collective for the one that failed
            if not connection.poll(timeout):
                if any(not ok for ok, _ in answers):
                    answers.append((False, "waited for a rank that had failed"))
                    continue
                self.stop()
                raise AssertionError(f"rank {rank} of {self.world_size} did not answer in {timeout} s")
            try:
                answers.append(connection.recv())
            except EOFError:
                self.stop()
                raise AssertionError(f"rank {rank} of {self.world_size} died; see {self.log_folder}") from None
        failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            self.stop()  # ranks that failed at different points no longer agree
            raise AssertionError("\n".join(failed))
        return [result for _, result in answers]

    def _start(self) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.connections = []
        for rank in range(self.world_size):
            here, there = context.Pipe()
            log = self.log_folder / f"rank{rank}of{self.world_size}.log"
            process = context.Process(target=_serve, args=(there, rank, self.world_size, port, log), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.connections.append(here)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []


def _serve(connection: Any, rank: int, world_size: int, port: str, log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    if world_size > 1:
        for key, value in {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
        }.items():
            os.environ[key] = str(value)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = dict(os.environ)
    import cpuinfo
    import torch.distributed

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # DeepSpeed's CPU Adam asks each time, for a second
    destroy = torch.distributed.destroy_process_group
    # the group of all processes outlives a run
    torch.distributed.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    is_first = True
    while True:
        try:
            function, args, environment = connection.recv()
        except EOFError:
            os._exit(0)
        for key in [k for k in os.environ if k not in own]:
            del os.environ[key]
        keep = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        os.environ |= own | {k: v for k, v in environment.items() if k not in keep}
        try:
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        gc.collect()
        if is_first:
            gc.freeze()  # half a million objects of the libraries, through which each collection would go for 0.3 s
            is_first = False
