"""Experts of a layer that are spread over the processes of a group: expert parallelism (arXiv:2006.16668).

Each process has some of the experts of each layer, and its own tokens. A token goes to the processes of the experts
that it chose, once for each of them, and what they make of it comes back: two all-to-alls in each layer's forward pass,
and two in its backward pass, which bring the gradients of every process's tokens to the expert. The router, and
whatever else a layer does, stays with the token.

Example: of four experts, process 0 has experts 0 and 1, process 1 has 2 and 3. Process 0 has two tokens, which chose
experts (0, 3) and (1, 2): in the order of the experts it keeps tokens 0 and 1, and sends tokens 1 and 0.
"""

import inspect
import math
from typing import Any

import torch
import torch.distributed as dist

from finetune.models.exchange import Exchanged, Ordered, exchange

ARGUMENTS = ["self", "hidden_states", "top_k_index", "top_k_weights"]
"""Of the forward of transformers' modules of experts."""


def expert_modules(model: torch.nn.Module) -> dict[str, Any]:
    """By their names, the modules whose parameters are those of the experts of a layer, one after another in the first
    dimension, and which are told each token's experts."""
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def experts_of(model: torch.nn.Module) -> int:
    """Experts of each layer; their greatest common divisor where layers differ, and 0 of a model that has none which
    can be spread."""
    return math.gcd(*(module.num_experts for module in expert_modules(model).values()))


def _holds_experts(module: Any) -> bool:
    own = list(module.parameters(recurse=False))
    if not any(each.ndim == 3 for each in own):
        return False
    known = list(inspect.signature(type(module).forward).parameters) == ARGUMENTS
    return known and {each.shape[0] for each in own} == {getattr(module, "num_experts", None)}


def exchange_tokens(module: Any, group: Any) -> None:
    """Have a module of experts take the tokens of all processes of a group.

    Args:
        module: one of ``expert_modules``, with the parameters of this process's experts alone: as many as others have.
    """
    whole, size = module.num_experts, dist.get_world_size(group)
    module.num_experts = own = whole // size
    compute = module.forward

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        tokens, chosen = top_k_index.shape
        expert_S = top_k_index.flatten()  # of each token and each expert that it chose
        order_S = expert_S.argsort(stable=True)
        reverse_S = order_S.argsort()
        received_WE, sent, received = counted(expert_S, own, group)
        copies_SD = hidden_states[:, None].expand(-1, chosen, -1).flatten(0, 1)
        there_MD = Exchanged.apply(Ordered.apply(copies_SD, order_S, reverse_S), group, sent, received)
        expert_M = (
            torch.arange(own, device=expert_S.device)
            .repeat(size)
            .repeat_interleave(received_WE.flatten(), output_size=sum(received))
        )
        made_MD = _made(compute, there_MD, expert_M, top_k_weights.dtype)
        back_SD = Ordered.apply(Exchanged.apply(made_MD, group, received, sent), reverse_S, order_S)
        weighted_NKD = back_SD.view(tokens, chosen, -1) * top_k_weights[..., None]
        return weighted_NKD.sum(1).to(hidden_states.dtype)

    module.forward = forward


def counted(expert_S: torch.Tensor, own: int, group: Any) -> tuple[torch.Tensor, list[int], list[int]]:
    """How many tokens come from each process of a group for each expert of this one; and of all tokens, how many go to
    each process and come from it. Collective over the group."""
    sent_WE = torch.bincount(expert_S, minlength=own * dist.get_world_size(group)).view(-1, own)
    received_WE = exchange(sent_WE, group)
    sent, received = torch.stack([sent_WE.sum(1), received_WE.sum(1)]).tolist()
    return received_WE, sent, received


def _made(compute: Any, tokens_MD: torch.Tensor, expert_M: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What experts make of tokens. Where there is none they get one all the same, so that gradients find their way back
    through them: other processes wait for this one in their exchange."""
    tokens = len(tokens_MD)
    if tokens == 0:
        tokens_MD = torch.cat([tokens_MD, tokens_MD.new_zeros(1, tokens_MD.shape[1])])
        expert_M = expert_M.new_zeros(1)
    weights_M1 = torch.ones(len(expert_M), 1, dtype=dtype, device=tokens_MD.device)
    found: torch.Tensor = compute(tokens_MD, expert_M[:, None], weights_M1)
    return found[:tokens].contiguous()
