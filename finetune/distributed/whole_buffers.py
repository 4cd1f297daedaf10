"""Buffers that stand in a model's files, where FSDP2 shards its parameters: whole, in every process.

Accelerate 1.15 distributes all that a state dict holds as shards, and a buffer has none (``fsdp2_load_full_state_dict``
ends with "'Tensor' object has no attribute 'device_mesh'"). Buffers that are not in the files it leaves alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from finetune.models.weights import saved_buffers


@contextmanager
def kept_whole(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Within it the model may be sharded: the buffers of its files count as others. Collective.

    Args:
        model: not sharded yet; in processes other than the first, its buffers may have any values.
        device: on which all processes compute.
    """
    saved = saved_buffers(model)
    for name, buffer in saved.items():
        value = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        dist.broadcast(value, 0)
        _register(model, name, value, persistent=False)
    yield
    for name in saved:
        _register(model, name, model.get_buffer(name), persistent=True)


def _register(model: torch.nn.Module, name: str, value: torch.Tensor, *, persistent: bool) -> None:
    module, _, own = name.rpartition(".")
    model.get_submodule(module).register_buffer(own, value, persistent=persistent)
