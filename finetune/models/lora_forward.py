"""LoRA on a linear layer as one operation, forward and backward.

PEFT adds ``lora_B(lora_A(x)) * scaling`` to what the frozen layer returned: a product, a scaled copy of it, a sum, and
in 4 bits a copy of the frozen layer's output before that. Backward, autograd sums the gradients of ``x`` that come
through the frozen weights and through the adapter, and those of all layers that have this input.

Here every sum is made by the product that computes what is added, in its place. A layer's output is written once, and
so is the gradient of its input; queries, keys and values, or the two projections of a gated MLP, add up one gradient of
the input that they share. For the backward pass the input is kept, once for all of them, and ``lora_A(x)``.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from finetune.compat.torch_private import current_backward
from finetune.models import fp8
from finetune.models.quantization import dequantised


def write_once(model: torch.nn.Module) -> None:
    """For PEFT's LoRA on linear layers, also in 4 and 8 bits; everything else stays as PEFT computes it."""
    from peft.tuners import lora

    kinds: list[type] = [lora.Linear]
    if "bitsandbytes" in sys.modules:  # else no layer is one of its own
        kinds += [lora.Linear4bit, lora.Linear8bitLt]
    for parent in list(model.modules()):
        layers: list[Any] = [each for each in parent.children() if type(each) in kinds]
        shared = _SharedInput()
        if any(_has_siblings(layer, layers) for layer in layers):
            # also where a recomputation ends early, by an exception
            parent.register_forward_hook(lambda *_, shared=shared: shared.forget(), always_call=True)
        for layer in layers:
            if layer.lora_variant:  # DoRA is one
                continue
            layer.forward = types.MethodType(_forward_of(shared if _has_siblings(layer, layers) else None), layer)
            for last in layer.lora_B.values():
                last.forward = types.MethodType(_product_added_to, last)


def _has_siblings(layer: Any, layers: list[Any]) -> bool:
    return sum(each.in_features == layer.in_features for each in layers) > 1


def _forward_of(shared: "_SharedInput | None") -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1 or args or kwargs:
            own: torch.Tensor = type(self).forward(self, x, *args, **kwargs)
            return own
        (adapter,) = self.active_adapters
        first, last, scaling = self.lora_A[adapter], self.lora_B[adapter], self.scaling[adapter]
        if _is_one_operation(self, x, adapter):
            given, gradient = shared.seen(x) if shared else (x, None)
            rounded = None
            if fp8.is_on(self.base_layer):
                rounded = shared.rounded(x) if shared else fp8.rounded_input(x)
            whole: torch.Tensor = _Adapted.apply(
                given, first.weight, last.weight, self.base_layer, scaling, gradient, rounded
            )
            return whole
        frozen = self.base_layer(x)
        found: torch.Tensor = last(first(self.lora_dropout[adapter](x)) * scaling, frozen)
        return found

    return forward


def _is_one_operation(layer: Any, x: torch.Tensor, adapter: str) -> bool:
    """Not with dropout; not where dtypes differ, as under autocast of fp32 weights; not in 8 bits, whose backward
    pass needs more; not where ZeRO-3 gathers weights around each module."""
    base, first, last = layer.base_layer, layer.lora_A[adapter], layer.lora_B[adapter]
    # asked first, and of ``parameters``: DeepSpeed gathers a weight that is read by its name
    if any(hasattr(weight, "ds_id") for part in (base, first, last) for weight in part.parameters()):
        return False
    if layer.training and not isinstance(layer.lora_dropout[adapter], torch.nn.Identity):
        return False
    learns = base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad)
    if learns or first.bias is not None or last.bias is not None:
        return False
    dtype = base.compute_dtype if _is_4_bit(base) else base.weight.dtype if type(base) is torch.nn.Linear else None
    kind = x.device.type
    computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return {dtype, x.dtype, first.weight.dtype, last.weight.dtype} == {computed}


def _is_4_bit(base: torch.nn.Module) -> bool:
    bitsandbytes = sys.modules.get("bitsandbytes")  # else no layer is one of its own
    return bitsandbytes is not None and isinstance(base, bitsandbytes.nn.Linear4bit)


