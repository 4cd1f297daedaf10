"""Launches of the recipe in real processes that begin at once, and what each process tells of itself.

A server imports everything once. For each launch it forks a launcher, which forks the ranks and behaves as the agent of
``accelerate launch`` does: it passes signals on, and ends the others when one has failed. The server adopts ranks whose
launcher was killed, so that it knows when the last process of a launch is gone. Linux only.

Ranks write what happens to a file, and can be told to draw the writing of checkpoints out, or to kill themselves before
an operation on files.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from forking import fork, import_everything

ROOT = Path(__file__).parent.parent
PR_SET_CHILD_SUBREAPER = 36
LAUNCHER_PATIENCE = 30.0
"""Seconds from SIGTERM to SIGKILL for the other ranks, as torchrun gives them."""
AT_ONCE = 2**16
"""Bytes that are written together when writing is drawn out."""
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}
"""Audit events that change a folder; ``open`` for writing is one more."""


@dataclass(frozen=True)
class Launch:
    """One start of the recipe."""

    strategy: str
    processes: int
    flags: tuple[str, ...]
    folder: Path
    """For the output of the ranks and for what they tell."""
    write_seconds: float = 0.0
    """By which writing a file of a checkpoint takes longer."""
    begin_seconds: float = 0.0
    """By which what comes before the first step takes longer."""
    dies_before: tuple[int, int] | None = None
    """Rank that kills itself, and the number (from 1) of the change to files of checkpoints before which it does."""

    def events(self) -> list[dict[str, Any]]:
        """What the ranks told until now; a dead one's last line may be cut."""
        found = []
        for rank in range(self.processes):
            path = self.folder / f"events-{rank}.jsonl"
            text = path.read_text() if path.exists() else ""
            found += [{"rank": rank, **json.loads(line)} for line in text[: text.rfind("\n") + 1].splitlines()]
        return found

    def output(self) -> str:
        """The last lines of every rank."""
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("rank-*.log")))


class LaunchServer:
    """Starts launches, one after the other."""

    def __init__(self, log: Path) -> None:
        context = mp.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, log), daemon=False)
        self.process.start()
        there.close()

    def start(self, launch: Launch) -> int:
        """Start one; returns the launcher's process id."""
        launch.folder.mkdir(parents=True)
        self.connection.send(launch)
        pid: int = self.connection.recv()
        return pid

    def wait(self, seconds: float) -> int | None:
        """Exit code of the launcher (negative: the signal that ended it), once every process of the launch is gone."""
        self.connection.send(seconds)
        code: int | None = self.connection.recv()
        return code

    def stop(self) -> None:
        """End the server and what is left of a launch."""
        self.connection.close()
        self.process.join()


def _serve(connection: Any, log: Path) -> NoReturn:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ["OMP_NUM_THREADS"] = "1"
    import_everything()
    launcher, code = 0, None
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            if launcher and code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(launcher, signal.SIGKILL)
            os._exit(0)
        if isinstance(asked, Launch):
            launcher, code = fork(_launch, asked), None
            connection.send(launcher)
            continue
        deadline, left = time.monotonic() + asked, True
        while left:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if pid == launcher else code
                if pid == 0 and time.monotonic() >= deadline:
                    break
                time.sleep(0.0 if pid else 0.002)
            except ChildProcessError:
                left = False
        connection.send(None if left else code)


def _launch(launch: Launch) -> NoReturn:
    """The launcher: fork the ranks, and live as long as they do."""
    from finetune.distributed.launch_environment import launch_environment

    os.setpgid(0, 0)
    own = {key: value for key, value in os.environ.items() if key == "OMP_NUM_THREADS"}
    file = ROOT / "accelerate_configs" / f"{launch.strategy}.yaml"
    os.environ.update(launch_environment(file, launch.processes, "no") | own)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    heard = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    ranks = [fork(_rank, launch, rank, port, heard) for rank in range(launch.processes)]
    code, deadline = 0, None
    while ranks:
        left = 3600.0 if deadline is None else max(0.0, deadline - time.monotonic())
        got = signal.sigtimedwait(heard, left)
        passed_on = signal.SIGKILL if got is None else got.si_signo
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ranks.remove(pid)
            if ended and status and not code:
                code, passed_on = os.waitstatus_to_exitcode(status) % 256, signal.SIGTERM
        if passed_on != signal.SIGCHLD:
            deadline = deadline or time.monotonic() + LAUNCHER_PATIENCE
            for pid in ranks:
                os.kill(pid, passed_on)
    os._exit(code)


def _rank(launch: Launch, rank: int, port: int, heard: set[signal.Signals]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
    output = os.open(launch.folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if launch.processes > 1:
        for key in ("RANK", "LOCAL_RANK"):
            os.environ[key] = str(rank)
        for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[key] = str(launch.processes)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from finetune.run.entry import run
    from recipes import sft

    _watch(launch, rank)
    sys.argv = ["recipes/sft.py", *launch.flags]
    run(sft.main, sft.Config)
    raise AssertionError("the recipe's entry point ends the process")


def _watch(launch: Launch, rank: int) -> None:
    """Have the recipe tell of its steps, rows and files, and write them as slowly as the launch says."""
    from finetune import checkpoint
    from finetune.checkpoint.writing import write_file
    from finetune.data import batches
    from finetune.run.session import Session

    file = os.open(launch.folder / f"events-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(**event: Any) -> None:
        os.write(file, json.dumps(event | {"at": time.time()}).encode() + b"\n")

    tell(pid=os.getpid())
    now, trains = 0, False
    steps = Session.steps

    def watched_steps(session: Session) -> Iterator[int]:
        nonlocal trains
        trains = True  # what a resumed run asked of its batches before was no step
        yield from steps(session)

    class Watched(batches.Batches):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            time.sleep(launch.begin_seconds)

        def step(self, step: int) -> batches.Batch:
            nonlocal now
            if trains:
                now = step
                tell(step=step)
            return super().step(step)

    make_tensors = batches.collate

    def collate(places: Any, *args: Any, **kwargs: Any) -> Any:
        if now:
            tell(trains=[row.source for documents in places for row in documents], during=now)
        return make_tensors(places, *args, **kwargs)

    def write(path: Path, chunks: Iterable[memoryview]) -> Any:
        tell(writing=path.parent.name)
        stored = write_file(path, _drawn_out(chunks, launch.write_seconds))
        tell(written=path.parent.name)
        return stored

    batches.Batches, batches.collate, Session.steps = Watched, collate, watched_steps  # type: ignore[assignment, method-assign, misc]
    checkpoint.Saver = functools.partial(checkpoint.Saver, write=write)  # type: ignore[misc, assignment]
    if launch.dies_before and launch.dies_before[0] == rank:
        sys.addaudithook(_death_before(launch.dies_before[1], tell))


def _drawn_out(chunks: Iterable[memoryview], seconds: float) -> Iterator[memoryview]:
    parts = [chunk[at : at + AT_ONCE] for chunk in chunks for at in range(0, len(chunk), AT_ONCE)]
    for part in parts:
        time.sleep(seconds / len(parts))
        yield part


def _death_before(last: int, tell: Callable[..., None]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that counts changes to files of checkpoints, and kills its process before the last."""
    numbers = itertools.count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in CHANGES and not (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        of_open_folder = (
            event in ("os.remove", "os.rmdir") and args[1] != -1
        )  # a name in a folder that is being removed
        if (of_open_folder or "checkpoints/step-" in str(args[0])) and next(numbers) == last:
            tell(dies_before=event, of=str(args[0]))
            os.kill(os.getpid(), signal.SIGKILL)

    return hook
