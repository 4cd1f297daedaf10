"""The forward passes of layers of which each process of a group has a part, and what goes between the processes.

Each computes with its own part as an ordinary tensor, so kernels and adapters are those of a whole layer. What is
exchanged is around the layers (arXiv:1909.08053, section 3, figure 3): an input that all processes have goes through
``_Copied``, whose gradient is summed, and outputs that are parts of a sum through ``_Reduced``.

Example: x goes into an MLP of which two processes have half each. Forward, the two results of ``down_proj`` are added
up, once; backward, the two gradients of x. That of x is summed once for ``gate_proj`` and ``up_proj`` together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from finetune.models.tensor_plan import Layer

Change = Callable[[torch.Tensor], torch.Tensor]


def split_forward(model: Any, layers: Sequence[Layer], group: Any) -> None:
    """Have layers whose weights are parts compute with the other processes of a group. Their parents' own code stays.

    Args:
        layers: of ``tensor_plan.layers_of``; an adapter must be attached before.
    """
    changes: dict[str, Change] = {"own": lambda x: x} | {
        name: _through(function, group)
        for name, function in {"copy": _Copied, "reduce": _Reduced, "gather": _Gathered, "scatter": _Scattered}.items()
    }
    shared: dict[str, _SharedCopy] = {}
    for layer in layers:
        parent = layer.name.rpartition(".")[0]
        if layer.style.takes == "copy" and parent:
            if parent not in shared:
                shared[parent] = _SharedCopy(changes["copy"])
                model.get_submodule(parent).register_forward_hook(shared[parent].forget, always_call=True)
            take: Change = shared[parent]
        else:
            take = changes[layer.style.takes]
        give = changes[layer.style.gives]
        if not layer.style.by:
            _wrap_experts(layer.module, take, give, changes["copy"])
        else:
            _wrap(layer.module, take, give, adds_bias=layer.style.by == "inputs")
    size = dist.get_world_size(group)
    fewer = {layer.name.rpartition(".")[0]: layer.parts for layer in layers if layer.parts < size}
    for name, parts in fewer.items():  # of keys and values, which all query heads of a process look at
        attention = model.get_submodule(name)
        attention.num_key_value_groups = attention.num_key_value_groups * parts // size


def _wrap(module: Any, take: Change, give: Change, *, adds_bias: bool) -> None:
    """A linear layer, with the adapter around it; a bias that is added to a sum is added once."""
    linear: Any = getattr(module, "base_layer", module)
    assert isinstance(linear, torch.nn.Linear), type(linear)
    bias: Any = linear if adds_bias and linear.bias is not None else None
    if bias is not None:
        assert type(linear) is torch.nn.Linear, type(linear)
        linear.forward = lambda x: F.linear(x, linear.weight)  # type: ignore[method-assign,assignment]
    own = module.forward

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = give(own(take(x), *args, **kwargs))
        return found if bias is None else found + bias.bias

    module.forward = forward


def _wrap_experts(module: Any, take: Change, give: Change, copy: Change) -> None:
    """Experts, of whose sum the weights are an input, too."""
    own = module.forward

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return give(own(take(hidden), chosen, copy(weights)))

    module.forward = forward


def split_embedding(embedding: Any, part: int, group: Any) -> None:
    """Have an embedding look up its own of equal parts of its rows, and take the others' from their processes.

    Args:
        embedding: whole, whose weight will be a part.
    """
    own, vocabulary, reduce = embedding.forward, embedding.weight.shape[0], _through(_Reduced, group)
    rows = vocabulary // dist.get_world_size(group)
    first = part * rows
    if embedding.padding_idx is not None:  # whose row has no gradient
        inside = embedding.padding_idx % vocabulary - first
        embedding.padding_idx = inside if 0 <= inside < rows else None

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        places = tokens - first
        is_elsewhere = (places < 0) | (places >= rows)
        found = own(places.masked_fill(is_elsewhere, 0))
        return reduce(found.masked_fill(is_elsewhere[..., None], 0.0))

    embedding.forward = forward


class _SharedCopy:
    """An input as the layers of one module see it, which call it one after another: one sum for its gradient."""

    def __init__(self, copy: Change) -> None:
        self._copy = copy
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, self._copy(x)
        return self._last[1]

    def forget(self, *_: Any) -> None:
        """With the end of the module's forward pass, so that nothing of it is kept."""
        self._last = None


def _through(function: type[torch.autograd.Function], group: Any) -> Change:
    def change(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = function.apply(x, group)
        return found

    return change


class _Copied(torch.autograd.Function):
    """The same; backward, the sum over processes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, of_x: torch.Tensor) -> Any:
        return _sum(of_x, ctx.group), None


class _Reduced(torch.autograd.Function):
    """The sum over processes; backward, the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, of_sum: torch.Tensor) -> Any:
        return of_sum, None


class _Gathered(torch.autograd.Function):
    """The last dimension of all processes; backward, the part of this one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _all(x, group)

    @staticmethod
    def backward(ctx: Any, of_all: torch.Tensor) -> Any:
        return _own(of_all, ctx.group), None


class _Scattered(torch.autograd.Function):
    """The part of this process of the last dimension; backward, those of all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _own(x, group)

    @staticmethod
    def backward(ctx: Any, of_own: torch.Tensor) -> Any:
        return _all(of_own, ctx.group), None


def _sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    found = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=group)
    return found


def _all(x: torch.Tensor, group: Any) -> torch.Tensor:
    own = x.contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, dim=-1)


def _own(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()
