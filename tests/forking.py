"""Processes that begin with every library imported: a server imports once, and forks. Linux only.

Importing PyTorch, transformers and DeepSpeed takes ten seconds of a core, and a tiny run takes one.
"""

import contextlib
import functools
import gc
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class ForkServer:
    """Starts processes, each the leader of a process group of its own."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.connection, there = context.Pipe()
        self.lock = threading.Lock()
        self.folder = tempfile.TemporaryDirectory(prefix="finetune-tests-")  # for its log; goes with this process
        self.process = context.Process(target=_serve, args=(there, Path(self.folder.name) / "server.log"), daemon=True)
        self.process.start()
        there.close()

    def start(self, function: Callable[..., Any], *args: Any) -> int:
        """Call a function in a new process; returns its id, which is that of its group too.

        Connections among the arguments are closed in the server, so that their ends are seen.
        """
        with self.lock:
            self.connection.send((function, args))
            pid: int = self.connection.recv()
        return pid


@functools.cache
def server() -> ForkServer:
    """The one of this process, which ends with it."""
    return ForkServer()


def end(group: int) -> None:
    """Kill a process that was started, and all that it has forked."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(group, signal.SIGKILL)


def log_to(path: Path) -> None:
    """Have this process write its output to the end of a file."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)


def fork(function: Callable[..., Any], *args: Any) -> int:
    """Call a function in a process that ends with it; returns the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        function(*args)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the libraries' destructors look for the processes of a group


def import_everything() -> None:
    """What a run imports on its way too, so that no start of one takes the time."""
    import bitsandbytes
    import cpuinfo
    import pandas
    import torch
    import torch.distributed.algorithms.ddp_comm_hooks
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.utils.cpp_extension
    import transformers.models.llama.modeling_llama

    from finetune.distributed import launch_environment, prepare_import
    from recipes import sft

    prepare_import()
    import deepspeed
    import deepspeed.ops.adam

    assert all((bitsandbytes, deepspeed, launch_environment, pandas, sft, transformers, torch.distributed))
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # DeepSpeed's CPU Adam asks each time, for a second
    torch.set_num_threads(1)


def _serve(connection: Any, log: Path) -> NoReturn:
    log_to(log)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what has ended
    os.environ["OMP_NUM_THREADS"] = "1"
    import_everything()
    gc.collect()
    gc.freeze()  # half a million objects of the libraries, through which each collection would go for 0.3 s
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            os._exit(0)
        pid = fork(_lead, connection, function, args)
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpgid(pid, pid)
        connection.send(pid)
        del function, args  # its connections are those of the process that was forked


def _lead(server_connection: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    server_connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # here too, before it forks others
    function(*args)
