"""Copies of trained fp32 weights in 16 bits, with which a model computes.

A pass makes them of all weights as it begins: embeddings, norms and the sums between layers are then in 16 bits, as
under FSDP2, which casts the weights that it gathers. Autocast alone casts for products, and keeps the rest in fp32.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from finetune.compat.torch_private import first_in_backward, tree_leaves, when_backward_ends


def compute_with_copies(model: torch.nn.Module, dtype: torch.dtype) -> Callable[[], AbstractContextManager[None]]:
    """Have a model's forward and its backward pass compute with copies of its trained fp32 weights.

    A copy is an attribute of the module, which is found before its parameter of the same name. The parameter stays
    where it is, and gets the gradient in fp32. The copy goes once it has it, or with the end of the backward pass;
    in a pass without gradients, with its end. Of two passes with gradients, the backward pass of the first comes before
    the second: it would take the second one's copies, too.

    Returns:
        A context for several passes whose backward passes come in any order within it: they share its copies.
    """
    copies, own = _Copies(model), model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if copies.are_shared:
            return own(*args, **kwargs)
        waiting = copies.take()
        copies.make(dtype)
        learns = None
        try:
            found = own(*args, **kwargs)
            learns = next((leaf for leaf in tree_leaves(found) if getattr(leaf, "requires_grad", False)), None)
        finally:
            if learns is None:
                copies.take()
                copies.give({} if torch.is_grad_enabled() else waiting)
        if learns is not None:
            learns.register_hook(lambda gradient: when_backward_ends(copies.end))
        return found

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]  # transformers looks for names in it
    model.forward = forward
    known = weakref.ref(copies)  # hooks are out of the garbage collector's sight: no parameter may be in their reach

    def end_of(parameter: torch.Tensor) -> None:
        if (there := known()) and not there.are_shared:
            there.take(parameter)

    for each in copies.slots:
        each.register_post_accumulate_grad_hook(end_of)

    @contextmanager
    def shared() -> Iterator[None]:
        copies.make(dtype)
        copies.are_shared = True
        try:
            yield
        finally:
            copies.are_shared = False
            copies.take()

    return shared


class _Copies:
    """Where copies are found before parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.are_shared = False
        """By passes that neither make nor take any."""
        self.slots = dict[torch.Tensor, list[tuple[dict[str, Any], str]]]()
        """Of each parameter the attributes of its module, and its name there; of one that is tied, several."""
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and parameter.dtype == torch.float32:
                    self.slots.setdefault(parameter, []).append((vars(module), name))

    def make(self, dtype: torch.dtype) -> None:
        self.give({parameter: first_in_backward(parameter.to(dtype)) for parameter in self.slots})

    def give(self, copies: dict[torch.Tensor, torch.Tensor]) -> None:
        for parameter, copy in copies.items():
            for attributes, name in self.slots[parameter]:
                attributes[name] = copy

    def take(self, *parameters: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
        """Take away the copies of some parameters, or of all; returns those that there were."""
        found = dict[torch.Tensor, torch.Tensor]()
        for parameter in parameters or self.slots:
            for attributes, name in self.slots[parameter]:
                if name in attributes:
                    found[parameter] = attributes.pop(name)
        return found

    def end(self) -> None:
        self.take()
