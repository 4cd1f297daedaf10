"""Model, adapter and optimizer of a run, as its strategy loads and splits them."""

from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from finetune import distributed
from finetune.config import sections
from finetune.models import adapter as adapters
from finetune.models import (
    adapter_start,
    continued_adapter,
    fp8,
    frequencies,
    fused,
    loading,
    lora_forward,
    new_tokens,
    text_part,
    weights,
)
from finetune.models.recomputation import recompute_activations
from finetune.models.spec import ModelSpec
from finetune.optim import optimizer as optimizers
from finetune.run import opening
from finetune.training.loss import take_losses


def load_model(
    accelerator: Accelerator,
    launch: distributed.Strategy,
    spec: ModelSpec,
    cfg: sections.Run,
    device: torch.device,
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """The model with its adapter, not prepared yet; ZeRO-3 has partitioned its weights already.

    Without an adapter, what rows of text do not reach is frozen.

    Args:
        device: of quantised weights.

    Returns:
        The model; and on the main process what ``adapter_start.start`` tells of the adapter.

    Raises:
        InputError: if the model cannot be loaded.
    """
    adapter, train = cfg.adapter, cfg.train
    dtype = distributed.compute_dtype(launch, train.weights)
    adapted, beginning = adapter.type != "none", dict[str, torch.Tensor]()
    loading_weights = distributed.loading(
        accelerator,
        launch,
        whole=spec.section.random_weights or bool(spec.quantised_bits),
        by_every_process=adapted
        and adapters.wraps_tied_weights(spec.skeleton, adapter, trains_rows=bool(spec.new_tokens)),
    )
    with distributed.long_wait(), loading_weights:  # of slow disks; a collective of training waits ten minutes
        model = loading.load_model(
            spec.section.path,
            spec.stored_config,
            revision=spec.section.revision,
            trust_remote_code=spec.section.trust_remote_code,
            attention=spec.attention,
            dtype=dtype,
            seed=train.seed,
            bits=spec.bits,
            device=device,
            random_weights=spec.section.random_weights,
        )
    frequencies.fix(model, cfg.data.max_length)
    if spec.new_tokens:
        with distributed.whole_weights(part for each in new_tokens.own(model) for part in each.parameters()):
            new_tokens.give_rows(model, spec.new_tokens)
    if adapted:
        adapters.attach(
            model,
            adapter,
            base=spec.section.path,
            revision=spec.section.revision,
            dtype=dtype,
            seed=train.seed,
            token_rows=spec.new_tokens.rows,
        )
        if adapter.from_:
            continued_adapter.load_values(model, adapter)
        with distributed.long_wait():
            beginning = adapter_start.start(
                model,
                adapter,
                files=weights.files(spec.section.path, spec.section.revision) if adapter.init == "loftq" else [],
                device=accelerator.device,
                whole=lambda weight: distributed.whole_weights([weight], writes=True),
                computes=distributed.counts(accelerator, launch, quantised=bool(spec.quantised_bits)),
            )
    else:
        text_part.train_alone(model, spec.skeleton, dtype if train.weights == "bf16" else None)
    if train.recomputes:
        recompute_activations(model, train.recomputed_layers, offloads=train.offloads_activations)
    if spec.section.kernels == "auto":
        fused.fuse(model)
        if adapted:
            lora_forward.write_once(model)
    if spec.section.fp8:
        fp8.multiply_in_fp8(model)
    take_losses(model)
    return model, beginning if accelerator.is_main_process else {}


def build_optimizer(
    accelerator: Accelerator,
    launch: distributed.Strategy,
    model: Any,
    cfg: sections.Run,
) -> torch.optim.Optimizer:
    """The optimizer over the trained parameters of a model that is not prepared yet."""
    train = cfg.train
    return optimizers.build_optimizer(
        model,
        name=train.optimizer,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        weights=train.weights,
        fused=distributed.fuses(accelerator),
        rounding_seed=train.seed * launch.shards + launch.shard,
        one_kernel=opening.steps_in_one_kernel(cfg, launch),
        betas=train.betas,
        decay_embeddings=train.decay_embeddings,
        layer_decay=train.layer_decay,
        lora_plus_ratio=cfg.adapter.lora_plus_ratio,
        ema_decay=train.ema_decay,
    )
