"""Signs of life between machines: silence is noticed and named, and what a process says before its end is believed."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from finetune.distributed import heartbeat
from finetune.distributed.heartbeat import Heartbeat, Place

PLACES = [Place(("a",), "node1", 11), Place(("a",), "node1", 12), Place(("b",), "node2", 11)]
Start = Callable[[int], Heartbeat]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts the process of a rank: three on two machines, all of them in this process, over a real store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(heartbeat, "store_of_launch", lambda: store)
    monkeypatch.setattr(heartbeat, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    started: list[Heartbeat] = []
    for rank in range(len(PLACES)):
        heartbeat.prepare(rank)

    def started_of(rank: int) -> Heartbeat:
        started.append(Heartbeat(PLACES, rank))
        return started[-1]

    yield started_of
    for each in started:
        each.stop()


def until_heard(listener: Heartbeat, beats: int = 3) -> None:
    """Wait for some beats to be written and read."""
    time.sleep(0.05 * beats)
    assert listener.lost(0.0) is None


def test_a_machine_that_beats_is_not_lost_however_long_the_run(start: Start):
    first, _, other = map(start, range(3))
    for _ in range(5):
        until_heard(first)
        assert first.lost(heartbeat.SILENCE_SECONDS / 2) is None
        until_heard(other)
        assert other.lost(heartbeat.SILENCE_SECONDS / 2) is None


def test_silence_is_told_with_the_machine_and_with_what_was_done_there(start: Start):
    first, other = start(0), start(2)
    other.doing = "step 7"
    until_heard(first)
    other.stop()
    until_heard(first)
    assert first.lost(heartbeat.SILENCE_SECONDS - 1) is None
    assert first.lost(2.0) == (
        "nothing was heard of process 2 on node2 for 300 s, last seen in step 7, at a line outside of finetune: the "
        "machine or the network is lost"
    )


def test_what_a_process_says_before_it_ends_is_passed_on_word_for_word_after_a_while(start: Start):
    first, other = start(0), start(2)
    until_heard(first)
    other.tell_of_death("process 2 on node2 died")
    until_heard(first)
    assert first.lost(heartbeat.GRACE_SECONDS) is None
    assert first.lost(heartbeat.GRACE_SECONDS) == "process 2 on node2 died"


def test_a_death_is_told_rather_than_the_errors_that_come_of_it_and_of_errors_the_first(start: Start):
    first, second, other = map(start, range(3))
    other.tell_of_error("process 2 on node2 ended with an error (out of memory)")
    second.tell_of_error("process 1 on node1 ended with an error (connection closed)")
    until_heard(first)
    assert first._last_words == "process 2 on node2 ended with an error (out of memory)"
    other.tell_of_death("process 2 on node2 died")
    until_heard(first)
    assert first._last_words == "process 2 on node2 died"


def test_the_second_process_of_a_machine_leaves_it_to_the_first_to_judge(start: Start):
    second = start(1)
    assert second.lost(10 * heartbeat.SILENCE_SECONDS) is None


def test_the_end_of_the_store_is_that_of_a_launcher_and_not_yet_the_loss_of_a_machine(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    first = start(0)
    until_heard(first)
    assert not first.is_orphaned

    def gone(*arguments: object) -> bytes:
        raise dist.DistNetworkError("connection reset")

    monkeypatch.setattr(first, "_store", SimpleNamespace(set=gone, get=gone, multi_get=gone))
    time.sleep(0.1)
    assert first.is_orphaned
    assert first.lost(0.0) is None
    assert "process 2 on node2" in str(first.lost(heartbeat.SILENCE_SECONDS + 1))


def test_a_store_that_does_not_answer_is_silence(start: Start, monkeypatch: pytest.MonkeyPatch):
    first = start(0)
    until_heard(first)
    cut = threading.Event()

    def waiting(*arguments: object) -> bytes:
        cut.wait()
        raise dist.DistNetworkError("connection reset")

    monkeypatch.setattr(first, "_store", SimpleNamespace(set=waiting, get=waiting, multi_get=waiting))
    time.sleep(0.05)
    assert first.lost(heartbeat.SILENCE_SECONDS - 1) is None
    assert "the network is lost" in str(first.lost(2.0))
    cut.set()


def test_on_one_machine_nothing_beats():
    before = set(threading.enumerate())  # a thread of the test before may be about to end
    alone = Heartbeat(PLACES[:2], 0)
    assert set(threading.enumerate()) <= before
    assert alone.lost(10 * heartbeat.SILENCE_SECONDS) is None
    alone.tell_of_death("nobody is told")
