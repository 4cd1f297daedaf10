"""The cache of prepared rows: filled once however many processes start, complete or absent, and known again."""

import contextlib
import errno
import io
import json
import multiprocessing as mp
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
from filelock import FileLock

from finetune.cache import filled_once
from finetune.cli import commands
from finetune.data import dataset
from finetune.data.encoding import Settings
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
    other = tiny.build_tokenizer(tiny.CHATML.replace("<|im_start|>", "<|im_start|> "))
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


@pytest.mark.parametrize("file", ["rows.arrow", "summary.json", "rejected.jsonl", "checksums.json"])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.99])
def test_flipped_bit_in_the_prepared_rows_is_noticed_before_they_are_trained(tmp_path: Path, file: str, place: float):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 20)
    with path.open("a") as more:
        more.write("no JSON\n")
    read_all = partial(dataset.read_rows, [Source(str(path))], TOKENIZER, Settings(64), skip_bad_rows=True)
    folder = read_all().folder
    content = bytearray((folder / file).read_bytes())
    content[int(place * len(content))] ^= 4
    (folder / file).write_bytes(content)
    with pytest.raises(
        InputError, match=r"the prepared rows are damaged \(.* changed since they were written\); delete"
    ):
        read_all()


def test_files_that_others_put_beside_the_prepared_rows_do_no_harm(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 20)
    folder = read(path).folder
    (folder / ".rejected.jsonl.swp").write_text("an editor's")
    (folder / "folder").mkdir()
    assert len(read(path)) == 20


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


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The cache as `finetune data --cache --json` lists it, by the first of each entry's sources."""
    capsys.readouterr()
    assert commands.main(["data", "--cache", "--json"]) == 0
    return {entry["sources"][0] if entry["sources"] else "": entry for entry in json.loads(capsys.readouterr().out)}


def not_used_for(folder: Path, days: float) -> None:
    then = time.time() - days * 24 * 60 * 60
    os.utime(folder, (then, then))


def test_cache_is_listed_with_rows_sizes_and_sources_and_what_cannot_be_read(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    assert commands.main(["data", "--cache"]) == 0
    assert capsys.readouterr().out == f"{cache} has no prepared rows.\n"
    paths = [tiny.write_conversations(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", 20), ("b", 30))]
    folders = [read(path).folder for path in paths]
    found = listed(capsys)
    assert [found[str(path)]["rows"] for path in paths] == [20, 30]
    for path, folder in zip(paths, folders):
        assert found[str(path)]["folder"] == str(folder)
        assert found[str(path)]["size_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    (folders[0] / "summary.json").write_text("{")
    assert {source: entry["rows"] for source, entry in listed(capsys).items()} == {"": None, str(paths[1]): 30}
    assert commands.main(["data", "--cache"]) == 0
    shown = capsys.readouterr().out
    assert "damaged" in shown
    assert "2 entries" in shown
    assert max(map(len, shown.split("2 entries")[0].splitlines())) <= 80


def test_what_was_not_used_for_some_days_is_removed_and_what_a_run_has_opened_since_stays(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    paths = [tiny.write_conversations(tmp_path / f"{name}.jsonl", 20) for name in "abc"]
    folders = [read(path).folder for path in paths]
    for folder, days in zip(folders, (31, 29, 31)):
        not_used_for(folder, days)
    read(paths[2])
    assert commands.main(["data", "--cache", "--remove-older-than", "30"]) == 0
    assert capsys.readouterr().out.startswith(f"Removed 1 of 3 entries from {cache}, ")
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert len(read(paths[0])) == 20  # prepared again
    assert commands.main(["data", "--cache", "--remove-older-than", "0"]) == 0
    assert listed(capsys) == {}
    read(paths[0])
    assert commands.main(["data", "--cache", "--json", "--remove-older-than", "0"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["removed"], told["kept"], told["problems"]) == (1, 0, [])


def test_other_users_may_wait_for_who_prepares(tmp_path: Path):
    def fill(folder: Path) -> None:
        assert (tmp_path / "rows.lock").stat().st_mode & 0o777 == 0o666
        (folder / "file").touch()

    filled_once(tmp_path / "rows", fill, on_start=lambda: None, on_wait=lambda: None)
    assert (tmp_path / "rows" / "file").exists()


def test_only_what_the_cache_made_is_listed_and_removed_and_what_is_being_prepared_stays(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    folders = [read(tiny.write_conversations(tmp_path / f"{name}.jsonl", 20)).folder for name in "ab"]
    killed = folders[0].with_name(f"{'0' * 32}.a.machine.12.tmp")
    for kept in (cache / "thesis", killed):
        kept.mkdir()
        (kept / "chapter").write_text("words")
    (cache / ("1" * 32)).symlink_to(tmp_path)
    with FileLock(folders[1].with_name(f"{folders[1].name}.lock")):
        assert commands.main(["data", "--cache", "--remove-older-than", "0"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Removed 2 of 3 entries from {cache}, ")
    assert f"{folders[1]} is being prepared, and stays." in shown
    left = {path.name for path in cache.iterdir() if path.is_dir()}
    assert left == {"thesis", "1" * 32, folders[1].name}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cache", "--remove-older-than", "-1"], "must be 0 days or more"),
        (["--remove-older-than", "3"], "add --cache"),
    ],
)
def test_nothing_is_removed_by_flags_that_make_no_sense(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = read(tiny.write_conversations(tmp_path / "rows.jsonl", 20)).folder
    assert commands.main(["data", *flags]) == 2
    assert message in capsys.readouterr().err
    assert folder.exists()
