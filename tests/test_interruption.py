"""Signals while a run trains: noted at once, agreed on later; a second one ends the process, wherever it stands."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import scenarios

from finetune import distributed
from finetune.training import evaluation
from recipes import sft

ALONE = distributed.Strategy("single", 0, 1, 1, "no", True)
STUCK = """
    import ctypes
    from finetune import distributed
    with distributed.Interruption(distributed.Strategy("single", 0, 1, 1, "no", True)) as interruption:
        interruption.take_signals()
        print("ready", flush=True)
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # stuck for ever: as in a collective, Python handles no signal there
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signal_is_noted_from_training_on_and_the_earlier_handler_comes_back(number: signal.Signals):
    before = signal.getsignal(number)
    with distributed.Interruption(ALONE) as interruption:
        assert signal.getsignal(number) == before
        interruption.take_signals()
        assert interruption.agree(interruption.asked) == [0]
        os.kill(os.getpid(), number)
        wait_until(lambda: interruption.asked)
        assert interruption.agree(interruption.asked) == [number]
    assert signal.getsignal(number) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert distributed.name_of(number) == number.name


def test_the_end_of_its_terminal_does_not_end_a_run_that_nohup_started():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with distributed.Interruption(ALONE) as interruption:
            interruption.take_signals()
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: interruption.asked)
            assert interruption.asked == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_of_the_terminal_and_of_the_launcher_are_one():
    with distributed.Interruption(ALONE) as interruption:
        interruption.take_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: interruption.asked)
        os.kill(os.getpid(), signal.SIGTERM)  # ends the process, if it is taken for the second
        time.sleep(0.2)
        assert interruption.asked == signal.SIGTERM


def test_second_interrupt_of_a_notebook_raises_keyboard_interrupt_and_spares_the_process(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("finetune.distributed.interruption.SAME_SECONDS", 0.1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with distributed.Interruption(ALONE) as interruption:
        interruption.take_signals()
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: interruption.asked)
        time.sleep(0.2)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)  # in which the thread would end the process
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_of_a_notebook_before_the_first_step_raises_keyboard_interrupt(
    model_folder: Path, conversations: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*args: Any, **kwargs: Any) -> float:
        signal.raise_signal(signal.SIGINT)
        return 0.0

    monkeypatch.setattr(evaluation, "evaluate", interrupted)  # called first before training
    changes = {"data__eval": str(held_out), "train__steps": 2}
    with pytest.raises(KeyboardInterrupt):
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_second_signal_ends_a_process_that_is_stuck_in_a_collective(tmp_path: Path):
    script = tmp_path / "stuck.py"
    script.write_text(textwrap.dedent(STUCK))
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    time.sleep(2.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM


def test_warning_before_the_end_does_not_make_the_end_a_second_signal():
    with distributed.Interruption(ALONE) as interruption:
        interruption.take_signals()
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
    strategy = distributed.Strategy.from_environment()
    with distributed.Interruption(strategy) as interruption:
        interruption.take_signals()
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
