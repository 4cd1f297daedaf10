"""Single rows of a frozen embedding and output head that are trained, as PEFT's ``TrainableTokensLayer`` keeps them.

PEFT copies the whole matrix in each forward pass, to write the rows into it: 1 GiB for 128,256 tokens of a model 4,096
wide in bf16. It also reads the frozen weight outside its module's forward, where ZeRO-3 has not gathered it. Here the
frozen module computes what it always does, and what the rows make takes its place for the tokens that are theirs.

Example: rows 5 and 6 are trained. Of the tokens [1, 6] the embedding is [frozen row 1, trained row 6]; of the scores of
a position all are those of the frozen head, but for the two of tokens 5 and 6.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def compute_apart(model: torch.nn.Module) -> None:
    """For every embedding and output head of which PEFT trains rows that follow one another; others stay PEFT's."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for module in model.modules():
        if isinstance(module, TrainableTokensLayer) and _follow_one_another(module):
            layer: Any = module
            layer.forward = types.MethodType(_forward, layer)
            # what is asked for its weight wants to know its kind, or whether it is tied: Accelerate, to shard it
            layer.get_merged_weights = types.MethodType(_frozen_weight, layer)
            # ZeRO-3 gathers what a module holds while it is called
            layer.trainable_tokens_delta.forward = types.MethodType(_called_with_rows, layer.trainable_tokens_delta)


def _follow_one_another(layer: Any) -> bool:
    """Whether each adapter's rows do, as all that runs train; others may have trained any."""
    every = map(list, layer.token_indices.values())
    return all(rows and rows == list(range(rows[0], rows[0] + len(rows))) for rows in every)


def opened(head: torch.nn.Module) -> tuple[list[torch.nn.Module], Callable[[torch.Tensor], torch.Tensor]] | None:
    """The modules of a head with trained rows, and a function that makes its scores without calling any of them.

    They are to be called one within the other while scores are made: strategies gather there what each of them holds.
    None for another head, and where the adapter is off.
    """
    layer: Any = getattr(head, "token_adapter", None)
    if layer is None or "forward" not in vars(layer) or layer.disable_adapters or layer.merged:
        return None
    (adapter,) = layer.active_adapters
    rows, frozen = layer.trainable_tokens_delta, layer.base_layer
    first, score = layer.token_indices[adapter][0], frozen.forward

    def scores(hidden: torch.Tensor) -> torch.Tensor:
        return _scored(rows[adapter], first, hidden, score(hidden), None)

    return [head, layer, frozen, rows], scores


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    frozen: torch.Tensor = self.base_layer(x, *args, **kwargs)
    if self.disable_adapters or self.merged:
        return frozen
    (adapter,) = self.active_adapters
    function = _embedded if isinstance(self.base_layer, torch.nn.Embedding) else _scored
    scale = getattr(self.base_layer, "embed_scale", None)  # by which Gemma 3 multiplies
    rows, first = self.trainable_tokens_delta, self.token_indices[adapter][0]
    found: torch.Tensor = torch.nn.Module.__call__(rows, adapter, function, first, x, frozen, scale)
    return found


def _frozen_weight(self: Any, _: Any) -> torch.Tensor:
    weight: torch.Tensor = self.base_layer.weight
    return weight


def _called_with_rows(self: Any, adapter: str, function: Any, *args: Any) -> torch.Tensor:
    found: torch.Tensor = function(self[adapter], *args)
    return found


def _embedded(
    rows_RD: torch.Tensor, first: int, tokens_BT: torch.Tensor, frozen_BTD: torch.Tensor, scale: Any
) -> torch.Tensor:
    places_BT = tokens_BT - first
    is_new_BT = (places_BT >= 0) & (places_BT < len(rows_RD))
    own_BTD = F.embedding(places_BT.clamp(0, len(rows_RD) - 1), rows_RD).to(frozen_BTD.dtype)
    if scale is not None:
        own_BTD = own_BTD * torch.as_tensor(scale).to(own_BTD.dtype)
    return torch.where(is_new_BT[..., None], own_BTD, frozen_BTD)


def _scored(
    rows_RD: torch.Tensor, first: int, hidden_ND: torch.Tensor, frozen_NV: torch.Tensor, scale: Any
) -> torch.Tensor:
    own_NR = F.linear(hidden_ND, rows_RD.to(hidden_ND.dtype)).to(frozen_NV.dtype)
    return frozen_NV.slice_scatter(own_NR, dim=-1, start=first, end=first + len(rows_RD))
