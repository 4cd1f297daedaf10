"""How many bytes of the sharded tensors this process really holds: the proof that they are sharded."""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from finetune.distributed.held_parts import part_of
from finetune.distributed.strategy import Strategy
from finetune.optim.rounding import local_shard
from finetune.units import size_text


@dataclass(frozen=True)
class Sharding:
    """Bytes of the tensors that a strategy splits over the processes."""

    what: str
    """What is split."""
    shards: int
    """Processes over which it is split."""
    total_bytes: int
    """Of the whole."""
    held_bytes: int
    """Of it on this process."""
    constants_bytes: int
    """Quantisation constants of 4-bit weights, which every process holds in full; in a pipeline, of its layers."""
    layers: int | None = None
    """Of a pipeline's stage: ``shards`` is the number of stages then, whose shares are not equal."""
    share_bytes: int | None = None
    """Of the modules of this stage; or of the parts of layers that this process should have, with what is whole."""
    parts: int | None = None
    """Of the layers that this stage has."""
    split: int | None = None
    """Processes over which each layer of this stage is split in turn."""
    cuts: int | None = None
    """Processes over which a stage, or the parts of layers that one process would have, are sharded in turn."""

    def problem(self) -> str | None:
        """A sentence if this process holds more than its share; shards are padded to equal sizes."""
        share = self.total_bytes / self.shards if self.share_bytes is None else self.share_bytes
        room = 1.1 * share + 16384 * self.shards if self.share_bytes is None else share
        if self.held_bytes <= room:
            return None
        each = f"each of {self.shards} processes" if self.layers is None else f"a stage of {self.layers} layers"
        return (
            f"{self.what} take {size_text(self.total_bytes)}, of which {each} should hold "
            f"{size_text(share)}, but this one holds "
            f"{size_text(self.held_bytes)}; nothing was trained. Please report this."
        )

    def describe(self) -> str:
        """One line for the run's output."""
        line = f"{self.what} on this process: {size_text(self.held_bytes)}"
        if self.layers is not None:
            line += f" of {size_text(self.total_bytes)}, {self.layers} layers in a pipeline of {self.shards} stages"
            line += f" of {self.parts} parts" if self.parts != 1 else ""
            line += f", each layer split over {self.split} processes" if self.split else ""
        elif self.share_bytes is not None:
            line += f" of {size_text(self.total_bytes)}, those of a layer split over {self.shards} processes"
        else:
            line += f" of {size_text(self.total_bytes)}, 1/{self.shards}" if self.shards > 1 else ", nothing sharded"
        line += f", in {self.cuts} shards" if self.cuts else ""
        beside = f"; plus {size_text(self.constants_bytes)} of quantisation constants"
        return line + (beside if self.constants_bytes else "")

    def record(self) -> dict[str, Any]:
        """For run.yaml."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def sharding_of(strategy: Strategy, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Sharding:
    """Measure what this process holds of a prepared model and optimizer."""
    parameters: list[Any] = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    cuts = strategy.shards if strategy.shards_parts else None
    if part := part_of(model):
        total, share, held_bytes = part.bytes_of_shares(model)
        known: dict[str, Any] = {"share_bytes": share, "cuts": cuts}
        if pipeline := part.pipeline:
            split = part.size if part.size > 1 else None
            known |= {"layers": pipeline.layers, "parts": len(pipeline.parts), "split": split}
        number = strategy.stages if pipeline else part.size
        return Sharding(part.proven_by, number, total, held_bytes, _constants(model), **known)
    stage = engine.zero_optimization_stage() if (engine := engine_of(model)) else 0
    if stage == 3:
        masters = [m for m in engine.optimizer.fp32_partitioned_groups_flat if m.numel()]  # none, if they lie on disk
        what = "weights and masters" if masters else "weights"
        total = sum(p.ds_numel * p.ds_tensor.element_size() for p in parameters)
        total += sum(p.ds_numel * masters[0].element_size() for p in trained) if masters else 0
        held = [*masters, *_beside(parameters), *(p.ds_tensor for p in parameters)]
        held += [p.data for p in parameters if not p.ds_persist]  # small ones are kept gathered, for speed
    elif stage:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        what, total = "masters", sum(p.numel() * held[0].element_size() for p in trained)
    else:
        what, total = "weights", sum(p.numel() * p.element_size() for p in parameters)
        held = [local_shard(p) for p in parameters]
        held += _beside(parameters) if strategy.shards > 1 else []
    return Sharding(what, strategy.shards, total, _bytes(held), _constants(model))


def reshard(model: torch.nn.Module) -> None:
    """Let FSDP2 free what an evaluation left gathered, rounded to the precision of computation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this process holds of a prepared model between two steps, wherever they lie but on disk.

    Returns:
        ``weights`` that are computed with, and their quantisation constants; ``masters`` beside them, which only
        DeepSpeed keeps; ``optimizer``, its state. On a GPU also ``peak``, the most that PyTorch allocated in the run.
    """
    reshard(model)
    stepped: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    if (engine := engine_of(model)) and engine.zero_optimization_stage() == 3:
        stepped = engine.optimizer.fp32_partitioned_groups_flat
    weights = [local_shard(getattr(p, "ds_tensor", p)) for p in model.parameters()]
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = {
        "weights": _bytes(weights) + _constants(model),
        "masters": _bytes([*weights, *map(local_shard, stepped)]) - _bytes(weights),
        "optimizer": _bytes([local_shard(value) for value in states if isinstance(value, torch.Tensor)]),
    }
    return held | ({"peak": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {})


def engine_of(model: torch.nn.Module) -> Any:
    """The model, if it is a DeepSpeed engine; DeepSpeed is optional, and not imported to ask."""
    deepspeed: Any = sys.modules.get("deepspeed")
    return model if deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine) else None


def _beside(parameters: list[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """Tensors kept as attributes of parameters, where a whole copy of a sharded weight could hide."""
    for parameter in parameters:
        for name, value in vars(parameter).items():
            if isinstance(value, torch.Tensor) and name != "ds_tensor":
                yield value


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of tensors, each memory counted once; those of other stages of a pipeline have none."""
    held = (tensor for tensor in tensors if tensor.numel() and tensor.device.type != "meta")
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


def _constants(model: torch.nn.Module) -> int:
    states = [state for module in model.modules() if (state := getattr(module, "quant_state", None)) is not None]
    return sum(s.absmax.nbytes for s in [*states, *(state.state2 for state in states if state.nested)])
