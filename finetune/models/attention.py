"""Causal attention within each document of a packed row: no document sees another, and no mask is ever built.

``register`` makes it known to transformers under the name ``packed``; a model loaded with
``attn_implementation="packed"`` then takes one flat row of documents, ``input_ids`` of shape (1, T), together with
the bounds that ``batches.document_bounds`` makes. These are the keyword arguments of transformers' flash attention,
so that ``flash_attention_2`` and its successors take the same call. On CUDA torch's own variable-length flash attention
does the work, with grouped key and value heads as they are; elsewhere ``document_attention`` does. What would be
silently wrong is refused in the call, and ``packing_support.problems`` says what can be told before weights are loaded.
Limits: no key-value cache (see ``stock_attention``); one row per call; a 2-D ``attention_mask`` given to the model
changes nothing, because transformers drops it on the way here.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface,
    PreTrainedModel,
)

from finetune.compat.transformers_private import attention_of
from finetune.errors import InputError
from finetune.models import document_attention
from finetune.models.context_attention import Bounds, ContextShare

PACKED = "packed"
"""The name for ``attn_implementation``."""
OTHERWISE = "Rows are padded, and need no packed attention, with model.attention sdpa and data.packing false."
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
"""transformers' own functions that respect document bounds."""

# torch 2.11 groups heads without being told; remove when torch >= 2.12 is required
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
_HARMLESS = {
    "position_ids",
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "logits_to_keep",
}
"""Keyword arguments that models pass on and that change nothing in attention."""


def register() -> None:
    """Make ``attn_implementation="packed"`` known to transformers; again is harmless.

    There is no entry for masks on purpose: for a name without one, transformers builds none.
    """
    AttentionInterface.register(PACKED, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    context_share: ContextShare | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one packed row, in the form in which transformers' models call it.

    Args:
        query: of shape (1, heads, T, head size).
        key: of shape (1, key-value heads, T, head size); ``value`` likewise.
        sliding_window: how many positions a token sees, its own and those before it.
        cu_seq_lens_q: with the other bounds, as ``document_bounds`` gives them.
        context_share: in the place of bounds, where the query has only some positions of the row.

    Returns:
        The outputs, of shape (1, T, heads, head size), and no weights.

    Raises:
        InputError: if the call asks for what this function does not compute.
    """
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    asked = sorted(n for n, v in others.items() if n not in _HARMLESS and v is not None and v is not False)
    whole = _bounds_problem(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if context_share is None and whole:
        problem = whole
    elif attention_mask is not None:
        problem = "with an attention mask, which it does not support"
    elif query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        problem = (
            f"with {query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys; it takes one row without "
            "a cache: pass use_cache=False, and generate under stock_attention(model)"
        )
    elif not causal:
        problem = "by a layer that is not causal"
    elif asked:
        problem = f"with {', '.join(asked)}, which it does not support"
    elif context_share is not None:
        part = partial(_part, scaling=scaling, sliding_window=sliding_window, dropout=dropout)
        return context_share.attend(query, key, value, part), None
    elif query.is_cuda:
        assert cu_seq_lens_q is not None
        assert max_length_q is not None
        return _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window, dropout), None
    else:
        assert cu_seq_lens_q is not None
        on_host = cu_seq_lens_q.tolist()
        if on_host[-1] != query.shape[2]:
            raise InputError(
                f"packed attention was called with bounds up to {on_host[-1]} for a row of {query.shape[2]} tokens; "
                "give document_bounds the lengths of all documents in the row, padding included."
            )
        output = document_attention.each_document(query, key, value, on_host, scaling, sliding_window, dropout)
        return output, None
    raise InputError(f"packed attention was called {problem}. {OTHERWISE}")


def _part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    of_queries: Bounds,
    of_keys: Bounds,
    *,
    scaling: float | None,
    sliding_window: int | None,
    dropout: float,
) -> torch.Tensor:
    """Of some queries, which may see keys before them (``context_attention.Part``)."""
    if query.is_cuda:
        bounds, keys = (of_queries.on_device, of_queries.longest), (of_keys.on_device, of_keys.longest)
        return _varlen(query, key, value, *bounds, scaling, sliding_window, dropout, keys)
    bounds_on_host = of_queries.on_host
    return document_attention.each_document(
        query, key, value, bounds_on_host, scaling, sliding_window, dropout, of_keys.on_host
    )


def _bounds_problem(
    of_queries: torch.Tensor | None, of_keys: torch.Tensor | None, longest_query: int | None, longest_key: int | None
) -> str | None:
    """A clause, where a row comes whole."""
    if of_queries is None or longest_query is None:
        return "without document bounds; pass **document_bounds(lengths, device) to the model"
    if longest_key != longest_query or of_keys is None or of_keys.shape != of_queries.shape:
        return "with different bounds for keys and queries; pass both as document_bounds returns them"
    return None


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
    dropout: float,
    of_keys: tuple[torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """All documents in one flash attention kernel; nothing here waits for the device.

    Args:
        of_keys: their bounds and the longest, where they are not those of the queries.
    """
    if torch.is_autocast_enabled(query.device.type):
        # as autocast does for torch's own attention: rotary embeddings and norms may have left fp32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise InputError(
            f"packed attention was called in {query.dtype} on a GPU, where it only computes in bfloat16 and float16; "
            f"set mixed_precision to bf16. {OTHERWISE}"
        )
    if dropout:
        raise InputError(
            f"packed attention was called with dropout {dropout}, which it cannot apply on a GPU; set the model's "
            f"attention_dropout to 0. {OTHERWISE}"
        )
    # flash attention counts the positions before the token's own; -1 is all of them
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    query_THD, key_THD, value_THD = (each[0].transpose(0, 1) for each in (query, key, value))
    key_bounds, longest_key = of_keys or (bounds, longest)
    known = bounds, key_bounds, longest, longest_key
    output_THD = varlen_attn(query_THD, key_THD, value_THD, *known, scale=scaling, window_size=window, **_GROUPED)
    assert isinstance(output_THD, torch.Tensor)  # a tuple only where auxiliary outputs are asked for
    return output_THD[None]


@contextmanager
def stock_attention(model: torch.nn.Module) -> Iterator[None]:
    """Within it, a model under packed attention uses transformers' ``sdpa``, as ``generate`` with its cache needs.

    Also for a model inside a wrapper (adapters, data parallel); a model under other attention stays as it is.
    """
    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    if attention_of(inner.config) != PACKED:
        yield
        return
    inner.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        inner.set_attn_implementation(PACKED)
