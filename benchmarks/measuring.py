"""Time and memory of a piece of work: of this process, or of a whole tree of processes."""

import importlib.metadata
import os
import statistics
import threading
import time
from typing import Any

import psutil

from finetune.output import run_files

OWN_SAMPLED_EVERY = 0.02
SAMPLED_EVERY = 0.25
"""Seconds: to look at all processes of a tree costs milliseconds."""


class Stopwatch:
    """Seconds that passed and seconds that cores worked, from the start on and without what lies between two laps."""

    def __init__(self) -> None:
        self.measured = {"seconds": 0.0, "core_seconds": 0.0}
        self.start()

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        laps = zip(self.measured, self._now(), self._started)
        self.measured = {name: self.measured[name] + now - started for name, now, started in laps}

    def _now(self) -> tuple[float, float]:
        """Of this process, its threads and the children that have ended."""
        times = os.times()
        return time.perf_counter(), times.user + times.system + times.children_user + times.children_system


class Memory:
    """What this process takes more than at the start, at its most, between ``with`` and its end."""

    def __enter__(self) -> "Memory":
        self.process = psutil.Process()
        self.before, self.most = self._now(), (0, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(OWN_SAMPLED_EVERY):
            now = self._now()
            self.most = (max(self.most[0], now[0] - self.before[0]), max(self.most[1], now[1] - self.before[1]))

    def _now(self) -> tuple[int, int]:
        info = self.process.memory_info()
        return info.rss, info.rss - info.shared

    def measured(self) -> dict[str, int]:
        return {"resident_bytes": self.most[0], "anonymous_bytes": self.most[1]}


def peak_memory(process: psutil.Popen) -> tuple[int, int]:
    """Most bytes that a process and those it started held together until it ended: resident, and anonymous."""
    resident, anonymous = 0, 0
    while process.poll() is None:
        infos = [info for info in map(memory_of, [process, *children(process)]) if info]
        resident = max(resident, sum(info.rss for info in infos))
        anonymous = max(anonymous, sum(info.rss - info.shared for info in infos))
        time.sleep(SAMPLED_EVERY)
    return resident, anonymous


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:  # it ended meanwhile
        return []


def memory_of(process: psutil.Process) -> Any:
    try:
        return process.memory_info()
    except psutil.NoSuchProcess:  # it ended meanwhile
        return None


def measured_in() -> dict[str, Any]:
    """Versions, cores, and how busy these are with other work (its averages over 1, 5 and 15 minutes)."""
    environment = run_files.environment()
    versions = environment["packages"] | {name: importlib.metadata.version(name) for name in ("trl", "datasets")}
    return {
        "python": environment["python"],
        "packages": {name: versions[name] for name in ("transformers", "tokenizers", "trl", "datasets", "numpy")},
        "hardware": {"cpus": len(os.sched_getaffinity(0))},
        "load_average": os.getloadavg(),
    }


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def growth(runs: list[dict[str, Any]]) -> float:
    """Bytes of anonymous memory for each row more, from the fewest rows to the most."""
    fewest, most = min(runs, key=lambda run: run["rows"]), max(runs, key=lambda run: run["rows"])
    return (most["anonymous_mib"] - fewest["anonymous_mib"]) * 2**20 / (most["rows"] - fewest["rows"])


def gathered(world_size: int, value: str | None) -> list[str | None]:
    import torch.distributed as dist

    values: list[str | None] = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values
