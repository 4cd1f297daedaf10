"""LoRA's forward with its output written once.

PEFT adds ``lora_B(lora_A(x)) * scaling`` to what the frozen layer returned: a product, a scaled copy of it, a sum, and
in 4 bits a copy of the frozen layer's output before that. Here ``lora_A(x)``, of a few columns, is scaled, and the last
product is added to the frozen output by the operation that computes it.
"""

import sys
import types
from typing import Any

import torch
import torch.nn.functional as F


def write_once(model: torch.nn.Module) -> None:
    """For PEFT's LoRA on linear layers, also in 4 and 8 bits; everything else stays as PEFT computes it."""
    from peft.tuners import lora

    kinds: list[type] = [lora.Linear]
    if "bitsandbytes" in sys.modules:  # else no layer is one of its own
        kinds += [lora.Linear4bit, lora.Linear8bitLt]
    for module in list(model.modules()):
        layer: Any = module
        if type(layer) in kinds and not layer.lora_variant:  # DoRA is a variant
            layer.forward = types.MethodType(_forward, layer)
            for last in layer.lora_B.values():
                last.forward = types.MethodType(_product_added_to, last)


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if self.disable_adapters or self.merged or len(self.active_adapters) != 1 or args or kwargs:
        own: torch.Tensor = type(self).forward(self, x, *args, **kwargs)
        return own
    (adapter,) = self.active_adapters
    frozen = self.base_layer(x)
    small = self.lora_A[adapter](self.lora_dropout[adapter](x)) * self.scaling[adapter]
    found: torch.Tensor = self.lora_B[adapter](small, frozen)
    return found


def _product_added_to(self: Any, x: torch.Tensor, frozen: torch.Tensor | None = None) -> torch.Tensor:
    """As the forward of a linear layer, within which ZeRO-3 gathers its weights, but added to what is there.

    Not of a weight that ZeRO-3 partitions: autograd would keep it gathered for the backward pass. It does not for
    ``F.linear``, which DeepSpeed replaces.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    is_partitioned = hasattr(self.weight, "ds_id") and not self.weight.ds_persist
    if frozen is None or frozen.dtype != dtype or self.bias is not None or is_partitioned:
        product = F.linear(x, self.weight, self.bias)
        return product if frozen is None else frozen + product.to(frozen.dtype)
    rows = torch.addmm(frozen.flatten(0, -2), x.flatten(0, -2), self.weight.t())
    return rows.view(frozen.shape)
