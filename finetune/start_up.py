"""Before training, a signal or the end of the launcher ends the process immediately: there is nothing to save yet.

The kernel carries out a signal's default action wherever the process stands: in a collective, in C code, in a
destructor. A handler written in Python would wait there, and the KeyboardInterrupt that Python's own handler raises is
dropped in a destructor. A shell sees 128 + the signal's number; 75 would say that the run was saved.

``distributed.interruption`` takes the signals over when training begins. This module imports nothing that takes time,
so that a recipe can call it before its other imports. Limit: a launcher that is killed before the recipe's first line
runs (within about 50 ms of the start of its process) is not noticed.
"""

import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import NoReturn

LOOK_SECONDS = 0.3
EXIT_CODE_OF_A_LOST_RUN = 1


@functools.cache  # once per process, however often it is called
def end_at_once() -> None:
    """Until training begins, let a signal or the end of the launcher end this process at once, and a crash be seen.

    For programs, not for notebooks: Ctrl-C no longer raises KeyboardInterrupt.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()  # a crash in a library's C code says where each thread stood
    if was_launched():
        threading.Thread(target=_watch, args=(os.getppid(),), name="launcher", daemon=True).start()


def heard(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those to which a program answers: all, but for the end of its terminal where nohup has it go on."""
    is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in signals if not (each == signal.SIGHUP and is_detached)]


def was_launched() -> bool:
    """Whether ``accelerate launch`` started this process, which must then not outlive it."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def end(sentence: str, code: int) -> NoReturn:
    """End this process from any thread, with a last line on stderr."""
    try:
        print(sentence, file=sys.stderr, flush=True)
    finally:  # whoever read it may be gone, too
        os._exit(code)


def _watch(launcher: int) -> None:
    while (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):  # then the run takes signals, and watches the launcher itself
        if os.getppid() != launcher:  # it is gone, and another process has adopted this one
            end("error: the launcher has ended, so this process exits before its first step.", EXIT_CODE_OF_A_LOST_RUN)
        time.sleep(LOOK_SECONDS)


def is_first_process() -> bool:
    """Whether this process has rank 0 (or runs alone), known before any process group exists."""
    return int(os.environ.get("RANK", "0")) == 0
