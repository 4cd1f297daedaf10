"""Collectives that wait as long as it takes: for a disk, a checksum, a person. Those of training give up soon."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def long_timeout_group() -> dist.ProcessGroup | None:
    """A group of all processes, on the hosts; None where there is one process. Collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=1)) if dist.is_initialized() else None


def gathered(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """The value of each process, known to all; collective."""
    if group is None:
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def long_timeout_gather() -> Iterator[Callable[[str], list[str]]]:
    """``gathered``, over a group that lives as long as this."""
    group = long_timeout_group()
    yield lambda text: gathered(text, group)
    if group is not None:
        dist.destroy_process_group(group)


@contextmanager
def main_process_writes() -> Iterator[None]:
    """Let the other processes wait while one writes."""
    group = long_timeout_group()
    yield
    if group is not None:
        dist.barrier(group)
        dist.destroy_process_group(group)
