"""Bytes of live tensors in a run of the recipe, counted by every operation, and what a process holds of each kind."""

import gc
import time
import weakref
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finetune import distributed
from finetune.distributed import setup


class LiveBytes(TorchDispatchMode):
    """Counts storages from the first operation that sees them to their end; a mark ends a phase of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self.sizes: dict[int, int] = {}
        self.references: dict[int, Any] = {}
        self.marks: list[tuple[str, int, int]] = []
        """Name of a moment, bytes then, and the most since the moment before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        self.count(tree_leaves((returned, args, kwargs)))
        return returned

    def count(self, objects: list[Any]) -> None:
        for tensor in objects:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.sizes:
                    self.references[key] = weakref.ref(storage, lambda _, key=key: self._end(key))
                self.now += size - self.sizes.get(key, 0)
                self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _end(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
        del self.references[key]

    def mark(self, name: str) -> None:
        time.sleep(0.05)  # threads of gloo let go of what they have sent a moment later
        self.marks.append((name, self.now, self.peak))
        self.peak = self.now


def count_phases(config: Any, zero: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Run the recipe under ZeRO with changes to its settings; returns the marks of its forward and backward passes and
    steps. The optimizer steps in a fused kernel, as on a GPU."""
    from recipes import sft

    ledger = LiveBytes()
    prepare, configure = distributed.prepare, setup._configure_deepspeed

    def configured(accelerator: Any, *args: Any) -> None:
        configure(accelerator, *args)
        accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"].update(zero)

    def marked(function: Any, before: str | None, after: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                ledger.mark(before)
            returned = function(*args, **kwargs)
            ledger.mark(after)
            return returned

        return call

    def prepared(*args: Any, **kwargs: Any) -> Any:
        existing = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
        engine, optimizer = prepare(*args, **kwargs)
        gc.collect()
        mine = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and id(each) not in existing]
        ledger.count([*mine, *engine.parameters()])
        engine.backward = marked(engine.backward, "forward", "backward")
        engine.step = marked(engine.step, None, "step")
        return engine, optimizer

    with (
        mock.patch.object(distributed, "prepare", prepared),
        mock.patch.object(setup, "_configure_deepspeed", configured),
        mock.patch.object(distributed, "fuses", mock.Mock(return_value=True)),
        ledger,
    ):
        sft.main(config)
    return ledger.marks


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
            else:  # with the padding of the buffer that it lies in
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
