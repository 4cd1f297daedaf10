"""A process group that lives as long as the tests and runs one scenario after another.

Importing PyTorch and joining a group take most of the time of a tiny run; here the one is paid once for all tests,
the other once per world size. Each scenario gets the environment that ``accelerate launch`` would give it, and
Accelerate's state anew.
"""

import gc
import multiprocessing as mp
import os
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forking
import torch.distributed as dist
from torch.distributed import device_mesh

from finetune.distributed.launch_environment import launch_environment

ROOT = Path(__file__).parent.parent
STRATEGY_FILES = ROOT / "accelerate_configs"


class Ranks:
    """``world_size`` processes that share a gloo group; world size 1 is one process without a group."""

    def __init__(self, world_size: int, log_folder: Path) -> None:
        self.world_size, self.log_folder = world_size, log_folder
        self.group = 0  # id of the process that the ranks were forked from

    def run(
        self, function: Callable[..., Any], *args: Any, strategy: str, mixed_precision: str = "no", timeout: float = 180
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank under a strategy file; returns what each rank returned.

        Raises:
            AssertionError: with the traceback of the ranks that failed.
        """
        if not self.group:
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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.connections, theirs = map(list, zip(*(mp.Pipe() for _ in range(self.world_size))))
        self.group = forking.server().start(_fork_ranks, theirs, port, self.log_folder)
        for connection in theirs:
            connection.close()

    def stop(self) -> None:
        if self.group:
            forking.end(self.group)
        self.group = 0


def _fork_ranks(connections: list[Any], port: str, log_folder: Path) -> None:
    """The parent of the ranks, which lives as long as they do."""
    pids = [forking.fork(_serve, connections, rank, port, log_folder) for rank in range(len(connections))]
    for connection in connections:
        connection.close()
    for pid in pids:
        os.waitpid(pid, 0)


def without_a_plan(cfg: Any, launch: Any, spec: Any, batches: Any) -> Any:
    """In place of ``sizes.plan_of``, which traces the step of each new setting: matrices have hundreds of them, and a
    run's plan has tests of its own."""
    from finetune.run import sizes

    if cfg.train.micro_batch_size == "auto":
        return sizes.plan_of(cfg, launch, spec, batches)
    train = cfg.train
    own = sizes.Sizes(train.micro_batch_size, train.recomputed_layers, train.offloads_activations, batches.flat)
    return sizes.Planned(None, [], own)


class _KeptGroups:
    """In place of PyTorch's ``new_group`` and ``destroy_process_group``: a run gets the groups of the runs before it.

    Each group has threads that wake hundreds of times a second, also in idle processes, and PyTorch's caches of sharded
    tensors name the groups of the first that was like them, so that those must live.
    """

    def __init__(self) -> None:
        self._new = dist.new_group
        self._made: dict[Any, list[Any]] = {}
        self._asked: Counter[Any] = Counter()
        dist.new_group = device_mesh.new_group = self.new_group
        dist.destroy_process_group = lambda group=None: None
        os.register_at_fork(after_in_child=self.leave)

    def leave(self) -> None:
        """In forks of a rank, in which a run traces its step: they make groups of their own."""
        dist.new_group = device_mesh.new_group = self._new

    def begin_run(self) -> None:
        self._asked.clear()

    def new_group(self, ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Of those that a run asks for with the same words, each is one by itself."""
        words = repr((ranks and [*ranks], args, sorted(kwargs.items())))
        made = self._made.setdefault(words, [])
        if self._asked[words] == len(made):
            made.append(self._new(ranks, *args, **kwargs))
        self._asked[words] += 1
        return made[self._asked[words] - 1]


def _serve(connections: list[Any], rank: int, port: str, log_folder: Path) -> None:
    """A rank: answer until the tests end. A connection that another rank held open would hide that this one died."""
    world_size, connection = len(connections), connections[rank]
    for other in connections:
        if other is not connection:
            other.close()
    forking.log_to(log_folder / f"rank{rank}of{world_size}.log")
    if world_size > 1:
        for key in ("RANK", "LOCAL_RANK"):
            os.environ[key] = str(rank)
        for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[key] = str(world_size)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = dict(os.environ)
    from finetune.run import session

    session.plan_of = without_a_plan  # type: ignore[assignment]
    groups = _KeptGroups()
    while True:
        try:
            function, args, environment = connection.recv()
        except EOFError:
            os._exit(0)
        for key in [k for k in os.environ if k not in own]:
            del os.environ[key]
        keep = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        os.environ |= own | {k: v for k, v in environment.items() if k not in keep}
        groups.begin_run()
        try:
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        gc.collect()
        gc.freeze()  # what outlived a scenario stays: collections within the next one need not look at it
