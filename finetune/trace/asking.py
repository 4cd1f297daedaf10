"""Who answers a tracer's questions: forks of this process, or a child that imports PyTorch once."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.errors import RunStopped

LAUNCH_VARIABLES = ("ACCELERATE_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")
"""Beginnings of what decides which launch it is; all else the traced launch sets anew."""
PROCESS_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class Child:
    """``python -m finetune.trace``, which ends with its standard input. It takes seconds to start; nobody waits for it
    before it is asked."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # it ends with this object
        self.process = subprocess.Popen(
            [sys.executable, "-m", "finetune.trace"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # bitsandbytes would compile its kernels for the CPU, and import a compiler for a second to do so
            env=environment_of_child({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}),
            text=True,
        )

    def answers(self, question: Mapping[str, Any], several: int) -> Iterator[Any]:
        """So many answers.

        Raises:
            RunStopped: if the child ended before the last of them.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no line to read either
            print(json.dumps(question), file=self.process.stdin, flush=True)
        for _ in range(several):
            line = self.process.stdout.readline()
            if not line:
                code = self.process.wait()
                raise RunStopped(f"The process that traces the model ended with exit code {code}{self._why(code)}.")
            yield json.loads(line)

    def _why(self, code: int) -> str:
        if code == -signal.SIGKILL:
            return ": it may have run out of memory, so free some and try again"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        return f" ({last.rstrip('.')}); see finetune doctor" if last else "; see finetune doctor"

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate()


_waiting: list[Child] = []
"""Started by ``get_ready``, and not asked yet."""


def get_ready() -> None:
    """Start a child for the next tracer, where it will need one: while it starts, a run reads its data."""
    if not _waiting and not can_fork():
        _waiting.append(Child())


def take_child() -> Child:
    """The one that is ready, or another."""
    return _waiting.pop() if _waiting else Child()


def can_fork() -> bool:
    """Whether this process can be forked for each trace: it has imported PyTorch, and CUDA, which does not survive a
    fork, is not here."""
    torch = sys.modules.get("torch")
    return torch is not None and not torch.cuda.is_available()


def environment_of_child(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without its launch, and with changes."""
    own = {
        variable: value
        for variable, value in os.environ.items()
        if not variable.startswith(LAUNCH_VARIABLES) and variable not in PROCESS_VARIABLES
    }
    return own | dict(changes)
