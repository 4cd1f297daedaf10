"""The probe: real steps of the recipe's own pieces on a GPU, and what they took.

A prediction is held against it (``probed``). The model has random weights. One step is taken first, in which
libraries settle and the optimizer makes its state, and is not measured.

Limits: one GPU, without sharding. ``probe_in_child`` keeps it out of the caller's process; the child is
``python -m finetune.cli.planning.probe`` with a question on its standard input.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from finetune.errors import InputError, RunStopped, refuse_if_any
from finetune.trace.asking import environment_of_child
from finetune.trace.setting import Setting, setting_of
from finetune.units import GIB

if TYPE_CHECKING:
    import torch

STEPS = 2
"""Measured ones."""
PATIENCE_SECONDS = 900.0


@dataclass(frozen=True)
class Probed:
    """A real step."""

    peak_bytes: int | None
    """Of ``torch.cuda.max_memory_allocated``; None without a GPU."""
    step_seconds: float


def probe_in_child(model_config: Mapping[str, Any], setting: Setting) -> Probed:
    """Take steps in another process, on its first GPU; on the CPU where there is none, whose memory is not measured.

    Args:
        model_config: contents of a ``config.json``.

    Raises:
        InputError: if a step ran out of memory.
        RunStopped: if the child failed, or took too long.
    """
    instead = "leave --probe out"
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps({"model": dict(model_config), "setting": asdict(setting)}),
            env=environment_of_child({"ACCELERATE_MIXED_PRECISION": setting.precision}),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunStopped(f"The probe was ended after {PATIENCE_SECONDS:.0f} seconds; {instead}.") from error
    if done.returncode == 2:
        raise InputError(json.loads(done.stdout)["problems"])
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunStopped(f"The probe failed with exit code {done.returncode} ({reason}); {instead}.")
    return Probed(**json.loads(done.stdout))


def probe(model_config: dict[str, Any], setting: Setting) -> Probed:
    """Take the steps in this process, whose state it changes (Accelerate, random numbers).

    Raises:
        InputError: if a step runs out of memory.
    """
    import torch

    try:
        return _measured(*_prepared(model_config, setting), setting)
    except torch.OutOfMemoryError as error:
        held = torch.cuda.max_memory_allocated() / GIB
        raise InputError(
            f"The probe's step with rows of {setting.row_tokens} tokens ran out of memory at {held:.1f} GiB: close "
            "what else uses the GPU, or ask about shorter rows with --row-tokens."
        ) from error


def _prepared(model_config: dict[str, Any], setting: Setting) -> tuple[Any, Any, "torch.optim.Optimizer", int]:
    """Accelerator, model and optimizer, as the recipe makes them, and the size of the vocabulary."""
    import torch

    from finetune import distributed
    from finetune.models import loading as models
    from finetune.optim.rounded_adamw import has_kernel, kernel_problems
    from finetune.trace import building

    models.quiet()
    strategy = distributed.Strategy.from_environment()
    accelerator = building.start(setting, strategy)
    device, dtype = accelerator.device, distributed.compute_dtype(strategy, setting.weights)
    config = models.config_from(model_config)
    weights = sum(each.numel() for each in models.without_weights(config, trust_remote_code=False).parameters())
    drawn_there = setting.bits != 8 and device.type == "cuda"  # LLM.int8 is quantised on its way to the GPU
    if drawn_there and dtype.itemsize * weights > 0.9 * torch.cuda.mem_get_info(device)[0]:
        drawn_there = False
    with device if drawn_there else contextlib.nullcontext():  # the CPU takes about a minute for 8 billion
        model: Any = building.build(config, setting, dtype, real=True, device=str(device))
    kernels = {"fused": distributed.fuses(accelerator), "one_kernel": device.type == "cuda" and has_kernel()}
    refuse_if_any(kernel_problems(device) if kernels["one_kernel"] and setting.weights == "bf16" else [])
    optimizer = building.optimizer_of(model, setting, **kernels)
    prepared, stepped = distributed.prepare(accelerator, strategy, model, optimizer, weights=setting.weights)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of weights that were cast or quantised
    return accelerator, prepared.train(), stepped, config.get_text_config().vocab_size


def _measured(
    accelerator: Any, model: Any, optimizer: "torch.optim.Optimizer", vocabulary: int, setting: Setting
) -> Probed:
    """One step to settle, then those that are measured, as the recipe takes them. Each row is one document."""
    import numpy as np
    import torch

    from finetune.data import batches
    from finetune.data.encoding import Row
    from finetune.training import loss, step

    draw, length = np.random.default_rng(0), setting.row_tokens
    rows = [
        [Row(draw.integers(vocabulary, size=length, dtype=np.int32), [(1, length)], "")]
        for _ in range(setting.micro_batch_size)
    ]
    on_gpu, begun = accelerator.device.type == "cuda", 0.0
    for taken in range(1 + STEPS):
        if taken == 1:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
        for _ in range(setting.accumulation):
            micro_batch = batches.collate(rows, accelerator.device, flat=setting.flat)
            divide_by = setting.accumulation * setting.tokens
            step.backward(accelerator, model, loss.next_token_loss_sum, [micro_batch], divide_by=divide_by)
        step.step_if_finite(accelerator, model, optimizer, 1.0)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / STEPS
    return Probed(torch.cuda.max_memory_allocated() if on_gpu else None, seconds)


def main() -> int:
    """Read a question, answer it."""
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print
        try:
            found = probe(asked["model"], setting_of(asked["setting"]))
            answer, code = asdict(found), 0
        except InputError as error:
            answer, code = {"problems": error.problems}, 2
    json.dump(answer, sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main())
