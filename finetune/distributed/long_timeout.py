"""Collectives with a long timeout, for disks, checksums and people. Those of training give up soon."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def long_timeout_group() -> dist.ProcessGroup | None:
    """A gloo group of all processes; None if there is only one. Collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=1)) if dist.is_initialized() else None


def gathered(value: Value, group: dist.ProcessGroup | None) -> list[Value]:
    """The values of all processes; collective."""
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
def long_wait() -> Iterator[None]:
    """Have processes wait for one another at its end: for the main process alone, or for the slowest to read."""
    group = long_timeout_group()
    yield
    if group is not None:
        dist.barrier(group)
        dist.destroy_process_group(group)
