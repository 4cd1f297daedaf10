"""What the libraries need so that the step runs on fake tensors, in a process group that answers by itself.

The only module that changes foreign code, each time in a context that restores it. What is changed, and until when,
stands in ``finetune.compat``, one module for each library.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from finetune.compat import fake_tensors
from finetune.compat.fake_tensors import (
    Change,
    FakeTensor,
    TorchDispatchMode,
    answer_replicas,
    reads_a_value,
    without_modes,
)

__all__ = ["AnyValue", "answer_replicas", "engines_take_fakes", "libraries_take_fakes", "storages_tell_their_size"]


@contextlib.contextmanager
def _replaced(*changes: Change) -> Iterator[None]:
    originals = [(owner, name, vars(owner).get(name)) for owner, name, _ in changes]
    for owner, name, new in changes:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def storages_tell_their_size(tell: Callable[[torch.UntypedStorage], None]) -> contextlib.AbstractContextManager[None]:
    """Call ``tell`` after a storage is resized, which no dispatch mode sees: so FSDP2 frees its gathered layers.

    Until PyTorch shows it to modes.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        returned = original(storage, size)
        tell(storage)
        return returned

    return _replaced((torch.UntypedStorage, "resize_", resize_))


class AnyValue(TorchDispatchMode):
    """What the host reads off a fake tensor: a finite norm, and no for an answer, as to whether gradients overflowed.
    Not a patch; a fake tensor has no value to read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reads_a_value(func) and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else args[0].dtype not in (torch.bool, torch.uint8)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def libraries_take_fakes() -> Iterator[None]:
    """Everything that each library needs while a model is built, prepared and trained on fake tensors."""
    # PEFT and Accelerate import the like of these when they are first used: a constant of theirs would stay fake
    import peft  # noqa: F401

    from finetune.compat import bitsandbytes_private, transformers_private
    from finetune.models import attention
    from finetune.trace.building import Params4bit

    with _replaced(
        *fake_tensors.changes(),
        *transformers_private.fake_tensor_changes(),
        *bitsandbytes_private.fake_tensor_changes(Params4bit),
        (attention, "_each_document", _in_one_kernel),
    ):
        yield


def engines_take_fakes() -> contextlib.AbstractContextManager[None]:
    """For DeepSpeed's engine, where it is installed."""
    from finetune.compat import deepspeed_private

    return _replaced(*deepspeed_private.fake_tensor_changes())


def _in_one_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: list[int],
    scaling: float | None,
    sliding_window: int | None,
    dropout: float,
) -> torch.Tensor:
    """For our own attention of packed rows, which takes a GPU's way when it sees a GPU: take it here too. What it
    computes with has a fake for every device."""
    from finetune.models.attention import _varlen

    longest = max(end - start for start, end in itertools.pairwise(bounds))
    with without_modes():
        real_bounds = torch.tensor(bounds, dtype=torch.int32)
    return _varlen(query, key, value, real_bounds, longest, scaling, sliding_window, dropout)
