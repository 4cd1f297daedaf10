"""An adapter that is off for a while, with no effect on what is trained.

Read in 0.21. Goes when ``enable_adapters(False)`` leaves ``requires_grad`` alone: what DDP and FSDP2 have made of
the weights' gradients depends on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Within it the model computes as before its adapter was attached."""
    layers: list[Any] = [each for each in model.modules() if isinstance(each, BaseTunerLayer | ModulesToSaveWrapper)]
    before = [each._disable_adapters for each in layers]
    try:
        for each in layers:
            each._disable_adapters = True
        yield
    finally:
        for each, was in zip(layers, before, strict=True):
            each._disable_adapters = was
