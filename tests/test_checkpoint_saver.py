"""Writing checkpoints: complete or absent whatever happens, beside training, and never the end of it."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import savers
import torch
from savers import Gather, even_cuts, share, state

from finetune.checkpoint import Saver, hold, newest, open_checkpoint
from finetune.checkpoint import folder as folders
from finetune.checkpoint.host_copy import AT_ONCE
from finetune.checkpoint.manifest import StoredFile
from finetune.checkpoint.writing import write_file
from finetune.errors import InputError


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))


class Gate:
    """A writer that waits, its file open, until it is let go, or fails then."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self.writers, self.most_writers = 0, 0

    def __call__(self, path: Path, chunks: Iterable[memoryview]) -> StoredFile:
        self.writers += 1
        self.most_writers = max(self.writers, self.most_writers)
        file = write_file(path, self.held(chunks))
        self.writers -= 1
        return file

    def held(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            yield chunk
            self.entered.set()
            self.open.wait()
            if self.error:
                raise self.error


def alone(run: Path, **changes: Any) -> Saver:
    return savers.saver(run, 0, 1, lambda value: [value], **changes)


def save_alone(saver: Saver, step: int) -> float:
    tensors = state(step)
    return saver.save(step, share(tensors, even_cuts(tensors, 1), 0), {}, {}, "single")


def test_training_goes_on_while_a_checkpoint_is_written_and_may_change_the_weights(tmp_path: Path):
    gate, tensors = Gate(), state(1)
    saver = alone(tmp_path, write=gate)
    saver.save(1, share(tensors, even_cuts(tensors, 1), 0), {}, {}, "single")  # would wait for the closed gate for ever
    assert gate.entered.wait(30)
    assert names(tmp_path) == ["step-00000001.tmp"]
    for tensor in tensors.values():
        tensor.zero_()
    gate.open.set()
    saver.finish()
    assert torch.equal(open_checkpoint(tmp_path).tensor("weights/a"), state(1)["weights/a"])


def test_one_checkpoint_is_in_flight_at_a_time(tmp_path: Path):
    gate = Gate()
    saver = alone(tmp_path, write=gate)
    save_alone(saver, 1)
    threading.Timer(0.3, gate.open.set).start()
    save_alone(saver, 2)
    assert gate.open.is_set()
    assert names(tmp_path)[0] == "step-00000001"
    saver.finish()
    assert gate.most_writers == 1
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_older_checkpoints_go_when_newer_ones_are_complete(tmp_path: Path):
    saver = alone(tmp_path, keep=2)
    for step in (100, 20, 110, 9, 120):
        save_alone(saver, step)
    saver.finish()
    assert names(tmp_path) == ["step-00000110", "step-00000120"]
    assert saver.problems() == []


def test_what_was_left_half_made_goes_and_what_is_not_ours_stays(tmp_path: Path):
    kept = {"step-00000003", "notes.tmp", "step-1.tmp"}
    for name in kept | {"step-00000005.tmp", "step-00000004.removed.tmp"}:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints" / "step-00000001").symlink_to(tmp_path / "elsewhere")
    saver = alone(tmp_path, keep=1)
    save_alone(saver, 6)
    saver.finish()
    assert set(names(tmp_path)) == kept | {"step-00000001", "step-00000006"}


def test_what_a_killed_start_left_half_removed_goes_though_no_checkpoint_follows(tmp_path: Path):
    """As after a kill while the last checkpoint of a run removes an older one: the next start has no step to train."""
    savers.save(tmp_path, 6)
    (tmp_path / "checkpoints" / "step-00000004.removed.tmp").mkdir()
    saver = alone(tmp_path)
    saver.close()
    assert names(tmp_path) == ["step-00000006"]
    assert saver.problems() == []


def test_a_checkpoint_of_the_same_step_is_replaced_when_the_new_one_is_complete(tmp_path: Path):
    savers.save(tmp_path, 1)
    gate = Gate()
    saver = alone(tmp_path, write=gate)
    saver.save(1, share(state(9), even_cuts(state(9), 1), 0), {}, {}, "single")
    assert gate.entered.wait(30)
    assert torch.equal(open_checkpoint(tmp_path).tensor("weights/a"), state(1)["weights/a"])
    gate.open.set()
    saver.finish()
    assert torch.equal(open_checkpoint(tmp_path).tensor("weights/a"), state(9)["weights/a"])
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("ended_by", ["finish", "give_up", "save"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_process_leaves_the_earlier_checkpoint_and_the_next_one_works(
    failing: int, ended_by: str, tmp_path: Path
):
    savers.save(tmp_path, 1, world_size=2)
    tensors = state(2)

    def on(rank: int, gather: Gather) -> tuple[bool, list[str]]:
        gate = Gate()
        gate.open.set()
        gate.error = OSError(errno.ENOSPC, "No space left on device") if rank == failing else None
        saver = savers.saver(tmp_path, rank, 2, gather, keep=1, write=gate)
        pieces = share(tensors, even_cuts(tensors, 2), rank)
        saver.save(2, pieces, {}, {}, "ddp")
        deadline = time.monotonic() + 30
        while rank == failing and not saver.failed and time.monotonic() < deadline:
            time.sleep(0.01)
        failed = saver.failed
        gate.error = None
        if ended_by != "save":
            getattr(saver, ended_by)()
            gather(None)  # the first process has removed what there was
            assert names(tmp_path) == ["step-00000001"]
            gather(None)
        problems = saver.problems()
        saver.save(3, pieces, {}, {}, "ddp")
        problems += saver.problems()
        saver.finish()
        assert not saver.failed
        assert saver.problems() == []
        return failed, problems

    results = savers.together(2, on)
    assert [failed for failed, _ in results] == [rank == failing for rank in (0, 1)]
    for _, problems in results:
        assert len(problems) == 1
        assert f"process {failing}: No space left on device" in problems[0]
        assert str(tmp_path / "checkpoints" / "step-00000002") in problems[0]
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.slow
def test_a_checkpoint_is_given_up_without_waiting_for_the_writing(tmp_path: Path):
    begun, chunks_written = threading.Event(), []

    def slowly(path: Path, chunks: Iterable[memoryview]) -> StoredFile:
        for chunk in chunks:
            chunks_written.append(len(chunk))
            begun.set()
            time.sleep(0.1)
        return write_file(path, [])

    large = {"weights/a": torch.zeros(50 * AT_ONCE, dtype=torch.uint8)}
    saver = alone(tmp_path, write=slowly)
    saver.save(1, share(large, even_cuts(large, 1), 0), {}, {}, "single")
    assert begun.wait(30)
    saver.give_up()
    assert len(chunks_written) < 50
    assert names(tmp_path) == []


def test_a_folder_that_is_removed_while_it_is_written_ends_the_checkpoint_alone(tmp_path: Path):
    gate = Gate()
    saver = alone(tmp_path, write=gate)
    save_alone(saver, 1)
    assert gate.entered.wait(30)
    shutil.rmtree(tmp_path / "checkpoints")
    gate.open.set()
    saver.finish()
    assert len(problems := saver.problems()) == 1
    assert "No such file or directory" in problems[0]
    save_alone(saver, 2)
    saver.finish()
    assert names(tmp_path) == ["step-00000002"]


def test_the_first_process_does_not_wait_for_notes_in_a_folder_that_is_gone(tmp_path: Path):
    gate = Gate()

    def on(rank: int, gather: Gather) -> list[str]:
        saver = savers.saver(tmp_path, rank, 2, gather, write=gate if rank else write_file)
        saver.save(1, share(state(1), even_cuts(state(1), 2), rank), {}, {}, "ddp")
        if rank == 0:
            while not list(tmp_path.glob("checkpoints/*/rank-00000.json")):
                time.sleep(0.01)
            assert gate.entered.wait(30)  # a file that appears while its folder is removed would keep it
            shutil.rmtree(tmp_path / "checkpoints")
            gate.open.set()
        saver.finish()
        return saver.problems()

    for problems in savers.together(2, on):
        assert len(problems) == 1
        assert "process 1: No such file or directory" in problems[0]


def test_a_folder_that_cannot_be_made_is_told_on_every_process(tmp_path: Path):
    (tmp_path / "file").write_text("")

    def on(rank: int, gather: Gather) -> list[str]:
        saver = savers.saver(tmp_path / "file" / "run", rank, 2, gather)
        saver.save(1, share(state(1), even_cuts(state(1), 2), rank), {}, {}, "ddp")
        saver.finish()
        return saver.problems()

    for problems in savers.together(2, on):
        assert len(problems) == 1
        assert "process 0: Not a directory" in problems[0]


def test_nothing_is_begun_without_room_on_the_disk(tmp_path: Path):
    savers.save(tmp_path, 1)
    saver = alone(tmp_path, expected_bytes=2**60)
    save_alone(saver, 2)
    assert not saver.failed
    saver.finish()
    assert len(problems := saver.problems()) == 1
    assert "it needs 1073741824.00 GiB" in problems[0]
    assert names(tmp_path) == ["step-00000001"]


def test_a_disk_that_is_really_full_keeps_what_it_holds(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        saver = alone(disk, keep=1)
        large = {"weights/a": torch.ones(500_000)}
        for step in (1, 2):
            saver.save(step, share(large, even_cuts(large, 1), 0), {}, {}, "single")
        saver.finish()
        assert len(problems := saver.problems()) == 1
        assert "No space left on device" in problems[0]
        assert names(disk) == ["step-00000001"]
        found = open_checkpoint(disk)
        assert found.damaged() == []
        save_alone(saver, 3)
        saver.finish()
        assert names(disk) == ["step-00000003"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_the_processes_disagree_about_is_no_checkpoint(tmp_path: Path):
    def on(rank: int, gather: Gather) -> list[str]:
        saver = savers.saver(tmp_path, rank, 2, gather)
        saver.save(1, share(state(1), even_cuts(state(1), 2), rank), {}, {"steps": {"a": rank}}, "ddp")
        saver.finish()
        return saver.problems()

    for problems in savers.together(2, on):
        assert "the processes disagree about contents.steps.a: 0 and 1" in problems[0]
    assert names(tmp_path) == []


def test_two_stretches_of_one_tensor_on_a_process_are_an_error(tmp_path: Path):
    twice = share(state(1), even_cuts(state(1), 2), 0) + share(state(1), even_cuts(state(1), 2), 1)
    with pytest.raises(RuntimeError, match="given twice by one process"):
        alone(tmp_path).save(1, twice, {}, {}, "single")


def test_a_second_run_is_refused_an_output_folder_and_gets_it_when_the_first_has_ended(tmp_path: Path):
    with (
        hold(tmp_path),
        pytest.raises(InputError, match="another run is using"),
        hold(tmp_path, patience_seconds=0),
    ):
        pass
    with hold(tmp_path):
        pass


def test_a_checkpoint_that_a_kill_left_between_two_names_takes_its_place_with_the_next_run(tmp_path: Path):
    complete = savers.save(tmp_path, 5)
    half = tmp_path / "checkpoints" / "step-00000006.tmp"
    shutil.copytree(complete, half)
    (half / "manifest.json").unlink()
    temporary = folders.temporary_of(complete)
    complete.rename(temporary)
    with hold(tmp_path):
        assert names(tmp_path) == ["step-00000005", "step-00000006.tmp"]
    assert open_checkpoint(tmp_path).damaged() == []


KILLED = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import savers
from finetune.checkpoint import hold
from finetune.checkpoint.writing import write_file

def slowly(path, chunks):
    def each():
        for chunk in chunks:
            for at in range(0, len(chunk), 1000):
                time.sleep(0.002)
                yield chunk[at : at + 1000]
    return write_file(path, each())

def on(rank, gather):
    saver = savers.saver(run, rank, 2, gather, keep=1, write=slowly)
    for step in range(2, 10_000):
        tensors = savers.state(step)
        saver.save(step, savers.share(tensors, savers.even_cuts(tensors, 2), rank), {}, {}, "ddp")

for line in sys.stdin:  # a run to be killed
    run = Path(line.strip())
    pid = os.fork()
    if not pid:
        with hold(run):
            print(os.getpid(), flush=True)
            savers.together(2, on)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_instant_has_an_intact_checkpoint_and_leaves_its_folder_free(tmp_path: Path):
    rng, kills, steps = random.Random(0), 12, set()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, "", str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    for kill in range(kills):
        run = tmp_path / f"{kill}"
        savers.save(run, 1, world_size=2)
        process.stdin.write(f"{run}\n")
        process.stdin.flush()
        pid = int(process.stdout.readline())
        with pytest.raises(InputError, match="another run is using"), hold(run, patience_seconds=0):
            pass
        first, deadline = 1 + kill % 4, time.monotonic() + 60
        while folders.in_place(run / "checkpoints")[:1] < [run / "checkpoints" / folders.name_of(first)]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(pid, signal.SIGKILL)
        assert process.stdout.readline() == "ended\n"
        checkpoint, passed_over = newest(run)
        assert checkpoint
        assert passed_over == []
        assert checkpoint.damaged() == []
        assert torch.equal(checkpoint.tensor("weights/a"), state(checkpoint.step)["weights/a"])
        steps.add(checkpoint.step)
        with hold(run):
            saver = alone(run, keep=1)
            save_alone(saver, 10_000)
            saver.finish()
        assert names(run) == ["step-00010000"]
    process.stdin.close()
    assert process.wait(10) == 0
    assert len(steps) >= 4  # the kills fell into different checkpoints


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_on_a_gpu_is_copied_through_pinned_memory_and_may_change_at_once(tmp_path: Path):
    values = torch.arange(50_000_000, dtype=torch.float32, device="cuda")  # more than two blocks
    expected = values.cpu()
    saver = alone(tmp_path)
    saver.save(1, share({"weights/a": values}, {"weights/a": [0, len(values)]}, 0), {}, {}, "single")
    values.zero_()
    saver.finish()
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.tensor("weights/a"), expected)
    checkpoint.fill(share({"weights/a": values}, {"weights/a": [0, len(values)]}, 0))
    assert torch.equal(values.cpu(), expected)
