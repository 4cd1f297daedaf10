"""The entry point of a recipe's script: ``run(main, Config)``, which makes exit codes of errors."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from finetune import distributed, start_up
from finetune.config.command_line import parse
from finetune.config.sections import Run
from finetune.errors import InputError, RunInterrupted, RunStopped
from finetune.start_up import is_first_process

Config = TypeVar("Config", bound=Run)
EXIT_CODE_OF_BAD_INPUT = 2
EXIT_CODE_OF_STOPPED_RUN = 1
EXIT_CODE_OF_INTERRUPTED_RUN = 75
"""A temporary failure, as sysexits.h calls it: the same command may be run again."""


def run(main: Callable[[Config], object], config_class: type[Config]) -> None:
    """Entry point of a recipe's script: parse the flags, run ``main``, and make exit codes of its errors.

    2: wrong input. 1: a run that had to stop. 75: a run that was asked to end, and saved. Before training a signal ends
    the process itself, and nothing is saved: 128 + its number to a shell.

    The sentences of an error are printed once however many processes run: the first process prints and
    ends, upon which the launcher ends the others. Where that does not happen, on another machine or because the first
    process came to no error, the next one speaks after a while.
    """
    start_up.end_at_once()
    try:
        main(parse(config_class, sys.argv[1:]))
    except RunInterrupted as ended:  # on all processes at once
        if is_first_process():
            _say(str(ended))
        distributed.leave(EXIT_CODE_OF_INTERRUPTED_RUN)
    except (InputError, RunStopped) as error:
        if not is_first_process():
            time.sleep(30 + int(os.environ.get("LOCAL_RANK", "0")))
        for problem in error.problems if isinstance(error, InputError) else [str(error)]:
            _say(f"error: {problem}")
        distributed.leave(EXIT_CODE_OF_BAD_INPUT if isinstance(error, InputError) else EXIT_CODE_OF_STOPPED_RUN)
    distributed.leave(0)


def _say(line: str) -> None:
    """On standard error, which may be a terminal that was closed, or on a full disk: the exit code tells it too."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)
