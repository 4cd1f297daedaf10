"""The loss scale of fp16 as plain numbers, in one form for PyTorch's and DeepSpeed's scalers."""

from typing import Any

import torch
from accelerate import Accelerator

from finetune.compat.torch_private import GROWTH_TRACKER
from finetune.distributed.sharding import engine_of


def loss_scale(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, float] | None:
    """The state of the loss scaler; None if losses are not scaled.

    ``scale``; ``good_steps`` since it last changed, after enough of which it grows; and under DeepSpeed ``hysteresis``,
    the overflows from here until it shrinks.
    """
    if scaler := _of_engine(model):
        good_steps = (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window
        return {"scale": scaler.cur_scale, "good_steps": good_steps, "hysteresis": scaler.cur_hysteresis}
    if accelerator.scaler is None:
        return None
    state = accelerator.scaler.state_dict()
    return {"scale": state["scale"], "good_steps": state[GROWTH_TRACKER]}


def restore_loss_scale(accelerator: Accelerator, model: torch.nn.Module, state: dict[str, float] | None) -> None:
    """Restore what ``loss_scale`` returned, under any strategy; does nothing if losses are not scaled here or there.

    The two scalers grow after different numbers of steps; one that is due by the other's count grows at its next step.
    """
    if state is None:
        return
    if scaler := _of_engine(model):
        scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = state["scale"], int(state["good_steps"]), -1
        scaler.cur_hysteresis = state.get("hysteresis", scaler.delayed_shift)
    elif accelerator.scaler is not None:
        own = accelerator.scaler.state_dict()
        good_steps = min(int(state["good_steps"]), own["growth_interval"] - 1)
        accelerator.scaler.load_state_dict(own | {"scale": state["scale"], GROWTH_TRACKER: good_steps})


def _of_engine(model: torch.nn.Module) -> Any:
    engine = engine_of(model)
    return engine.optimizer.loss_scaler if engine is not None and engine.fp16_enabled() else None
