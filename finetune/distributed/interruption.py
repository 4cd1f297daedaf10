"""External events that stop a run while it trains: signals, the end of the launcher, and lost processes.

All processes agree on a signal at the next step boundary, so they save and stop together. The same signal again has its
default effect: it ends its process at once, and Ctrl-C in a notebook raises KeyboardInterrupt. When a process dies, the
others on its machine end within a second, and other machines within seconds if it could be told them, else within
minutes (see ``heartbeat``); otherwise they would wait in a collective until its timeout. Before training, see
``finetune.start_up``.

A thread watches, because the main thread may be in a collective, where Python handles no signals. Limit: a process that
lives and gets no further is not noticed; those that wait for it end with the timeout of the collective.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from finetune import start_up
from finetune.distributed import heartbeat
from finetune.distributed.heartbeat import Heartbeat, Place
from finetune.distributed.long_timeout import gathered, long_timeout_group
from finetune.distributed.strategy import Strategy
from finetune.errors import first_line

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_SECONDS = 2.0
"""Signals this close together count as one: a terminal and the launcher both pass on a Ctrl-C."""
LAUNCHER_ENDED = 127
"""Represents the end of the launcher among the signal numbers."""


class Interruption:
    """Watches for lost processes inside its ``with`` block, which all processes enter together, and for signals from
    ``take_signals`` on. It cleans up after itself."""

    def __init__(self, strategy: Strategy) -> None:
        self.world_size, self._rank = strategy.world_size, strategy.rank
        self.asked = 0
        """Number of the signal that this process got; 0 for none."""
        self._launcher = strategy.parent if start_up.was_launched() else None
        self._asked_at: dict[int, float] = {}
        self._earlier: dict[int, Any] = {}
        """Handlers that the signals had before."""
        self._ends = False

    def __enter__(self) -> "Interruption":
        self._group = long_timeout_group() if self.world_size > 1 else None
        places = self._places()
        mine = places[self._rank]
        self._name = f"process {self._rank} on {mine.host}"
        same = {rank: place for rank, place in enumerate(places) if place.machine == mine.machine and place != mine}
        self._others = {f"process {rank} on {mine.host}": psutil.Process(place.pid) for rank, place in same.items()}
        self.heartbeat = Heartbeat(places, self._rank)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._look, name="interruption", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._earlier:
            for number, handler in self._earlier.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._earlier_wakeup)
        os.write(self._write, b"\0")
        self._thread.join()
        if error is not None:
            self.heartbeat.tell_of_error(f"{self._name} ended with an error ({first_line(error)})")
        self.heartbeat.stop()
        os.close(self._read)
        os.close(self._write)
        if self._group is not None and error is None:
            dist.destroy_process_group(self._group)

    def take_signals(self) -> None:
        """From here on a signal is recorded, so the run saves before it stops. Collective, so that no process trains
        while a signal would still kill another."""
        if threading.current_thread() is threading.main_thread():  # Python lets no other take signals
            self._earlier = {number: signal.getsignal(number) for number in start_up.heard(SIGNALS)}
            self._earlier_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            for number in self._earlier:
                signal.signal(number, self._pass_by)
        self.gather(None)

    def agree(self, *flags: int) -> list[int]:
        """The largest of each flag over all processes; collective, and the same everywhere."""
        if self._group is None:
            return list(flags)
        largest = torch.tensor(flags)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return [int(flag) for flag in largest]

    def gather(self, value: str | None) -> list[str | None]:
        """The values of all processes; collective, waits however long the others take."""
        return gathered(value, self._group)

    def expect_the_end(self) -> None:
        """From here on processes may end one after another; collective."""
        self._ends = True
        self.gather(None)

    def _places(self) -> list[Place]:
        """Where each process of this run is."""
        if self.world_size == 1:
            return [Place((), socket.gethostname(), os.getpid())]
        machine = [str(psutil.boot_time())]
        if sys.platform == "linux":  # containers number their processes each for itself
            machine = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
        heartbeat.prepare(self._rank)
        return gathered(Place(tuple(machine), socket.gethostname(), os.getpid()), self._group)

    def _look(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], start_up.LOOK_SECONDS)
            for number in os.read(self._read, 64) if ready else b"":
                if number == 0:
                    return
                if number in SIGNALS:
                    self._ask(number)
            if not self._ends and (lost := self._lost()):
                self.heartbeat.tell_of_death(lost)
                start_up.end(f"error: {lost}, so process {self._rank} exits too.", start_up.EXIT_CODE_OF_A_LOST_RUN)
            # it is gone, and another process has adopted this one; or that of the first machine is
            if self._launcher not in (None, os.getppid()) or self.heartbeat.is_orphaned:
                self.asked = self.asked or LAUNCHER_ENDED

    def _lost(self) -> str | None:
        for name, process in self._others.items():
            if not _is_alive(process):
                return f"{name} died"
        return self.heartbeat.lost(start_up.LOOK_SECONDS)

    def _ask(self, number: int) -> None:
        now = time.monotonic()
        if now - self._asked_at.setdefault(number, now) > SAME_SECONDS and not self._is_handed_back(number):
            os._exit(128 + number)
        self.asked = self.asked or number

    def _pass_by(self, number: int, frame: FrameType | None) -> None:
        """Python's side of a signal, which the thread takes."""
        if self._is_handed_back(number):
            signal.signal(number, self._earlier[number])

    def _is_handed_back(self, number: int) -> bool:
        """Whether the second signal goes to an earlier Python handler, such as a notebook's for Ctrl-C. With several
        processes it would be raised in one of them, which may be in a collective."""
        return self.world_size == 1 and callable(self._earlier[number])


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def name_of(asked: int) -> str:
    """The event that stopped a run, in words."""
    return "the end of the launcher" if asked == LAUNCHER_ENDED else signal.Signals(asked).name
