"""Traces in processes of their own, begun before a test asks for them: an engine keeps its process groups.

Each is forked from a server that has imported the libraries.
"""

import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import forking

from finetune.trace.layers import Anatomy
from finetune.trace.setting import Setting
from finetune.trace.shallow import Step
from finetune.trace.tracer import Tracer

Key = TypeVar("Key")
Found = TypeVar("Found")
LONGEST_SECONDS = 300.0


@contextmanager
def begun(asked: Mapping[Key, Callable[[], Found]]) -> Iterator[dict[Key, "Future[Found]"]]:
    """Begin calls, two at a time, of functions that can be pickled."""
    server = forking.server()
    pool = ThreadPoolExecutor(max_workers=2)
    try:
        yield {key: pool.submit(_called, server, call) for key, call in asked.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def _called(server: forking.ForkServer, call: Callable[[], Found]) -> Found:
    here, there = mp.Pipe()
    process = server.start(_answer, there, call)
    there.close()
    try:
        if not here.poll(LONGEST_SECONDS):
            raise TimeoutError(f"a trace takes longer than {LONGEST_SECONDS:.0f} s: {call}")
        found, failure = here.recv()
        assert failure is None, failure
        return found
    finally:
        forking.end(process)


def _answer(connection: Any, call: Callable[[], Any]) -> None:
    try:
        answer = (call(), None)
    except Exception:
        answer = (None, traceback.format_exc())
    connection.send(answer)


def traced_anatomy(model: dict[str, Any]) -> Anatomy:
    """The sizes of a model, by a tracer that remembers nothing."""
    with tempfile.TemporaryDirectory() as folder, Tracer(model, row_tokens=2048, folder=Path(folder)) as tracer:
        return tracer.anatomy


def traced_step(
    model: dict[str, Any], setting: Setting, *, row_tokens: int = 2048, kind: type[Tracer] = Tracer
) -> Step:
    """The step of a model, by a tracer that remembers nothing."""
    with tempfile.TemporaryDirectory() as folder, kind(model, row_tokens=row_tokens, folder=Path(folder)) as tracer:
        return tracer.step(setting)
