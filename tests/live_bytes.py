"""What a process of a run of the recipe holds of each kind."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from finetune import distributed
from finetune.trace.shallow import Moment

ROUNDING = 512
"""Bytes to whose multiples each block is rounded up in a step."""


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def model_with(folder: Path, **changed: Any) -> dict[str, Any]:
    """Make a folder of a small model whose configuration is changed; returns what its config.json has."""
    file = tiny.build_model_folder(folder, tied=False) / "config.json"
    described: dict[str, Any] = json.loads(file.read_text()) | changed
    file.write_text(json.dumps(described))
    return described


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


def assert_as_planned(planned: Iterable[Moment], everyone: Sequence[dict[str, Any]]) -> None:
    """That processes hold what a plan has in the optimizer's step, but for the rounding of blocks.

    Args:
        planned: moments of a step.
        everyone: of each process, what ``bytes_held`` returned.
    """
    found = max((each for each in planned if each.phase == "step"), key=lambda each: each.bytes).categories
    for real in everyone:
        room = ROUNDING * (len(real["tensors"]) + 2)
        assert found["weights"] == pytest.approx(real["parameters"], abs=room)
        assert found["gradients"] == pytest.approx(real["gradients"], abs=room)
        assert found["optimizer"] == pytest.approx(real["state"], abs=3 * room)