class _Gradient:
    """Of an input, that several layers add up within a backward pass."""

    def __init__(self) -> None:
        self._sum: tuple[int, torch.Tensor] | None = None

    def known(self) -> torch.Tensor | None:
        """What this backward pass has added up; one that came to its end elsewhere may have left something, too."""
        return self._sum[1] if self._sum and self._sum[0] == current_backward() else None

    def keep(self, of_x_TI: torch.Tensor) -> None:
        self._sum = current_backward(), of_x_TI

    def take(self) -> torch.Tensor | None:
        found, self._sum = self.known(), None
        return found


class _SharedInput:
    """What the layers of a module are called with, one after another, until its forward ends."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, torch.Tensor, _Gradient] | None = None
        self._rounded: tuple[torch.Tensor, fp8.Rounded] | None = None

    def seen(self, x: torch.Tensor) -> tuple[torch.Tensor, _Gradient | None]:
        """The input as these layers see it, and its gradient, to which they add: the same for all that get this one."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x, None
        if self._last is None or self._last[0] is not x:
            gradient = _Gradient()
            self._last = x, _Shared.apply(x, gradient), gradient
        return self._last[1:]

    def rounded(self, x: torch.Tensor) -> fp8.Rounded:
        """The input in fp8, once for all of them."""
        if self._rounded is None or self._rounded[0] is not x:
            self._rounded = x, fp8.rounded_input(x)
        return self._rounded[1]

    def forget(self) -> None:
        self._last = self._rounded = None


class _Shared(torch.autograd.Function):
    """An input whose gradient is what layers have added up: autograd gets none of them from the layers themselves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: _Gradient) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, of_x: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        known = ctx.gradient.take()
        if known is None or of_x is None:
            return of_x if known is None else known, None
        return of_x + known, None


class _Adapted(torch.autograd.Function):
    """``base(x) + scaling * x A^T B^T`` (arXiv:2106.09685) of a frozen ``base``: as it is, in 4 bits, or in fp8."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        base: Any,
        scaling: float,
        gradient: _Gradient | None,
        rounded: fp8.Rounded | None,
    ) -> torch.Tensor:
        x_TI, scales_O1 = x.flatten(0, -2), None
        if rounded is not None:
            out, scales_O1 = fp8.product(rounded, base.weight, base.bias)
            out = out if x.dim() == 2 else out.view(*x.shape[:-1], -1)
        else:
            out = base(x)  # returned as it is, for autograd forbids models to change a view of it
        small_TR = (x_TI @ a_RI.t()).mul_(scaling)
        out.view(x_TI.shape[0], -1).addmm_(small_TR, b_OR.t())
        ctx.save_for_backward(x, a_RI, b_OR, small_TR, base.weight, scales_O1)
        ctx.quantised = base.weight.quant_state if _is_4_bit(base) else None
        ctx.scaling, ctx.gradient = scaling, gradient
        return out

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> Any:
        x, a_RI, b_OR, small_TR, weight, scales_O1 = ctx.saved_tensors
        of_out_TO, of_x = of_out.flatten(0, -2), None
        of_small_TR = (of_out_TO @ b_OR).mul_(ctx.scaling)
        if ctx.needs_input_grad[0]:
            known = ctx.gradient.known() if ctx.gradient else None
            known_TI = None if known is None else known.view(-1, x.shape[-1])
            if scales_O1 is not None:
                of_x = fp8.gradient_of_input(of_out_TO, weight, scales_O1)
                of_x = of_x if known_TI is None else known_TI.add_(of_x)
            else:
                weight_OI = weight if ctx.quantised is None else dequantised(weight, ctx.quantised, of_out.dtype)
                of_x = of_out_TO @ weight_OI if known_TI is None else known_TI.addmm_(of_out_TO, weight_OI)
            of_x = of_x.addmm_(of_small_TR, a_RI).view(x.shape)
            if ctx.gradient:
                ctx.gradient.keep(of_x)
                of_x = None
        of_a = of_small_TR.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        of_b = of_out_TO.t() @ small_TR if ctx.needs_input_grad[2] else None
        return of_x, of_a, of_b, None, None, None, None


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
