"""PEFT without bitsandbytes until something is quantised, and an adapter that is off without effect on what is trained.

Read in 0.21. ``adapter_off`` goes when ``enable_adapters(False)`` leaves ``requires_grad`` alone: what DDP and FSDP2
have made of the weights' gradients depends on it. The others go when PEFT imports bitsandbytes for quantised layers
alone. It does so when it is imported and when LoRA is attached, which takes a second, and ``notebook_launcher`` starts
no processes after it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


def import_peft() -> None:
    """Import PEFT; call it where nobody may have done so yet."""
    is_hidden = not {"peft", "bitsandbytes"} & set(sys.modules)
    if is_hidden:
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # ``peft.helpers`` then does without it
    try:
        import peft  # noqa: F401
    finally:
        if is_hidden:
            del sys.modules["bitsandbytes"]


@contextmanager
def only_what_is_quantised() -> Iterator[None]:
    """Within it LoRA looks for layers of bitsandbytes only where there may be some, because it has been imported."""
    from peft.tuners.lora import model

    before = model.is_bnb_available, model.is_bnb_4bit_available
    if "bitsandbytes" not in sys.modules:
        model.is_bnb_available = model.is_bnb_4bit_available = lambda: False  # type: ignore[assignment]
    try:
        yield
    finally:
        model.is_bnb_available, model.is_bnb_4bit_available = before


@contextmanager
def rows_of_whole_weights() -> Iterator[None]:
    """Within it PEFT reads the rows of an embedding that are trained off its weight, which is whole, also under ZeRO-3.

    Else it would gather them, which it does on GPUs alone (0.21). Goes when it looks at the weight instead.
    """
    from peft.tuners.trainable_tokens import layer

    before = layer.check_deepspeed_zero3_enabled
    layer.check_deepspeed_zero3_enabled = lambda: False
    try:
        yield
    finally:
        layer.check_deepspeed_zero3_enabled = before


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Within it the model computes as before its adapter was attached."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    layers: list[Any] = [each for each in model.modules() if isinstance(each, BaseTunerLayer | ModulesToSaveWrapper)]
    before = [each._disable_adapters for each in layers]
    try:
        for each in layers:
            each._disable_adapters = True
        yield
    finally:
        for each, was in zip(layers, before, strict=True):
            each._disable_adapters = was


def adapt_own_experts(model: Any, place: int, parts: int) -> None:
    """Have the adapters of experts, which each process has of all, change this process's share of them alone. Gradients
    of the others are then zero here. Goes when PEFT takes a part of an adapter.

    Args:
        model: with its adapter, and the experts of this share alone.
    """
    from peft.tuners.lora.layer import ParamWrapper

    def own_factors(wrapper: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        left, right, scaling = type(wrapper).get_delta_factors(wrapper, adapter)
        return left.chunk(parts)[place], right.chunk(parts)[place], scaling

    def own_change(wrapper: Any, adapter: str, *args: Any, **known: Any) -> torch.Tensor:
        return type(wrapper).get_delta_weight(wrapper, adapter, *args, **known).chunk(parts)[place]

    for module in model.modules():
        if isinstance(module, ParamWrapper) and parts * module.get_param().shape[0] == module.num_experts:
            vars(module).update(
                get_delta_factors=partial(own_factors, module), get_delta_weight=partial(own_change, module)
            )
