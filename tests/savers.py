"""Processes of a run as threads, each with a share of the tensors: checkpoints are tested without a process group."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint import Saver
from finetune.distributed import Piece

Gather = Callable[[str | None], list[str | None]]


def together(world_size: int, function: Callable[[int, Gather], Any]) -> list[Any]:
    """What ``function(rank, gather)`` returns on each of so many ranks, which run at the same time."""
    barrier = threading.Barrier(world_size, timeout=30)
    values: list[str | None] = [None] * world_size

    def of(rank: int) -> Gather:
        def gather(value: str | None) -> list[str | None]:
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        return gather

    with ThreadPoolExecutor(world_size) as threads:
        futures = [threads.submit(function, rank, of(rank)) for rank in range(world_size)]
        return [future.result() for future in futures]


def share(tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, Sequence[int]], rank: int) -> list[Piece]:
    """Live pieces of the stretches ``cuts[name][rank]`` to ``cuts[name][rank + 1]``; empty ones give none."""
    pieces = []
    for name, tensor in tensors.items():
        begin, end = cuts[name][rank : rank + 2]
        if begin < end:
            values = tensor.view(-1)[begin:end]
            pieces.append(Piece(name, tuple(tensor.shape), begin, values, (0, len(values))))
    return pieces


def even_cuts(tensors: Mapping[str, torch.Tensor], world_size: int) -> dict[str, list[int]]:
    return {n: [t.numel() * rank // world_size for rank in range(world_size + 1)] for n, t in tensors.items()}


def state(step: int) -> dict[str, torch.Tensor]:
    """A small state whose values tell its step."""
    return {"weights/a": torch.full((40, 10), float(step)), "optimizer/exp_avg/a": torch.full((40, 10), -float(step))}


def saver(run: Path, rank: int, world_size: int, gather: Gather, **changes: Any) -> Saver:
    settings: dict[str, Any] = {"keep": 2, "expected_bytes": 0, **changes}
    return Saver(run, rank=rank, world_size=world_size, gather=gather, **settings)


def save(run: Path, step: int, tensors: Mapping[str, torch.Tensor] | None = None, world_size: int = 1) -> Path:
    """A complete checkpoint of a run; returns its folder."""
    tensors = tensors or state(step)
    cuts = even_cuts(tensors, world_size)

    def on(rank: int, gather: Gather) -> None:
        own = saver(run, rank, world_size, gather)
        own.save(step, share(tensors, cuts, rank), {"run": {}}, {"steps": {f"of {rank}": step}}, "fsdp2")
        own.finish()
        assert own.problems() == []

    together(world_size, on)
    return run / "checkpoints" / f"step-{step:08d}"
