"""Optimizers by name, over parameters in fp32 or in bf16."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from finetune.optim.rate_scales import scales_of
from finetune.optim.rounded_adamw import BETAS, EPSILON, StochasticRoundingAdamW
from finetune.optim.rounding import local_shard

LION_BETAS = (0.9, 0.99)
EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit", "lion_8bit")
"""Optimizers whose state is kept in 8 bits, by bitsandbytes."""
MOMENTS = {"adamw": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2, "lion_8bit": 1}
"""Elements of state for each trained weight; that of the other optimizers is negligible."""


def build_optimizer(
    model: torch.nn.Module,
    *,
    name: str,
    learning_rate: float,
    weight_decay: float,
    weights: str,
    fused: bool,
    rounding_seed: int,
    one_kernel: bool = False,
    betas: Sequence[float] | None = None,
    decay_embeddings: bool = True,
    layer_decay: float = 1.0,
    lora_plus_ratio: float = 1.0,
    ema_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """The optimizer of a recipe, over the trained parameters of a model.

    Each of its groups has an ``lr_scale``, by which the recipe multiplies the learning rate of a step.

    Args:
        name: one of the recipe's ``train.optimizer``.
        weight_decay: of matrices; biases, norms, DoRA's magnitudes and other vectors have none.
        weights: ``bf16`` takes optimizers that round stochastically.
        fused: step in one kernel.
        rounding_seed: of the stochastic rounding; the same on all processes that hold the same weights.
        one_kernel: step bf16 weights by a kernel in Triton (``optim.rounded_adamw``).
        betas: None for the defaults of the optimizer.
        decay_embeddings: whether embeddings decay too, and an output head that shares their weights.
        layer_decay, lora_plus_ratio: see ``optim.rate_scales``.
        ema_decay: of averages that a strategy's preparation has the optimizer keep (``optim.averaging``); 0 for none.
    """
    kinds: dict[torch.nn.Parameter, tuple[str, float]] = {}  # tied weights are met twice
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    embeddings = {name: trained[name] for name in _names_of_embeddings(model) if name in trained}
    kept = set() if decay_embeddings else set(embeddings.values())
    ratios = {"layer_decay": layer_decay, "lora_plus_ratio": lora_plus_ratio}
    every = [name for name, _ in model.named_parameters()]
    scales = scales_of(trained, of_model=every, embeddings=embeddings, **ratios)
    scale_of = {trained[name]: each for name, each in scales.items()}
    for module in model.modules():
        is_vector = any(word in type(module).__name__.lower() for word in ("norm", "dora"))  # DoRA's magnitudes
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                is_one = is_vector or key.endswith("bias") or len(getattr(parameter, "ds_shape", parameter.shape)) < 2
                kind = "vector" if is_one else "kept" if parameter in kept else "decayed"
                kinds.setdefault(parameter, (kind, scale_of[parameter]))
    groups: list[dict[str, Any]] = [
        {
            "params": [each for each, its in kinds.items() if its == (kind, scale)],
            "weight_decay": decay,
            "state_bits": bits,
            "lr_scale": scale,
            "ema_decay": ema_decay,
        }
        for kind, decay, bits in (("decayed", weight_decay, 8), ("kept", 0.0, 8), ("vector", 0.0, 32))
        for scale in sorted(set(scale_of.values()), reverse=True)
    ]
    groups = [group for group in groups if group["params"]]
    chosen = (betas[0], betas[1]) if betas else LION_BETAS if name == "lion_8bit" else BETAS
    if name in EIGHT_BIT:
        from finetune.optim.eight_bit import build_eight_bit_optimizer  # bitsandbytes takes seconds to import

        return build_eight_bit_optimizer(
            groups, name=name, learning_rate=learning_rate, betas=chosen, rounding_seed=rounding_seed
        )
    if name == "adafactor":
        from transformers import Adafactor  # imports PEFT and more

        # with the rate as it is given: scaled by a weight's own size, an adapter that starts at zero would stay there
        return Adafactor(groups, lr=learning_rate, scale_parameter=False, relative_step=False)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate)
    if weights == "bf16":
        return StochasticRoundingAdamW(
            groups, lr=learning_rate, betas=chosen, seed=rounding_seed, one_kernel=one_kernel
        )
    return torch.optim.AdamW(groups, lr=learning_rate, betas=chosen, eps=EPSILON, fused=fused or None)


def _names_of_embeddings(model: torch.nn.Module) -> Iterator[str]:
    """Of weights that embed tokens: whole, or rows of a frozen one that are trained."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding):
            yield f"{name}.weight"
        elif isinstance(getattr(module, "base_layer", None), torch.nn.Embedding):
            yield f"{name}.trainable_tokens_delta.default"


def state_bytes(model: torch.nn.Module, name: str, *, averages: bool = False) -> int:
    """Bytes of state on the GPU that an optimizer makes at its first step, for this process's part of the weights.

    The state of paged_adamw_8bit moves to the host when the device is full, but for averages.
    """
    shards = [local_shard(parameter) for parameter in model.parameters() if parameter.requires_grad]
    held = [shard for shard in shards if shard.device.type == "cuda"]  # state lies with its weights
    kept = "sgd" if name.startswith("paged") else name  # without state of its own that stays
    return sum(shard.numel() * state_bytes_of_weight(kept, shard.element_size(), averages=averages) for shard in held)


def state_bytes_of_weight(name: str, weight_bytes: int, *, averages: bool = False) -> int:
    """Bytes of an optimizer's state for a weight of so many bytes; 8-bit state without its scales, 1.6 % more."""
    return MOMENTS.get(name, 0) * (1 if name in EIGHT_BIT else weight_bytes) + (4 if averages else 0)


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """The optimizer's state of a parameter; empty before its first step."""
    if "bitsandbytes" in sys.modules:  # it takes seconds to import
        from finetune.optim.eight_bit import OnShards

        if isinstance(optimizer, OnShards):
            return optimizer.state_of(parameter)
    return optimizer.state.get(parameter, {})
