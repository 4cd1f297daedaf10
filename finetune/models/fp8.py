"""Products of linear layers in 8-bit floating point, which GPUs from Ada and Hopper on compute twice as fast as in
bf16.

Both factors are rounded to e4m3 (arXiv:2209.05433), numbers of 4 significant bits up to 448, after they were divided by
a scale: each position of the input has its own, and each output of the weights. Products are summed in fp32 and
returned in bf16. Backward, the gradient of the input is such a product too, with the weights rounded as they were
forward: the scales of the outputs are multiplied into the gradient that comes in, before it is rounded. The gradient of
the weights, where they learn, is computed in bf16.

The weights stay in bf16, or in fp32 with copies in bf16, and are rounded in each pass, forward and backward: so it is
the same under every strategy, and what is saved knows nothing of it. Evaluation and answers are in bf16, in which the
result will be used. The output head and embeddings are left as they are. The kernels have not run on a GPU yet.
"""

import types
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from finetune.compat.torch_private import scaled_product

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST = 1e-12
"""Of a row of zeros, what is taken for its largest number."""
DIVISOR = 16
"""Of both sizes of a matrix that the tensor cores multiply."""
AT_ONCE = 2**20
"""Elements that are rounded at a time where there is no kernel."""


@torch.library.custom_op("finetune::fp8_rows", mutates_args=())
def rounded_rows(x_TK: torch.Tensor, factors_K: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in e4m3, (T, K), and of each row the scale, (T, 1) in fp32, by which they are to be multiplied.

    Args:
        x_TK: contiguous.
        factors_K: by which columns are multiplied before, in fp32.
    """
    out_TK, scales_T1 = _empty(x_TK)
    if x_TK.is_cuda:
        from finetune.models import fp8_kernel

        fp8_kernel.rows(x_TK, factors_K, out_TK, scales_T1)
        return out_TK, scales_T1
    rows = max(1, AT_ONCE // x_TK.shape[1])
    for x, out, scales in zip(x_TK.split(rows), out_TK.split(rows), scales_T1.split(rows), strict=True):
        exact = x.float() if factors_K is None else x.float() * factors_K
        torch.clamp(exact.abs().amax(1, keepdim=True), min=SMALLEST, out=scales).div_(LARGEST)
        out.copy_(exact / scales)
    return out_TK, scales_T1


@rounded_rows.register_fake
def _(x_TK: torch.Tensor, factors_K: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x_TK)


@torch.library.custom_op("finetune::fp8_transposed", mutates_args=())
def rounded_transposed(weight_OI: torch.Tensor, scales_O1: torch.Tensor) -> torch.Tensor:
    """The weights as ``rounded_rows`` rounded them with these scales, transposed, (I, O)."""
    out_IO = weight_OI.new_empty(weight_OI.shape[::-1], dtype=torch.float8_e4m3fn)
    if weight_OI.is_cuda:
        from finetune.models import fp8_kernel

        fp8_kernel.transposed(weight_OI, scales_O1, out_IO)
        return out_IO
    columns = max(1, AT_ONCE // weight_OI.shape[0])
    for weight, out in zip(weight_OI.split(columns, 1), out_IO.split(columns), strict=True):
        out.copy_((weight.float() / scales_O1).t())
    return out_IO


@rounded_transposed.register_fake
def _(weight_OI: torch.Tensor, scales_O1: torch.Tensor) -> torch.Tensor:
    return weight_OI.new_empty(weight_OI.shape[::-1], dtype=torch.float8_e4m3fn)


def _empty(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = x_TK.shape
    return x_TK.new_empty(shape, dtype=torch.float8_e4m3fn), x_TK.new_empty((shape[0], 1), dtype=torch.float32)


Rounded = tuple[torch.Tensor, torch.Tensor]
"""As ``rounded_rows`` returns it."""


def rounded_input(x: torch.Tensor) -> Rounded:
    """Of an input of any shape, (..., I), positions end to end."""
    found: Rounded = rounded_rows(x.flatten(0, -2).contiguous(), None)
    return found


def product(
    rounded: Rounded, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x W^T + b`` of a rounded input, (T, O) in bf16; and the scales of the weights, (O, 1)."""
    rounded_TI, scales_T1 = rounded
    rounded_OI, scales_O1 = rounded_rows(weight_OI.contiguous(), None)
    out_TO = scaled_product(rounded_TI, rounded_OI, scales_T1, scales_O1)
    return out_TO if bias_O is None else out_TO.add_(bias_O), scales_O1


def gradient_of_input(of_out_TO: torch.Tensor, weight_OI: torch.Tensor, scales_O1: torch.Tensor) -> torch.Tensor:
    """``g W``, (T, I) in bf16.

    Args:
        scales_O1: that ``product`` returned.
    """
    rounded_TO, scales_T1 = rounded_rows(of_out_TO.contiguous(), scales_O1.flatten())
    rounded_IO = rounded_transposed(weight_OI.contiguous(), scales_O1)
    ones_I1 = scales_O1.new_ones(weight_OI.shape[1], 1)
    return scaled_product(rounded_TO, rounded_IO, scales_T1, ones_I1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        out_TO, scales_O1 = product(rounded_input(x), weight_OI, bias_O)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight_OI, scales_O1)
        ctx.shape = x.shape
        return out_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> Any:
        x, weight_OI, scales_O1 = ctx.saved_tensors
        of_out_TO = of_out.flatten(0, -2)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = gradient_of_input(of_out_TO, weight_OI, scales_O1).view(ctx.shape) if needs_x else None
        of_weight = of_out_TO.t() @ x.flatten(0, -2) if needs_weight else None
        return of_x, of_weight, of_out_TO.sum(0) if needs_bias else None


def multiply_in_fp8(model: PreTrainedModel) -> int:
    """Have the linear layers of a model multiply in fp8 in training; returns how many do.

    Layers whose sizes are no multiples of ``DIVISOR`` (routers of experts, for example) stay as they are.
    """
    chosen = layers_of(model)
    for layer in chosen:
        layer.forward = types.MethodType(_forward, layer)
        vars(layer)["multiplies_in_fp8"] = True
    return len(chosen)


def layers_of(model: PreTrainedModel) -> list[Any]:
    """The linear layers that can multiply in fp8. Weights may be on the meta device."""
    head = model.get_output_embeddings()
    kept = {id(each) for each in ([] if head is None else head.modules())}
    kept |= {id(each) for name, each in model.named_modules() if ".lora_" in name}
    linear: list[Any] = [each for each in model.modules() if type(each) is torch.nn.Linear and id(each) not in kept]
    return [each for each in linear if not each.in_features % DIVISOR and not each.out_features % DIVISOR]


def is_on(layer: torch.nn.Module) -> bool:
    """Whether a layer multiplies in fp8 now."""
    return layer.training and "multiplies_in_fp8" in vars(layer)


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not self.training:
        return F.linear(x, self.weight, self.bias)
    dtype = torch.bfloat16
    bias = None if self.bias is None else self.bias.to(dtype)
    found: torch.Tensor = _Linear.apply(x.to(dtype), self.weight.to(dtype), bias)
    return found


def problems(model: PreTrainedModel) -> list[str]:
    """A sentence if nothing of a model would multiply in fp8.

    Args:
        model: its modules; weights may be on the meta device.
    """
    if layers_of(model):
        return []
    return [
        f"model.fp8: this model has no linear layers both of whose sizes are multiples of {DIVISOR}; set it to false."
    ]
