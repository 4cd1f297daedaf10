"""A dry run in a process of its own, so that the caller's process group, environment and Accelerate stay as they are.

Imports nothing that is slow: the child does.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from finetune.errors import InputError, RunStopped
from finetune.trace.findings import Trace, trace_of
from finetune.trace.setting import Setting

LAUNCH_VARIABLES = ("ACCELERATE_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")
"""Beginnings of what decides which launch it is; all else the traced launch sets anew."""
PROCESS_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
PATIENCE_SECONDS = 600.0


def trace_in_child(
    model: str | Mapping[str, Any],
    setting: Setting,
    *,
    rank: int = 0,
    kernels: bool = True,
    rounding: int = 512,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Trace:
    """What ``dry_run.dry_run`` finds, from another process; GPUs are hidden from it, and no launch is inherited.

    Args:
        model: folder or hub id of a model, or the contents of its ``config.json``.
        rank: which of the setting's processes is traced.
        kernels: count what kernels of a GPU take inside.
        rounding: bytes to whose multiples the allocator rounds up.
        patience_seconds: after which the child is ended.

    Raises:
        InputError: if the setting cannot be trained, or not traced.
        RunStopped: if the dry run failed, or took too long.
    """
    question = {
        "model": model if isinstance(model, str) else dict(model),
        "setting": asdict(setting),
        "how": {"rank": rank, "kernels": kernels, "rounding": rounding},
    }
    return trace_of(
        answer_of(
            "finetune.trace",
            question,
            {"CUDA_VISIBLE_DEVICES": ""},
            name="dry run",
            instead="use the closed form",
            patience_seconds=patience_seconds,
        )
    )


def answer_of(
    module: str,
    question: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    name: str,
    instead: str,
    patience_seconds: float,
) -> Any:
    """What a module answers to a question on its standard input, run in a process that inherits no launch.

    Args:
        name: of what it does, and ``instead`` what to do where it fails, for the sentences.

    Raises:
        InputError: with the problems that it answers.
        RunStopped: if it failed, or took too long.
    """
    own = {
        variable: value
        for variable, value in os.environ.items()
        if not variable.startswith(LAUNCH_VARIABLES) and variable not in PROCESS_VARIABLES
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(question),
            env=own | dict(environment),
            capture_output=True,
            text=True,
            timeout=patience_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunStopped(f"The {name} was ended after {patience_seconds:.0f} seconds; {instead}.") from error
    if done.returncode == 2:
        raise InputError(json.loads(done.stdout)["problems"])
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunStopped(f"The {name} failed with exit code {done.returncode} ({reason}); {instead}.")
    return json.loads(done.stdout)


def setting_of(fields: Mapping[str, Any]) -> Setting:
    """The setting of a record that was JSON, in which tuples are lists."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Setting(**values)
