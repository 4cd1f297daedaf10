"""Dry runs in processes of their own, begun before a test asks for them: most of their time they import libraries."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from finetune.trace.child import trace_in_child
from finetune.trace.findings import Trace

Key = TypeVar("Key")


@contextmanager
def begun(asked: Mapping[Key, dict[str, Any]]) -> Iterator[dict[Key, "Future[Trace]"]]:
    """Begin the dry runs, two at a time, each with these arguments of ``trace_in_child``."""
    pool = ThreadPoolExecutor(max_workers=2)
    try:
        yield {key: pool.submit(trace_in_child, **arguments) for key, arguments in asked.items()}
    finally:
        pool.shutdown(cancel_futures=True)
