"""What the processes of a test run: the real recipe, whole or with one bug put in on purpose."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from finetune import distributed
from finetune.models.recomputation import layers_of

STEPS, PROVEN_STEPS = 10, 20
"""Optimizer steps of a run: conftest sets them for each file, to as many as proofs are recorded with or half."""
ROWS_PER_STEP = 8


def point_id(point: tuple[Any, ...]) -> str:
    """Of a point of a matrix, in the name of a test: ``ddpx2-fp32-adamw``, where a launch is ``("ddp", 2)``."""
    return "-".join("x".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in point)


def configuration(model: Path, train: Path, output: Path, **changes: Any) -> Any:
    """The parity configuration of the recipe; changes are ``section__key=value``."""
    from recipes.sft import Config

    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "random_weights": not list(model.glob("*.safetensors*"))},
        "data": {"train": str(train), "max_length": 64},
        "train": {
            "output_dir": str(output),
            "overwrite": True,
            "steps": STEPS,
            "global_batch_size": ROWS_PER_STEP,
            "learning_rate": 1e-3,
            "warmup_ratio": 0.1,
            "weight_decay": 0.1,
        },
        "log": {"report": False},
    }
    for name, value in changes.items():
        section, key = name.split("__")
        values.setdefault(section, {})[key] = value
    return Config.model_validate(values)


def read_metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def _offload(model: Any) -> str | None:
    """Where a DeepSpeed engine was told to keep the optimizer's state."""
    if not hasattr(model, "zero_offload_optimizer"):
        return None
    target = model.zero_offload_optimizer()
    return str(getattr(target, "device", None) or "none")


def train(config: Any) -> dict[str, Any]:
    """Run the recipe; returns what this rank saw of the strategy, read off the prepared objects."""
    import torch.distributed as dist

    from recipes import sft

    seen: dict[str, Any] = {}
    prepared: list[Any] = []
    prepare = distributed.prepare

    def watched(accelerator: Any, strategy: Any, *args: Any, **kwargs: Any) -> Any:
        model, optimizer = prepare(accelerator, strategy, *args, **kwargs)
        group_size = dist.get_world_size() if dist.is_initialized() else 1
        prepared.append(model)
        sharding = distributed.sharding_of(strategy, model, optimizer)
        parameter = next(model.parameters())
        seen.update(
            world_size=group_size,
            num_processes=accelerator.num_processes,
            model_class=type(model).__name__,
            parameter_class=type(parameter).__name__,
            mesh=_mesh_of(parameter),
            meshes={_mesh_of(each) for each in model.parameters() if not each.is_meta},
            stage=model.zero_optimization_stage() if hasattr(model, "zero_optimization_stage") else None,
            offload=_offload(model),
            share_held=sharding.held_bytes / sharding.total_bytes,
            layers=len(layers_of(model)),
            layers_held=sum(_is_held(each) for each in layers_of(model)),
        )
        return model, optimizer

    distributed.prepare = watched
    try:
        sft.main(config)
    finally:
        distributed.prepare = prepare
    seen["weights_held"] = _digest(prepared[0])
    return seen


def _mesh_of(parameter: Any) -> tuple[int, ...] | None:
    return tuple(parameter.device_mesh.shape) if hasattr(parameter, "device_mesh") else None


def _is_held(layer: Any) -> bool:
    """Whether a process has all of a layer's weights, and not just their names."""
    return all(each.device.type != "meta" for each in layer.parameters())


def _digest(model: Any) -> str:
    """Of the weights that this process holds, bit by bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if held.device.type != "meta":  # of another stage
            digest.update(held.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def linear_is_pytorchs() -> bool:
    return torch.nn.functional.linear is torch._C._nn.linear
