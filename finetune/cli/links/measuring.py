"""Collectives and exchanges of the processes of a launch, timed.

Inside machines all machines measure at the same time; between machines one ring for each process of a machine, of those
with the same place on every machine, all at the same time, as replicas of shards communicate.
"""

import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from finetune.cli.links.bus_bandwidth import (
    ALL_GATHER,
    ALL_REDUCE,
    BETWEEN,
    EXCHANGE,
    INSIDE,
    REDUCE_SCATTER,
    Timing,
    rounds_of,
    seconds_of,
    with_slow_computation,
    with_slow_links,
)
from finetune.cli.links.links_file import LinksFile, Machine
from finetune.compat.torch_private import all_gather_single, reduce_scatter_single
from finetune.errors import RunStopped, first_line
from finetune.units import MIB

SIZES = {"cuda": (4 * 2**10, 64 * 2**10, MIB, 16 * MIB, 256 * MIB), "cpu": (4 * 2**10, 64 * 2**10, MIB, 16 * MIB)}
"""Bytes of an operation."""
LONGEST_WAIT = timedelta(seconds=120)
LONGEST_CALL_SECONDS = 2.0
"""More than 1 MiB is not sent where it would take longer: a link so slow gives its full speed with less."""
PRODUCT = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the matrices that each process multiplies, to see whether one is slow."""


def measure(seconds: float) -> LinksFile | None:
    """Measure the links of this launch; collective. On the first process what was found, None on others.

    Args:
        seconds: that each size of each operation may take.

    Raises:
        RunStopped: if machines have different numbers of processes, or a process fails or does not answer.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=LONGEST_WAIT)
        try:
            return _Measurement(torch.device(kind), seconds).all()
        finally:
            dist.destroy_process_group()
    except RunStopped:
        raise
    except RuntimeError as error:  # as all errors of process groups are: gloo's have no type of their own
        raise RunStopped(
            f"The links could not be measured ({first_line(error)}). If a process did not answer within "
            f"{LONGEST_WAIT.seconds} s, look for one that died or hangs, and at the network between the machines."
        ) from error


class _Measurement:
    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.best: dict[int, float] = {}

    def all(self) -> LinksFile | None:
        machines = self._machines()
        rings = [list(ranks) for ranks in zip(*machines)]
        timings = self._scope(INSIDE, machines) + self._scope(BETWEEN, rings)
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, (self.best.get(self.rank, 0.0), self._product_seconds()))
        if self.rank:
            return None
        best, products = (dict(enumerate(each)) for each in zip(*everyone))
        is_gpu = self.device.type == "cuda"
        return LinksFile(
            machines=len(machines),
            processes_per_machine=len(machines[0]),
            machine=Machine(
                device=torch.cuda.get_device_name() if is_gpu else "CPU",
                backend="NCCL" if is_gpu else "gloo",
                torch=torch.__version__,
            ),
            timings=timings,
            slow_links=with_slow_links(best),
            slow_computation=with_slow_computation(products),
        )

    def _machines(self) -> list[list[int]]:
        """The ranks of each machine, as the launcher numbers its machines, or by the machine's name."""
        names: list[Any] = [None] * self.world_size
        own = next((os.environ[key] for key in ("GROUP_RANK", "SLURM_NODEID") if key in os.environ), None)
        dist.all_gather_object(names, own or socket.gethostname())
        machines = [[rank for rank, name in enumerate(names) if name == one] for one in dict.fromkeys(names)]
        if len({len(ranks) for ranks in machines}) > 1:
            counts = ", ".join(str(len(ranks)) for ranks in machines)
            raise RunStopped(f"The machines have {counts} processes; start as many on each.")
        return machines

    def _scope(self, scope: str, groups: Sequence[Sequence[int]]) -> list[Timing]:
        members = len(groups[0])
        if members < 2:
            return []
        made = [dist.new_group(list(ranks), timeout=LONGEST_WAIT) for ranks in groups]
        own = next(number for number, ranks in enumerate(groups) if self.rank in ranks)
        group, ranks = made[own], list(groups[own])
        timings: list[Timing] = []
        for size in SIZES[self.device.type]:
            if size > MIB and seconds_of(size, timings) > LONGEST_CALL_SECONDS:
                break
            elements = math.ceil(size / 4 / members) * members
            whole = torch.ones(elements, device=self.device)
            part = torch.ones(elements // members, device=self.device)
            for operation, run in (
                (ALL_REDUCE, partial(dist.all_reduce, whole, group=group)),
                (ALL_GATHER, partial(all_gather_single, whole, part, group=group)),
                (REDUCE_SCATTER, partial(reduce_scatter_single, part, whole, group=group)),
            ):
                timings.append(Timing(scope, operation, 4 * elements, self._slowest(self._timed(run)), members))
            timings.append(self._exchanges(scope, ranks, group, whole))
        return timings

    def _exchanges(self, scope: str, ranks: list[int], group: Any, sent: torch.Tensor) -> Timing:
        """Neighbours send one another a tensor; remembers the best link of this process."""
        place, received, slowest = ranks.index(self.rank), torch.empty_like(sent), 0.0
        bytes_sent = sent.numel() * sent.element_size()
        for pairs in rounds_of(len(ranks)):
            partner = next((ranks[sum(pair) - place] for pair in pairs if place in pair), None)

            def exchange(partner: int | None = partner) -> None:
                if partner is None:
                    return
                both = [dist.P2POp(dist.isend, sent, partner, group), dist.P2POp(dist.irecv, received, partner, group)]
                for each in dist.batch_isend_irecv(both):
                    each.wait()

            own = self._timed(exchange)
            if partner is not None and bytes_sent >= MIB:
                self.best[self.rank] = max(self.best.get(self.rank, 0.0), bytes_sent / own / 1e9)
            slowest = max(slowest, self._slowest(own if partner is not None else 0.0))
        return Timing(scope, EXCHANGE, bytes_sent, slowest, len(ranks))

    def _timed(self, run: Callable[[], object]) -> float:
        """Seconds of one call, of as many as fit the time; all processes make as many."""
        run()
        once = self._slowest(self._seconds_of(run, 2))
        return self._seconds_of(run, max(3, min(2000, math.ceil(self.seconds / max(once, 1e-7)))))

    def _seconds_of(self, run: Callable[[], object], times: int) -> float:
        dist.barrier()
        self._wait()
        start = time.perf_counter()
        for _ in range(times):
            run()
        self._wait()
        return (time.perf_counter() - start) / times

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _slowest(self, seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)

    def _product_seconds(self) -> float:
        """The median time of a matrix product, all processes at the same time."""
        rows = PRODUCT[self.device.type]
        matrix = torch.ones(rows, rows, device=self.device, dtype=torch.bfloat16 if rows > 1000 else torch.float32)
        return statistics.median(self._seconds_of(lambda: matrix @ matrix, 3) for _ in range(5))
