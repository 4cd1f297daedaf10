"""Forks of this process that do one job after another, so that what a job learns serves the next.

A worker is killed and replaced where its job failed, since nobody knows what such a job left behind. It ends with this
process too: its pipe does.
"""

import json
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

PATIENCE_SECONDS = 300
"""Without any answer, after which all that work are killed: the longest trace that was seen took 20."""
Answer = dict[str, Any]


class Worker:
    """One of them."""

    def __init__(self, work: Callable[[connection.Connection], None]) -> None:
        self.pipe, there = connection.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads hold nothing that a job needs
            self.pid = os.fork()
        if not self.pid:
            try:
                self.pipe.close()
                work(there)
            finally:
                os._exit(0)  # libraries' destructors look for the processes of a group
        there.close()

    def answer(self) -> Answer:
        """To its job, which is waited for."""
        try:
            found: Answer = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):  # at the beginning of its answer, or within it
            return {"failed": "its process was killed"}
        return found

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()


class Workers:
    """They start when there are jobs, and end with this context."""

    def __init__(self, do: Callable[[Any], Answer], most: int, *, prepare: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            do: a job; its answer has the key "failed" where the next one needs a new process. It raises nothing.
            most: how many work at a time.
            prepare: is called in a worker before each of its jobs.
        """
        self._do, self._most, self._prepare = do, most, prepare
        self._idle: list[Worker] = []
        self._busy: dict[connection.Connection, tuple[int, Worker]] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in (*self._idle, *(worker for _, worker in self._busy.values())):
            worker.end()

    def answers(self, jobs: Sequence[Any]) -> Iterator[Answer]:
        """One to each job, with its place among them as "number", as they are found. Both are JSON."""
        waiting = deque(enumerate(jobs))
        while waiting or self._busy:
            while waiting and len(self._busy) < self._most:
                worker = self._free()
                place, job = waiting.popleft()
                worker.pipe.send_bytes(json.dumps(job).encode())
                self._busy[worker.pipe] = place, worker
            ready: list[Any] = connection.wait(list(self._busy), PATIENCE_SECONDS)
            if not ready:
                ready = list(self._busy)
                for _, worker in self._busy.values():
                    os.kill(worker.pid, signal.SIGKILL)
            for pipe in ready:
                place, worker = self._busy.pop(pipe)
                answer = worker.answer()
                if "failed" in answer:
                    worker.end()
                else:
                    self._idle.append(worker)
                yield {"number": place} | answer

    def _free(self) -> Worker:
        """One that waits for a job. An idle one that says something was killed, and its pipe is at its end."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.pipe.poll():
                return worker
            worker.end()
        return Worker(self._work)

    def _work(self, pipe: connection.Connection) -> None:
        while True:
            self._prepare()
            try:
                job = json.loads(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send_bytes(json.dumps(self._do(job)).encode())
