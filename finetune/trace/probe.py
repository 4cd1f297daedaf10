"""The probe: real steps of the recipe's own pieces on a GPU, at two lengths of rows, and what they took.

Not a dry run but what a dry run and the closed form are held against: ``planner.calibration`` makes of it a corrected
prediction. The model has random weights, drawn on the GPU where it has room for them in fp32 (not those that become
LLM.int8, which is quantised on its way to the GPU), else on the CPU, which takes about a minute for 8 billion. Of each
length one step is taken first, in which libraries settle and the optimizer makes its state, and is not measured.

Limits: one GPU, without sharding. ``probe_in_child`` keeps it out of the caller's process; the child is
``python -m finetune.trace.probe`` with a question on its standard input.
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import InputError
from finetune.trace.child import answer_of, setting_of
from finetune.trace.setting import Setting
from finetune.units import GIB

if TYPE_CHECKING:
    import torch

STEPS = 2
"""Measured ones, of each length."""
PATIENCE_SECONDS = 900.0


@dataclass(frozen=True)
class Probed:
    """A real step."""

    tokens: int
    """Positions of a micro-batch."""
    peak_bytes: int
    """Of ``torch.cuda.max_memory_allocated``."""
    step_seconds: float


def probe_in_child(
    model_config: Mapping[str, Any], settings: Sequence[Setting], *, patience_seconds: float = PATIENCE_SECONDS
) -> list[Probed]:
    """Take steps in another process, on its first GPU; on the CPU where there is none, whose memory is not measured.

    Args:
        model_config: contents of a ``config.json``.
        settings: alike but for the length of their rows, shortest first.

    Raises:
        InputError: if a step ran out of memory.
        RunStopped: if the child failed, or took too long.
    """
    question = {"model": dict(model_config), "settings": [asdict(each) for each in settings]}
    answer = answer_of(
        "finetune.trace.probe",
        question,
        {"ACCELERATE_MIXED_PRECISION": settings[0].precision},
        name="probe",
        instead="take --trace",
        patience_seconds=patience_seconds,
    )
    return [Probed(**each) for each in answer["probed"]]


def probe(model_config: Mapping[str, Any], settings: Sequence[Setting]) -> list[Probed]:
    """Take the steps in this process, whose state it changes (Accelerate, random numbers).

    Raises:
        InputError: if a step runs out of memory.
    """
    import torch

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(model_config)))
        accelerator, model, optimizer, vocabulary = _prepare(folder, settings[0])
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()  # of weights in fp32
    found = []
    for setting in settings:
        try:
            found.append(_measure(accelerator, model, optimizer, setting, vocabulary))
        except torch.OutOfMemoryError as error:
            held = torch.cuda.max_memory_allocated() / GIB
            raise InputError(
                f"The probe's step with rows of {setting.row_tokens} tokens ran out of memory at {held:.1f} GiB: close "
                "what else uses the GPU, or ask about shorter rows with --row-tokens."
            ) from error
    return found


def _prepare(folder: str, setting: Setting) -> tuple[Any, Any, "torch.optim.Optimizer", int]:
    """As the recipe does it: accelerator, model, optimizer; and the vocabulary."""
    from finetune import distributed
    from finetune.models import attention, quantization
    from finetune.models import loading as models
    from finetune.optim.optimizer import build_optimizer
    from finetune.trace.building import attach

    models.quiet()
    strategy = distributed.Strategy.from_environment()
    accelerator = distributed.start(
        strategy,
        accumulation=setting.accumulation,
        micro_batch_size=setting.micro_batch_size,
        max_grad_norm=1.0,
        optimizer=setting.optimizer,
        weights=setting.weights,
        largest_parameter=lambda: 0,
        offload_folder=Path(folder),
    )
    config = models.load_config(folder, revision=None, trust_remote_code=False)
    skeleton = models.without_weights(config, trust_remote_code=False)
    quantised_bytes = quantization.quantised_bytes(skeleton, setting.bits) if setting.bits else 0
    dtype = distributed.compute_dtype(strategy, setting.weights)
    with _drawing(accelerator.device, sum(p.numel() for p in skeleton.parameters()), setting):
        model = models.load_model(
            folder,
            config,
            revision=None,
            trust_remote_code=False,
            attention=attention.PACKED if setting.packing else "auto",
            dtype=dtype,
            seed=0,
            bits=setting.bits,
            random_weights=True,
            device=distributed.loading_device(accelerator, strategy, quantised_bytes),
        )
    attach(model, setting, dtype)
    if setting.activation_checkpointing:
        models.recompute_activations(model)
    optimizer = build_optimizer(
        model,
        name=setting.optimizer,
        learning_rate=1e-5,
        weight_decay=0.0,
        weights=setting.weights,
        fused=distributed.fuses(accelerator),
        rounding_seed=0,
    )
    prepared, stepped = distributed.prepare(accelerator, strategy, model, optimizer, weights=setting.weights)
    prepared.train()
    return accelerator, prepared, stepped, config.get_text_config().vocab_size


@contextlib.contextmanager
def _drawing(device: "torch.device", weights: int, setting: Setting) -> Iterator[None]:
    """Where random weights are drawn, in fp32."""
    import torch

    if device.type != "cuda" or setting.bits == 8 or 4 * weights > 0.9 * torch.cuda.mem_get_info(device)[0]:
        yield
        return
    with device:
        yield


def _measure(
    accelerator: Any, model: Any, optimizer: "torch.optim.Optimizer", setting: Setting, vocabulary: int
) -> Probed:
    """One step to settle, then those that are measured, as the recipe takes them."""
    import numpy as np
    import torch

    from finetune.data import batches
    from finetune.data.encoding import Row
    from finetune.training import loss, step

    on_gpu = accelerator.device.type == "cuda"
    draw = np.random.default_rng(0)
    length = setting.row_tokens
    rows = [
        [Row(draw.integers(vocabulary, size=length, dtype=np.int32), [(1, length)], "")]
        for _ in range(setting.micro_batch_size)
    ]
    trained_tokens = setting.accumulation * setting.micro_batch_size * (length - 1)
    begun = 0.0
    for taken in range(1 + STEPS):
        if taken == 1:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
        for _ in range(setting.accumulation):
            micro_batch = batches.collate(rows, accelerator.device, packed=setting.packing)
            step.backward(accelerator, model, loss.next_token_loss_sum, micro_batch, divide_by=trained_tokens)
        step.step_if_finite(accelerator, model, optimizer, 1.0)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / STEPS
    return Probed(setting.tokens, torch.cuda.max_memory_allocated() if on_gpu else 0, seconds)


def main() -> int:
    """Read a question, answer it."""
    question = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print
        try:
            found = probe(question["model"], [setting_of(each) for each in question["settings"]])
            answer: dict[str, Any] = {"probed": [asdict(each) for each in found]}
            code = 0
        except InputError as error:
            answer, code = {"problems": error.problems}, 2
    json.dump(answer, sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main())
