"""Signals: noted at once, agreed on later; a second one ends the process, wherever it stands."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from finetune import strategy as strategies

ALONE = strategies.Strategy("single", 0, 1, 1, "no", True)
STUCK = """
    import ctypes, sys
    from finetune import strategy as strategies
    with strategies.Interruption(strategies.Strategy("single", 0, 1, 1, "no", True)):
        print("ready", flush=True)
        ctypes.PyDLL(None).usleep(0)
        ctypes.CDLL(None).sleep(60)  # as in a collective: Python handles no signal there
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signal_is_noted_and_the_earlier_handler_comes_back(number: signal.Signals):
    before = signal.getsignal(number)
    with strategies.Interruption(ALONE) as interruption:
        assert interruption.agree(interruption.asked) == [0]
        os.kill(os.getpid(), number)
        wait_until(lambda: interruption.asked)
        assert interruption.agree(interruption.asked) == [number]
        os.kill(os.getpid(), number)  # the terminal's and the launcher's are one
        time.sleep(0.2)
    assert signal.getsignal(number) == before
    assert strategies.name_of(number) == number.name


def test_second_signal_ends_a_process_that_is_stuck_in_a_collective(tmp_path: Path):
    script = tmp_path / "stuck.py"
    script.write_text(textwrap.dedent(STUCK))
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(2.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM


def test_warning_before_the_end_does_not_make_the_end_a_second_signal():
    with strategies.Interruption(ALONE) as interruption:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: interruption.asked)
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGTERM)  # ends the process, if it is taken for the second
        time.sleep(0.5)
        assert interruption.asked == signal.SIGUSR1


def test_processes_agree_on_the_signal_of_any(ranks):
    for seen in ranks(2).run(agree_on_a_signal_to_the_last, strategy="ddp"):
        assert seen == {"world_size": 2, "agreed": [signal.SIGUSR1, 3], "gathered": ["0", "1"]}


def agree_on_a_signal_to_the_last() -> dict:
    import torch.distributed as dist
    from accelerate import PartialState

    PartialState(backend="gloo")
    strategy = strategies.asked_for()
    with strategies.Interruption(strategy) as interruption:
        if strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: interruption.asked)
        agreed = interruption.agree(interruption.asked, 3 - strategy.rank)
        gathered = interruption.gather(str(strategy.rank))
    return {"world_size": dist.get_world_size(), "agreed": agreed, "gathered": gathered}


def wait_until(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
