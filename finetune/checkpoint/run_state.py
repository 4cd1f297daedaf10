"""Save the state of a run to a checkpoint, and restore it under any strategy."""

from typing import Any

import torch
from accelerate import Accelerator

from finetune import distributed
from finetune.checkpoint.reader import Checkpoint
from finetune.checkpoint.saver import Saver


def save(
    saver: Saver,
    strategy: distributed.Strategy,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run: dict[str, Any],
    progress: dict[str, Any],
    keeps_best: bool = False,
) -> float:
    """Start to write a checkpoint; collective. Returns the seconds that training was blocked.

    Random numbers are functions of seed, step and process, so there is no random state to save.

    Args:
        run: the record in run.yaml, with the configuration.
        progress: where the run stands; its ``step`` names the checkpoint.
        keeps_best: the checkpoint of its ``best`` evaluation stays, whatever its age.
    """
    distributed.make_optimizer_state(model, optimizer)  # there may have been no step yet, or none on some weights
    return saver.save(
        progress["step"],
        distributed.pieces(strategy, model, optimizer),
        contents={"run": run, "progress": progress, "loss_scale": distributed.loss_scale(accelerator, model)},
        own={"optimizer_steps": distributed.optimizer_steps(strategy, model, optimizer)},
        strategy=strategy.name,
        best=progress["best"]["step"] if keeps_best and progress["best"] else None,
    )


def restore(
    checkpoint: Checkpoint,
    strategy: distributed.Strategy,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    weights_only: bool,
) -> None:
    """Restore a prepared model and its optimizer from a checkpoint; collective.

    Args:
        weights_only: keep the optimizer new.

    Raises:
        InputError: if the checkpoint does not contain what this run trains.
    """
    if weights_only:
        restore_weights(checkpoint, strategy, model, optimizer)
    else:
        distributed.make_optimizer_state(model, optimizer)
        checkpoint.fill(distributed.pieces(strategy, model, optimizer))
        distributed.set_optimizer_steps(strategy, model, optimizer, checkpoint.contents["optimizer_steps"])
        distributed.sync_compute_weights(model)
    if checkpoint.contents["loss_scale"] is not None:
        distributed.restore_loss_scale(accelerator, model, checkpoint.contents["loss_scale"])


def restore_weights(
    checkpoint: Checkpoint,
    strategy: distributed.Strategy,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    averages: bool = False,
) -> None:
    """Restore the trained weights of a prepared model, and no state of its optimizer but their averages; collective.

    Args:
        averages: restore them too; both then are those of the checkpoint.

    Raises:
        InputError: if the checkpoint does not contain what this run trains.
    """
    if averages:
        distributed.make_optimizer_state(model, optimizer)
    prefixes = (distributed.WEIGHTS, distributed.AVERAGES) if averages else (distributed.WEIGHTS,)
    pieces = distributed.pieces(strategy, model, optimizer)
    checkpoint.fill(piece for piece in pieces if piece.name.startswith(prefixes))
    distributed.sync_compute_weights(model)
