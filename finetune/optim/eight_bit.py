"""Optimizers with 8-bit state, through bitsandbytes.

bitsandbytes quantises state in blocks of 256 elements and knows nothing of sharded tensors. Here it steps on the shard
of this process. A shard's state must equal that of the whole tensor, so every matrix has 8-bit state, however small its
shard (by default, bitsandbytes leaves tensors below 4096 elements in 32 bits), and norms and biases have 32-bit state.
The only difference left is a block that crosses the edge of a shard: there is none if each shard has a multiple of 256
elements.

Example: 512 values, of which element 0 is -1, element 256 is 0.001 and the rest are 0. Blocks of 256 have the scales 1
and 0.001, and 0.001 is stored exactly, as code 255. In one block of 512 the scale would be 1, and 0.001 would come back
as 0.00094. That is why blocks must begin at the same elements in a shard as in the whole.
"""

from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit, Lion8bit

from finetune.optim.rounding import (
    CHUNK_ELEMENTS,
    local_shard,
    number_parameters,
    round_stochastically,
    rounding_noise,
)

BLOCK_ELEMENTS = 256
"""With a scale of their own; chunks of bf16 weights are whole blocks."""


def build_eight_bit_optimizer(
    groups: list[dict[str, Any]],
    *,
    name: str,
    learning_rate: float,
    betas: tuple[float, float],
    rounding_seed: int,
) -> torch.optim.Optimizer:
    """An optimizer of bitsandbytes over groups that say their ``state_bits``.

    Args:
        name: ``adamw_8bit``, ``paged_adamw_8bit`` or ``lion_8bit``.
        rounding_seed: of the stochastic rounding of bf16 weights.
    """
    if name == "lion_8bit":
        optimizer: Any = _Lion(groups, lr=learning_rate, betas=betas, min_8bit_size=0)
    else:
        paged = name.startswith("paged") and torch.cuda.is_available()  # on a CPU there is nothing to page from
        optimizer = _AdamW(groups, lr=learning_rate, betas=betas, min_8bit_size=0, is_paged=paged)
    optimizer.prepare_shards(rounding_seed)
    return optimizer


class OnShards:
    """Mixin for optimizers of bitsandbytes: step on local shards, and round bf16 weights stochastically."""

    param_groups: list[dict[str, Any]]
    state: Any

    def prepare_shards(self, rounding_seed: int) -> None:
        self.shards: dict[torch.Tensor, torch.nn.Parameter] = {}
        self.rounding_seed = rounding_seed
        self.numbers: dict[torch.Tensor, int] = {}

    def step(self, closure: None = None) -> None:
        """Update the shard of every parameter that has a gradient."""
        assert closure is None
        whole = self.param_groups
        number_parameters(self.numbers, whole)
        self.param_groups = [group | {"params": self._shards_of(group["params"])} for group in whole]
        updated = [shard for group in self.param_groups for shard in group["params"]]
        if updated:
            steps = max(self.state[shard].get("step", 0) for shard in updated)
            first = self.numbers[next(p for group in whole for p in group["params"])]
            self.random = rounding_noise(self.rounding_seed, steps + 1, first, updated[0].device)
        try:
            super().step()  # type: ignore[misc]
        finally:
            self.param_groups = whole
            for shard in updated:
                shard.grad = None  # else it would hold the gradient beside the next one

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The state of the shard of a parameter; empty before its first step."""
        return self.state.get(self.shards.get(parameter), {})

    def _shards_of(self, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        shards = []
        for parameter in parameters:
            if parameter.grad is None or local_shard(parameter).numel() == 0:
                continue
            if parameter not in self.shards:  # one object each time, since state is kept by it
                self.shards[parameter] = torch.nn.Parameter(local_shard(parameter).detach())
            shard = self.shards[parameter]
            shard.data, shard.grad = local_shard(parameter).detach(), local_shard(parameter.grad)
            assert shard.is_contiguous()  # of another tensor bitsandbytes would update a copy
            shards.append(shard)
        return shards

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Hyperparameters of one tensor, as bitsandbytes asks for them."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        return config | {"optim_bits": group["state_bits"]}

    def update_step(self, group: dict[str, Any], p: torch.nn.Parameter, gindex: int, pindex: int) -> None:
        """Update one tensor in fp32 arithmetic: bf16 weights in chunks, so that a large one needs little memory."""
        if p.dtype != torch.bfloat16:
            super().update_step(group, p, gindex, pindex)  # type: ignore[misc]
            return
        assert p.grad is not None
        weights, gradients, state = p.data.view(-1), p.grad.reshape(-1), self.state[p]
        for begin in range(0, len(weights), CHUNK_ELEMENTS):
            chunk = slice(begin, begin + CHUNK_ELEMENTS)
            exact = torch.nn.Parameter(weights[chunk].float())
            exact.grad = gradients[chunk].float()
            self.state[exact] = _state_of_chunk(state, chunk)
            super().update_step(group, exact, gindex, pindex)  # type: ignore[misc]
            del self.state[exact]
            weights[chunk] = round_stochastically(exact.data, self.random)
        state["step"] += 1


def _state_of_chunk(state: dict[str, Any], chunk: slice) -> dict[str, Any]:
    """That of some elements of a tensor, which begin with a block; it shares memory with the state of the whole."""
    found = dict(state)
    blocks = slice(chunk.start // BLOCK_ELEMENTS, chunk.stop // BLOCK_ELEMENTS)
    for key in ("state1", "state2", "absmax1", "absmax2"):
        if key in state:
            found[key] = state[key].view(-1)[blocks if key.startswith("absmax") else chunk]
            vars(found[key]).update(vars(state[key]))  # by which bitsandbytes knows paged tensors
    return found


class _AdamW(OnShards, AdamW8bit):  # type: ignore[misc]
    pass


class _Lion(OnShards, Lion8bit):  # type: ignore[misc]
    pass
