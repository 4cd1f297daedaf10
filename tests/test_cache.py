"""The cache of prepared rows: filled once however many processes start, complete or absent, and known again."""

import contextlib
import errno
import io
import multiprocessing as mp
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tiny

from finetune.cache import filled_once
from finetune.data import dataset
from finetune.data.encoding_workers import Settings
from finetune.data.sources import Source, byte_stream, reading
from finetune.errors import InputError

FORK = mp.get_context("fork")
TOKENIZER = tiny.build_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(path: Path, tell: Any = lambda doing, rows: None, **settings: Any) -> Any:
    return dataset.read_rows([Source(str(path))], TOKENIZER, Settings(**({"max_length": 64} | settings)), tell=tell)


def read_and_report(path: Path, answers: Any, begin: Any) -> None:
    begin.wait()
    told: list[str] = []
    rows = read(path, lambda doing, rows: told.append(doing.split()[0]))
    answers.put((rows.fingerprint, len(rows), "Preparing" in told))


@pytest.mark.slow
def test_32_processes_on_a_cold_cache_prepare_once_and_all_get_the_rows(tmp_path: Path, cache: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 2000)
    answers, begin = FORK.Queue(), FORK.Event()
    processes = [FORK.Process(target=read_and_report, args=(path, answers, begin)) for _ in range(32)]
    for process in processes:
        process.start()
    begin.set()
    found = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0] * 32
    assert len({(fingerprint, rows) for fingerprint, rows, _ in found}) == 1
    assert found[0][1] == 2000
    assert sum(prepared for *_, prepared in found) == 1
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 1


def test_process_killed_while_preparing_is_recovered_from_by_the_next_start(tmp_path: Path, cache: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 2000)
    under_way = FORK.Event()

    def dawdle(doing: str, rows: int) -> None:
        if rows > 500:  # some of the file is written
            under_way.set()
            time.sleep(60)

    process = FORK.Process(target=read, args=(path, dawdle))
    process.start()
    assert under_way.wait(timeout=60)
    assert list(cache.glob("*.tmp"))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    told: list[str] = []
    assert len(read(path, lambda doing, rows: told.append(doing))) == 2000
    assert told[0].startswith("Preparing")
    assert not list(cache.glob("*.tmp"))


def test_one_that_waits_takes_over_when_the_one_that_prepares_is_killed(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 600)
    under_way, answers = FORK.Event(), FORK.Queue()

    def dawdle(doing: str, rows: int) -> None:
        under_way.set()
        time.sleep(60)

    def wait(doing: str, rows: int) -> None:
        answers.put(doing.split()[0])

    first = FORK.Process(target=read, args=(path, dawdle))
    first.start()
    assert under_way.wait(timeout=60)
    second = FORK.Process(target=read, args=(path, wait))
    second.start()
    assert answers.get(timeout=60) == "Waiting"
    os.kill(first.pid, signal.SIGKILL)
    assert answers.get(timeout=60) == "Preparing"
    second.join(timeout=60)
    assert second.exitcode == 0
    first.join()


def test_second_start_finds_the_rows_without_preparing(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 20)
    told: list[str] = []
    first = read(path, lambda doing, rows: told.append(doing))
    before = len(told)
    second = read(path, lambda doing, rows: told.append(doing))
    assert before > 0
    assert len(told) == before
    assert [row.tokens.tolist() for row in first] == [row.tokens.tolist() for row in second]


def test_what_could_change_the_rows_prepares_anew(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 20)
    folders = [read(path).folder, read(path, max_length=32).folder, read(path, train_on="last").folder]
    folders += [read(path, format="messages").folder]
    other = tiny.build_tokenizer(tiny.CHATML.replace("<|im_start|>' +", "<|im_start|> ' +"))
    folders.append(dataset.read_rows([Source(str(path))], other, Settings(64)).folder)
    tiny.write_conversations(path, 21)
    folders.append(read(path).folder)
    assert len(set(folders)) == 6


def test_folder_and_a_list_of_its_files_are_different_sources(tmp_path: Path):
    folder = tmp_path / "d"
    folder.mkdir()
    files = [tiny.write_conversations(folder / f"{name}.jsonl", 20) for name in "ab"]
    whole = dataset.load([Source(str(folder))], [], TOKENIZER, Settings(64))[0]
    listed = dataset.load([Source(str(files[0])), Source(str(files[1]), weight=2)], [], TOKENIZER, Settings(64))[0]
    again = dataset.load([Source(str(folder), weight=2)], [], TOKENIZER, Settings(64))[0]
    assert (len(whole), len(listed), len(again)) == (40, 60, 80)


def test_damaged_rows_are_told_with_what_to_do(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 20)
    folder = read(path).folder
    (folder / "rows.arrow").write_bytes(b"")
    with pytest.raises(InputError, match=r"damaged .*delete the folder"):
        read(path)


def test_folder_that_another_machine_filled_meanwhile_is_taken(tmp_path: Path):
    folder = tmp_path / "cache" / "key"

    def fill(work: Path) -> None:
        folder.mkdir()
        (folder / "theirs").touch()

    assert filled_once(folder, fill, on_start=lambda: None, on_wait=lambda: None) == folder
    assert [entry.name for entry in folder.iterdir()] == ["theirs"]
    assert not list(folder.parent.glob("*.tmp"))


def test_disk_that_fails_while_reading_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: Any):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 20)
    original = byte_stream.opened

    @contextlib.contextmanager
    def failing(name: str) -> Any:
        with original(name) as stream:
            yield FailingStream(stream.read())

    class FailingStream(io.BufferedReader):
        def __init__(self, content: bytes) -> None:
            super().__init__(io.BytesIO(content))
            self.lines = 0

        def readline(self, size: Any = -1) -> bytes:
            self.lines += 1
            if self.lines > 5:
                raise OSError(errno.EIO, "Input/output error")
            return super().readline(size)

    monkeypatch.setattr(reading, "opened", failing)
    with pytest.raises(InputError, match="reading failed"):
        read(path)
    monkeypatch.undo()
    monkeypatch.setenv("FINETUNE_DATA_CACHE", str(tmp_path / "cache"))
    assert len(read(path)) == 20


def test_refused_data_are_refused_again_at_once_and_accepted_when_mended(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    tiny.write_conversations(path, 3)
    good = path.read_text()
    path.write_text(good + "{broken\n")
    for _ in range(2):
        with pytest.raises(InputError, match=r"rows\.jsonl:4"):
            read(path)
    path.write_text(good)
    assert len(read(path)) == 3


def test_folder_that_cannot_be_filled_is_left_absent_and_said_so(tmp_path: Path):
    def fail(work: Path) -> None:
        (work / "half").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"No space left on device.*FINETUNE_DATA_CACHE"):
        filled_once(tmp_path / "cache" / "key", fail, on_start=lambda: None, on_wait=lambda: None)
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["key.lock"]


def test_cache_that_cannot_be_written_is_said_so(tmp_path: Path):
    (tmp_path / "cache").touch()  # a file in the folder's place
    with pytest.raises(InputError, match="FINETUNE_DATA_CACHE"):
        filled_once(tmp_path / "cache" / "key", lambda work: None, on_start=lambda: None, on_wait=lambda: None)
