"""Routers of mixtures of experts, as far as transformers balances their load by a loss."""

import inspect
import sys
from typing import Any

from finetune.compat.transformers_private import recorded_outputs

ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""Of transformers' ``load_balancing_loss_func``, in the modules of all families but those that define another loss."""


def top_k_of(model: Any) -> int | None:
    """Experts that a token chooses, of a model for which transformers has the loss that ``training.router_balance``
    computes; None of others: dense ones, and those that balance their experts otherwise.

    Args:
        model: its weights may be on the meta device.
    """
    function: Any = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    if function is None or list(inspect.signature(function).parameters) != ARGUMENTS:
        return None
    is_known = hasattr(model, "router_aux_loss_coef") and "router_logits" in recorded_outputs(model.base_model)
    return int(model.num_experts_per_tok) if is_known else None


def own_coefficient(model: Any) -> float:
    """Of the loss that transformers would add by the model's config.json: it does where that sets
    ``output_router_logits``."""
    asks = top_k_of(model) is not None and model.config.output_router_logits
    return float(model.router_aux_loss_coef) if asks else 0.0
