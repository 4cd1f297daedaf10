"""A process of its own, so that the caller's process group, environment and Accelerate stay as they are.

Imports nothing that is slow: the child does.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from finetune.errors import InputError, RunStopped

LAUNCH_VARIABLES = ("ACCELERATE_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")
"""Beginnings of what decides which launch it is; all else the traced launch sets anew."""
PROCESS_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


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
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(question),
            env=environment_of_child(environment),
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


def environment_of_child(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without its launch, and with changes."""
    own = {
        variable: value
        for variable, value in os.environ.items()
        if not variable.startswith(LAUNCH_VARIABLES) and variable not in PROCESS_VARIABLES
    }
    return own | dict(changes)
