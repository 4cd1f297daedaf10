"""Dry runs in processes of their own, begun before a test asks for them.

Each is forked from a server that has imported the libraries. ``trace_in_child``, which starts Python for every dry run,
takes ten times as long, most of it imports.
"""

import multiprocessing as mp
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import forking

from finetune.trace.findings import Trace, trace_of

Key = TypeVar("Key")
LONGEST_SECONDS = 300.0


@contextmanager
def begun(asked: Mapping[Key, dict[str, Any]]) -> Iterator[dict[Key, "Future[Trace]"]]:
    """Begin the dry runs, two at a time, each with these arguments of ``dry_run``."""
    server = forking.server()
    pool = ThreadPoolExecutor(max_workers=2)
    try:
        yield {key: pool.submit(_trace, server, arguments) for key, arguments in asked.items()}
    finally:
        pool.shutdown(cancel_futures=True)


def _trace(server: forking.ForkServer, arguments: dict[str, Any]) -> Trace:
    here, there = mp.Pipe()
    process = server.start(_answer, there, arguments)
    there.close()
    try:
        if not here.poll(LONGEST_SECONDS):
            raise TimeoutError(f"a dry run takes longer than {LONGEST_SECONDS:.0f} s: {arguments}")
        return trace_of(here.recv())
    finally:
        forking.end(process)


def _answer(connection: Any, arguments: dict[str, Any]) -> None:
    from finetune.trace.dry_run import dry_run

    connection.send(dry_run(**arguments).record())
