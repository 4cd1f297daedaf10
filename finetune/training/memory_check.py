"""One forward and backward pass for nothing: what does not fit in memory fails before the first step, not in hours.

It leaves no trace: gradients that DeepSpeed would keep in its buffers are zero, the others are dropped; random states
are restored; no optimizer steps. They are zero even if the loss is not finite, which is for the steps to tell.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator

from finetune.distributed.held_parts import part_of
from finetune.distributed.sharding import engine_of
from finetune.errors import InputError
from finetune.training.loss import LossSum
from finetune.units import GIB


def check_memory(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_sum: LossSum,
    make_micro_batch: Callable[[], Any],
    *,
    optimizer_bytes: int,
    what: str,
    advice: str,
) -> None:
    """Compute the loss of a micro-batch and its gradients, and drop them.

    Args:
        make_micro_batch: puts it on the GPU, which may have no room for it either.
        optimizer_bytes: of state that the optimizer of this process has yet to make: kept occupied meanwhile. DeepSpeed
            makes its own when it prepares.
        what: names the batch, for the error if it does not fit.
        advice: what to change then.

    Raises:
        InputError: if a GPU runs out of memory.
    """
    device, engine = accelerator.device, engine_of(model)
    reserve = optimizer_bytes if device.type == "cuda" and engine is None else 0
    gpus = [device] if device.type == "cuda" else []
    hooks: list[Any] = []
    try:
        with torch.random.fork_rng(gpus):
            occupied = torch.empty(reserve, dtype=torch.uint8, device=device)
            micro_batch = make_micro_batch()
            if part := part_of(model):
                part.try_out(model, loss_sum, micro_batch, accelerator.gradient_accumulation_steps)
            elif engine is None:
                accelerator.backward(loss_sum(model, micro_batch) * 0)
            else:  # not as Accelerate does it, for it would step
                trained = [each for each in model.parameters() if each.requires_grad]
                hooks.extend(each.register_hook(_as_zero) for each in trained)
                engine.set_gradient_accumulation_boundary(is_boundary=False)
                engine.backward(loss_sum(model, micro_batch))
            del occupied
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info() if gpus else (0, 0)
        held = torch.cuda.memory_allocated() / GIB if gpus else 0.0
        raise InputError(
            f"{what} does not fit on the GPU: {held:.1f} of {total / GIB:.1f} GiB were in use when it needed more "
            f"({str(error).splitlines()[0]}), with {free / GIB:.1f} GiB free. {advice}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if engine is None:
        optimizer.zero_grad(set_to_none=True)


def _as_zero(gradient: torch.Tensor) -> torch.Tensor:
    """Without a second one where each element has a place of its own."""
    return gradient.zero_() if gradient.is_contiguous() else torch.zeros_like(gradient)
