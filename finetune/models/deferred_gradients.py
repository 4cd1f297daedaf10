"""Gradients of the weights of linear layers, computed when a stage of a pipeline would else wait.

A linear layer's backward pass is two products. The stage before waits for the gradient of the input; for that of the
weight nobody waits before the optimizer steps, and zero-bubble schedules compute it where a stage would be idle
(arXiv:2401.10241, section 2). Until then a layer's input and the gradient of its output are kept.

PyTorch's schedules can split a backward pass by themselves, going through its graph twice. That needs a graph that
stays as it is: the loss gives its gradients away, gated products put theirs in the place of what was kept (the
gradients of ``down_proj`` came out wrong, with no error), and layers that are recomputed were so for each of their
weights anew. So here the layers split it, in one pass through the graph, and tell the schedule what is left to do (its
``dw_builder``).

Limits: embeddings, norms, biases, experts and adapters get their gradients at once, and the head with the loss. So do
layers whose inputs are split and that have a bias, which is added to their sum.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from finetune.models.pipeline_stages import costs_of
from finetune.models.recomputation import layers_of


class Product(NamedTuple):
    """What the gradient of a weight is the product of."""

    parameter: torch.nn.Parameter
    of_out_TO: torch.Tensor
    x_TI: torch.Tensor


class DeferredGradients:
    """Of the weights of linear layers, which from here on hand their products in."""

    def __init__(self, layers: Iterable[torch.nn.Linear]) -> None:
        self._products: deque[Product] | None = None
        for layer in layers:
            vars(layer)["forward"] = partial(self._forward, layer)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Within it gradients of weights are deferred. Whoever computes backward passes takes them."""
        self._products = deque()
        try:
            yield
        finally:
            self._products = None

    def take(self) -> Callable[[], None]:
        """What computes the gradients that were deferred since this was last asked for."""
        assert self._products is not None
        taken, self._products = self._products, deque()
        return partial(_compute, taken)

    def add(self, product: Product) -> None:
        """For the gradient of a weight, later."""
        assert self._products is not None
        self._products.append(product)

    def _forward(self, layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if self._products is None or not torch.is_grad_enabled():
            return F.linear(x, layer.weight, layer.bias)
        (parameter, *_) = layer.parameters(recurse=False)  # of which the weight may be a copy in 16 bits
        found: torch.Tensor = _Linear.apply(x, layer.weight, layer.bias, parameter, self)
        return found


class _Linear(torch.autograd.Function):
    """``x W^T + b``, whose weight gets its gradient later."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        parameter: torch.nn.Parameter,
        deferred: DeferredGradients,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.parameter, ctx.deferred = parameter, deferred
        return F.linear(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> Any:
        x, weight_OI = ctx.saved_tensors
        of_out_TO = of_out.detach().flatten(0, -2)
        # without the graph behind them: the gradient of a gated product's input may be in its place
        ctx.deferred.add(Product(ctx.parameter, of_out_TO, x.detach().flatten(0, -2)))
        of_x = (of_out_TO @ weight_OI).view(x.shape) if ctx.needs_input_grad[0] else None
        of_bias = of_out_TO.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None, None


@torch.no_grad()
def _compute(products: deque[Product]) -> None:
    """Add the gradients to those of earlier micro-batches; what they are products of goes one by one."""
    while products:
        parameter, of_out_TO, x_TI = products.popleft()
        of_weight_OI = of_out_TO.t() @ x_TI
        del of_out_TO, x_TI
        if parameter.grad is None:
            parameter.grad = of_weight_OI.to(parameter.dtype)
        else:
            parameter.grad += of_weight_OI


def deferring_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """The linear layers that can defer the gradients of their weights: within the model's layers, trained, not an
    adapter's, and not computed in another way. Weights may be on the meta device."""
    return [
        module
        for layer in layers_of(model)
        for name, module in layer.named_modules()
        if type(module) is torch.nn.Linear
        and module.weight.requires_grad
        and ".lora_" not in name
        and "forward" not in vars(module)
    ]


def share_of(model: PreTrainedModel) -> float:
    """Of the multiplications of a model's layers for a token, those with weights whose gradients can be deferred."""
    head, costs = model.get_output_embeddings(), costs_of(model)
    of_layers = sum(costs) - (head.weight.numel() if costs and head is not None else 0)
    return sum(each.weight.numel() for each in deferring_layers(model)) / of_layers if costs else 0.0


def width_of(model: PreTrainedModel) -> int:
    """Elements of a position that a layer keeps for them, on average; an input of several is counted for each."""
    every = deferring_layers(model)
    return sum(each.in_features + each.out_features for each in every) // max(1, len(layers_of(model)))
