"""What a process of a run of the recipe holds of each kind."""

from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from finetune import distributed


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_held(config: Any) -> dict[str, Any]:
    """Run the recipe; returns this process's bytes of parameters, and of gradients and state in the optimizer's step,
    each memory once, with the shapes of all parameters."""
    from recipes import sft

    prepare, seen, gradients, stepped = distributed.prepare, {}, {}, {}

    def before_step(optimizer: Any, *_: Any) -> None:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            gradients[id(parameter)] = local(parameter.grad).nbytes
            stepped[id(parameter)] = (local(parameter).nbytes, optimizer.state[parameter])

    def prepared(*args: Any, **kwargs: Any) -> Any:
        names = [("norm" in name, tuple(getattr(p, "ds_shape", p.shape)), p.requires_grad)
                 for name, p in args[2].named_parameters()]  # fmt: skip
        model, optimizer = prepare(*args, **kwargs)
        held: dict[int, int] = {}
        for parameter in model.parameters():
            if isinstance(parameter, DTensor) or hasattr(parameter, "ds_tensor"):
                share = parameter.to_local() if isinstance(parameter, DTensor) else parameter.ds_tensor
                held |= {share.data_ptr(): share.nbytes} if share.numel() else {}
            elif parameter.device.type != "meta":  # with the padding of the buffer that it lies in
                held[parameter.untyped_storage().data_ptr()] = parameter.untyped_storage().nbytes()
        seen["parameters"] = sum(held.values())
        seen["tensors"] = names
        return model, optimizer

    hook = register_optimizer_step_pre_hook(before_step)
    try:
        with mock.patch.object(distributed, "prepare", prepared):
            sft.main(config)
    finally:
        hook.remove()
    states = [value for _, state in stepped.values() for key, value in state.items() if key != "step"]
    return seen | {
        "gradients": sum(gradients.values()),
        "stepped": sum(size for size, _ in stepped.values()),
        "state": sum(local(value).nbytes for value in states),
    }
