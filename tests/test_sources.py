"""Reading data sources: every file gives its records in order, and nothing of it vanishes uncounted."""

import csv
import errno
import gzip
import io
import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finetune.data.sources import Record, Rejected, Source, byte_stream, identity, problems, read
from finetune.data.sources.byte_stream import numbered_lines
from finetune.data.sources.text_files import TEXT_BLOCK
from finetune.errors import InputError

ROWS = [{"text": "日本 🌲", "n": 1}, {"text": 'a "quoted", cell', "n": 2}, {"text": "", "n": 3}]


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    sink = io.StringIO(newline="")
    writer = csv.DictWriter(sink, ["text", "n"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
FILES = {
    "rows.jsonl": JSONL,
    "rows.ndjson": JSONL,
    "rows.json": json.dumps(ROWS, indent=1).encode(),
    "lines.json": JSONL,
    "array.jsonl": json.dumps(ROWS, indent=1).encode(),
    "array_in_a_line.ndjson": json.dumps(ROWS).encode(),
    "rows.csv": table(ROWS, ","),
    "rows.tsv": table(ROWS, "\t"),
    "rows.parquet": parquet(ROWS),
}
PACKED = {"ROWS.JSONL.GZ": gzip.compress(JSONL)} | {
    name + suffix: pack(content)
    for name, content in FILES.items()
    if name != "rows.parquet"
    for suffix, pack in ((".gz", gzip.compress), (".zst", zstd))
}


def everything(path: Path, content: bytes | None = None) -> list[Record | Rejected]:
    if content is not None:
        path.write_bytes(content)
    return list(read(Source(str(path))))


def values(found: list[Record | Rejected]) -> list[Any]:
    assert all(isinstance(item, Record) for item in found), found
    return [item.value for item in found if isinstance(item, Record)]


def places(found: list[Record | Rejected]) -> list[str]:
    return [("" if isinstance(item, Record) else "!") + item.source.rsplit(":", 1)[1] for item in found]


def rejected(found: list[Record | Rejected]) -> Rejected:
    [item] = [item for item in found if isinstance(item, Rejected)]
    return item


@pytest.mark.parametrize("name", [*FILES, *PACKED])
def test_every_kind_of_file_gives_the_same_records(tmp_path: Path, name: str):
    found = values(everything(tmp_path / name, (FILES | PACKED)[name]))
    if ".csv" in name or ".tsv" in name:  # a table holds strings only
        assert found == [{key: str(item) for key, item in row.items()} for row in ROWS]
    else:
        assert found == ROWS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rows.jsonl", ["1", "2", "3"]),
        ("rows.json", ["2", "6", "10"]),
        ("rows.csv", ["2", "3", "4"]),
        ("rows.parquet", ["row 1", "row 2", "row 3"]),
    ],
)
def test_records_name_file_and_line(tmp_path: Path, name: str, expected: list[str]):
    found = everything(tmp_path / name, FILES[name])
    assert places(found) == expected
    assert all(item.source.startswith(f"{tmp_path / name}:") for item in found)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt"])
def test_byte_order_mark_and_windows_line_ends_are_harmless(tmp_path: Path, name: str):
    plain = FILES.get(name, b"one\ntwo\n").replace(b"\r\n", b"\n")
    windows = b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n")
    expected = values(everything(tmp_path / name, plain))
    assert expected
    assert values(everything(tmp_path / name, windows)) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"messages": [', r"not one JSON object \(Expecting value, column 15"),
        (b'{"a": 1}{"a": 2}', r"not one JSON object \(more text follows it, column 9"),
        (b"[1, 2]", "JSON, but not one JSON object"),
        (b"3", "JSON, but not one JSON object"),
        (b'{"a": "\xff"}', r"not UTF-8 \(byte 8"),
        (b'{"a": "\0"}', "not one JSON object"),
        (b"[" * 100_000, "nested too deeply|not one JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "number with too many digits"),
        (b'{"a": [{"b": 1, "c": 2, "b": 3}]}', "has the key 'b' twice in one object"),
    ],
)
def test_bad_line_is_rejected_with_its_place_and_reason_and_the_rest_is_read(tmp_path: Path, line: bytes, reason: str):
    found = everything(tmp_path / "rows.jsonl", JSONL[:-1] + b"\n\n" + line + b"\r\n" + JSONL)
    assert places(found) == ["1", "2", "3", "!5", "6", "7", "8"]
    item = rejected(found)
    assert re.search(reason, item.reason)
    assert item.raw == line.decode(errors="backslashreplace")


def test_row_of_200_000_characters_is_read(tmp_path: Path):
    rows = [{"text": "a b\n" * 50_000, "n": "1"}]
    assert values(everything(tmp_path / "rows.jsonl", json.dumps(rows[0]).encode())) == rows
    assert values(everything(tmp_path / "rows.csv", table(rows, ","))) == rows


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_unicode_encoding_is_one_rejection_that_says_what_to_do(tmp_path: Path, name: str, encoding: str):
    content = b'{"text": "a"}\n' * 3
    item = rejected(everything(tmp_path / name, content.decode().encode(encoding)))
    assert item.source == f"{tmp_path / name}:1"
    assert "save it as UTF-8" in item.reason


def test_line_above_the_limit_is_a_fault_and_the_next_one_is_read():
    stream = io.BufferedReader(io.BytesIO(b"a\n" + b"x" * 10 + b"\n" + b"b\n" + b"x" * 9))
    found = list(numbered_lines("rows.jsonl", stream, longest=5))
    assert [(number, line) for number, line, fault in found if not fault] == [(1, b"a\n"), (3, b"b\n")]
    assert [number for number, _, fault in found if "longer than" in fault] == [2, 4]


def test_pretty_printed_object_is_one_rejection_that_says_what_to_do(tmp_path: Path):
    item = rejected(everything(tmp_path / "rows.json", json.dumps({"data": ROWS}, indent=2).encode()))
    assert "write an array of objects, or one object per line" in item.reason


@pytest.mark.parametrize(
    ("content", "expected", "reason"),
    [
        (b'[{"a": 1},\n 3,\n{"a": 2}]', ["1", "!2", "3"], "not an object"),
        (b'[{"a": 1},\n{"a": oops},\n{"a": 2}]', ["1", "!2"], "broken JSON, and the rest of the array cannot be read"),
        (b'[{"a": 1}\n{"a": 2}]', ["1", "!2"], "neither a comma nor its end"),
        (b'[{"a": 1},\n{"a": 2}', ["1", "2", "!2"], "neither a comma nor its end"),
        (b'[{"a": 1}]\n\n{"a": 2}', ["1", "!3"], "after the end"),
        (b'[{"a": 1},\n{"a": "\xff"}]', ["!2"], "not UTF-8"),
        (b"[\n" + b"[" * 100_000, ["!2"], "nested too deeply|broken"),
        (b'[{"a": 1},\n{"a": 1, "a": 2},\n{"a": 2}]', ["1", "!2", "3"], "has the key 'a' twice in one object"),
    ],
)
def test_bad_element_of_an_array_is_rejected_with_its_line(
    tmp_path: Path, content: bytes, expected: list[str], reason: str
):
    found = everything(tmp_path / "rows.json", content)
    assert places(found) == expected
    assert any(word in rejected(found).reason for word in reason.split("|"))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n\t\n"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt", "rows.jsonl.gz"])
def test_blank_file_gives_nothing(tmp_path: Path, name: str, content: bytes):
    assert everything(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content) == []


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"a", "the row has 1 fields, but the header names 2"),
        (b"a,1,2", "the row has 3 fields, but the header names 2"),
        (b'"a" b,1', "not CSV"),
        (b"a\rb,1", "not CSV (new-line character seen in unquoted field)"),
        (b"\xff,1", "not UTF-8"),
        (b"a\0,1", "NUL"),
        (b'"\n\xff\n",1', "not UTF-8 (line 5, byte 1); it continues to line 6"),
    ],
)
def test_bad_row_of_a_table_is_rejected_and_the_rest_is_read(tmp_path: Path, row: bytes, reason: str):
    found = everything(tmp_path / "rows.csv", b"text,n\r\nx,1\r\n\r\n" + row + b"\r\n" + b"y,2\r\n")
    assert places(found) == ["2", "!4", str(5 + row.count(b"\n"))]
    assert reason in rejected(found).reason
    assert rejected(found).raw == row.decode(errors="backslashreplace")


def test_quote_that_is_never_closed_is_rejected_with_the_lines_it_swallows(tmp_path: Path):
    found = everything(tmp_path / "rows.csv", b'text,n\nx,1\n"a,1\ny,2\nz,3\n')
    assert places(found) == ["2", "!3"]
    assert "it continues to line 5" in rejected(found).reason


@pytest.mark.parametrize("header", [b"a,a\n", b"a,\n", b"\xff,a\n"])
def test_table_without_usable_header_is_one_rejection(tmp_path: Path, header: bytes):
    found = everything(tmp_path / "rows.csv", header + b"1,2\n3,4\n")
    assert places(found) == ["!1"]
    assert "no usable header" in rejected(found).reason


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"prompt;completion\n1;2\n", "its columns seem to be separated by semicolons; save it with commas"),
        (b"prompt|completion\n1|2\n", "its columns seem to be separated by bars; save it with commas"),
        (b",prompt,completion\n0,1,2\n", "as pandas writes an index; save it with index=False"),
    ],
)
def test_table_of_another_program_is_one_rejection_that_says_what_to_do(tmp_path: Path, header: bytes, reason: str):
    item = rejected(everything(tmp_path / "rows.csv", header))
    assert item.source == f"{tmp_path / 'rows.csv'}:1"
    assert reason in item.reason


def test_blank_row_of_one_column_is_counted_and_a_blank_line_is_not(tmp_path: Path):
    found = everything(tmp_path / "rows.csv", b'text\na\n""\n\n  \nb\n')
    assert values(found) == [{"text": text} for text in ("a", "", "  ", "b")]


@given(
    lines=st.lists(st.text("ab \r日🌲", max_size=12), max_size=40),
    factor=st.sampled_from([1, 1500, 20_000]),
    last_end=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_blocks_of_a_text_are_the_text_and_only_the_first_begins_and_only_the_last_ends(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], factor: int, last_end: bool
):
    text = "\n".join(line * factor for line in lines) + "\n" * last_end
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    found = everything(path, text.encode())
    blocks = values(found)
    assert "".join(block["text"] for block in blocks) == (text.replace("\r\n", "\n") if text.strip() else "")
    records = [item for item in found if isinstance(item, Record)]
    assert [record.ends for record in records] == [False] * (len(blocks) - 1) + [True] * bool(blocks)
    assert [record.begins for record in records] == [True] * bool(blocks) + [False] * (len(blocks) - 1)
    assert all(block["text"].strip() for block in blocks)
    assert all(len(block["text"]) >= TEXT_BLOCK // 2 for block in blocks[:-1])


def test_text_that_is_not_utf8_loses_only_the_bad_line(tmp_path: Path):
    found = everything(tmp_path / "corpus.txt", b"one\n\xfftwo\nthree")
    assert places(found) == ["!2", "1"]
    assert found[1] == Record(f"{tmp_path / 'corpus.txt'}:1", {"text": "one\nthree"})


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt", "rows.json", "lines.json"])
def test_packed_file_cut_short_is_rejected_where_it_ends(tmp_path: Path, name: str, suffix: str):
    noise = [{"text": os.urandom(100).hex(), "n": i} for i in range(3000)]
    content = {
        "rows.json": json.dumps(noise).encode(),
        "rows.csv": table(noise, ","),
    }.get(name) or "".join(json.dumps(row) + "\n" for row in noise).encode()
    packed = (gzip.compress if suffix == ".gz" else zstd)(content)
    found = everything(tmp_path / (name + suffix), packed[: len(packed) * 2 // 3])
    item = rejected(found)
    assert found[-1] == item or name == "rows.txt"
    assert "damaged or truncated" in item.reason
    if name != "rows.json":
        assert len(found) > 3 if name == "rows.txt" else len(found) > 1000
        assert item.source.endswith(f":{len(found) + (name == 'rows.csv')}") or name == "rows.txt"
    assert name != "rows.txt" or not any(isinstance(item, Record) and item.ends for item in found)


def test_bytes_behind_gz_that_are_not_gz_are_rejected(tmp_path: Path):
    assert "damaged" in rejected(everything(tmp_path / "rows.jsonl.gz", JSONL)).reason


@pytest.mark.parametrize("kept", [0, 3, 0.5, 0.9])
def test_broken_parquet_file_is_rejected(tmp_path: Path, kept: float):
    content = FILES["rows.parquet"]
    found = everything(tmp_path / "rows.parquet", content[: int(kept * len(content) if kept < 1 else kept)])
    assert places(found) == ["!row 1"]
    assert "damaged or truncated" in rejected(found).reason


def test_keys_that_arrow_fills_with_nulls_are_absent(tmp_path: Path):
    rows = [{"m": [{"a": 1, "c": {"x": 1}}, {"b": "2", "c": {"y": [None]}}]}, {"n": 3}]
    table = pa.Table.from_pylist(rows, schema=pa.schema([*pa.Table.from_pylist(rows).schema, ("n", pa.int64())]))
    assert table.slice(0, 1).to_pylist() != rows[:1]
    pq.write_table(table, tmp_path / "rows.parquet")
    assert values(everything(tmp_path / "rows.parquet")) == rows


def test_parquet_row_that_python_cannot_hold_is_rejected_alone(tmp_path: Path):
    offsets, data = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 1, 2, 3))), pa.py_buffer(b"a\xffb")
    column = pa.StringArray.from_buffers(3, offsets, data)
    pq.write_table(pa.table({"text": column}), tmp_path / "rows.parquet")
    assert places(everything(tmp_path / "rows.parquet")) == ["row 1", "!row 2", "row 3"]


def test_folder_and_glob_give_data_files_sorted_and_no_hidden_ones(tmp_path: Path):
    for name in ("b.jsonl", "a/z.jsonl", "a/.hidden.jsonl", ".cache/x.jsonl", "a/readme.md", "c.jsonl.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = json.dumps({"name": name}).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    names = ["a/z.jsonl", "b.jsonl", "c.jsonl.gz"]
    assert [value["name"] for value in values(everything(tmp_path))] == names
    assert [value["name"] for value in values(everything(tmp_path / "**"))] == names
    assert [value["name"] for value in values(everything(tmp_path / "*.jsonl"))] == ["b.jsonl"]


def test_linked_folders_are_read_once_and_a_loop_ends(tmp_path: Path):
    for name in ("data/a.jsonl", "elsewhere/b.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps({"name": name}))
    (tmp_path / "data" / "part1").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "part2").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
    assert [value["name"] for value in values(everything(tmp_path / "data"))] == ["data/a.jsonl", "elsewhere/b.jsonl"]


def test_a_folder_that_cannot_be_listed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "secret").mkdir()
    (tmp_path / "a.jsonl").write_text("{}")
    listed = os.scandir

    def scandir(path: str) -> Any:
        if Path(path).name == "secret":
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InputError, match=r"its folder .*secret cannot be read \(Permission denied\)"):
        everything(tmp_path)


def test_elements_of_an_array_have_names_of_their_own(tmp_path: Path):
    (tmp_path / "rows.json").write_text('[{"a": 1}, {"a": 2},\n{"a": 3}, {"a": 4}]')
    found = [record.source.rpartition(":")[2] for record in everything(tmp_path / "rows.json")]
    assert found == ["1", "1 (element 2)", "2", "2 (element 4)"]


def test_file_that_a_glob_finds_on_several_ways_is_read_once(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "rows.jsonl").write_bytes(JSONL)
    assert values(everything(tmp_path / "**" / "**" / "*.jsonl")) == ROWS


@pytest.mark.parametrize(
    "name", ["b.jsonl.bz2", "c.parquet.gz", "D.JSONL.XZ", "e.arrow", "f.csv.zip", "a/g.arrow.gz", "h.jsonl.zstd"]
)
@pytest.mark.parametrize("pattern", ["", "**"])
def test_data_that_cannot_be_read_beside_data_that_can_is_refused_by_name(tmp_path: Path, name: str, pattern: str):
    (tmp_path / "a").mkdir()
    (tmp_path / "rows.jsonl").write_bytes(JSONL)
    (tmp_path / name).write_bytes(b"x")
    source = tmp_path / pattern
    with pytest.raises(InputError, match=f"cannot be read: {re.escape(str(tmp_path / name))}; unpack or convert them"):
        everything(source)
    [problem] = problems([Source(str(source))])
    assert problem.startswith(f"{source}: ")
    assert values(everything(tmp_path / "*.jsonl")) == ROWS


def test_of_much_data_that_cannot_be_read_three_files_are_named_and_the_others_counted(tmp_path: Path):
    for number in range(1005):
        (tmp_path / f"{number:04}.arrow").write_bytes(b"x")
    with pytest.raises(InputError, match=r"/0000\.arrow, \S*/0001\.arrow, \S*/0002\.arrow and 1,002 more; unpack"):
        everything(tmp_path)


@pytest.mark.parametrize(
    ("names", "glob"),
    [
        (["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "README.md"], "data/train*.parquet"),
        (["train.jsonl", "validation.jsonl"], "train*.jsonl"),
        (["Train/a.jsonl.gz", "Train/test.jsonl.gz", "dev/b.jsonl.gz"], "Train/*.jsonl.gz"),
    ],
)
def test_a_folder_with_rows_of_several_splits_is_refused_with_the_glob_of_one(
    tmp_path: Path, names: list[str], glob: str
):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (problem,) = problems([Source(str(tmp_path))])
    assert f"name the files of one split by a glob, such as {tmp_path}/{glob}." in problem
    assert problems([Source(f"{tmp_path}/{glob}")]) == []


@pytest.mark.parametrize("names", [["test.jsonl", "val.jsonl"], ["train/test.jsonl"], ["trained.jsonl", "test.jsonl"]])
def test_a_folder_without_a_split_for_training_is_read_whole(tmp_path: Path, names: list[str]):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert problems([Source(str(tmp_path))]) == []


def test_files_that_hold_no_data_are_ignored_in_a_folder(tmp_path: Path):
    for name in ("README.md", "LICENSE", ".cache.arrow", "code.tar.gz", "all.zip", "rows.jsonl.lock", "rows.jsonl"):
        (tmp_path / name).write_bytes(JSONL)
    (tmp_path / "rows.arrow").mkdir()
    assert values(everything(tmp_path)) == ROWS


@pytest.mark.parametrize("pattern", ["", "*", "\udcff.jsonl"])
def test_name_of_a_file_that_is_not_utf8_is_an_input_error_that_can_be_printed(tmp_path: Path, pattern: str):
    (tmp_path / "\udcff.jsonl").write_bytes(JSONL)
    with pytest.raises(InputError, match=r"\\xff\.jsonl: the name of this file is not UTF-8; rename it") as error:
        everything(tmp_path / pattern)
    str(error.value).encode()


@pytest.mark.parametrize(
    ("place", "what"), [("data", "a folder"), ("data/rows.jsonl", "a file"), ("data/*", "several")]
)
def test_subset_or_split_of_files_is_refused_saying_what_is_there_and_how_to_name_a_split(
    tmp_path: Path, place: str, what: str
):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_bytes(JSONL)
    path = str(tmp_path / place)
    for source in (
        Source(path, split="test"),
        Source(path, split="train"),
        Source(path, subset="main"),
        Source(path, revision="v1"),
    ):
        [problem] = problems([source])
        assert f"for hub datasets, but this is {what}" in problem
        assert f"{tmp_path / 'data'}/data/train-*.parquet" in problem


def test_missing_and_unknown_sources_are_told_before_anything_is_read(tmp_path: Path):
    (tmp_path / "rows.xlsx").write_bytes(b"")
    (tmp_path / "rows.parquet.gz").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    good = tmp_path / "rows.jsonl"
    good.write_bytes(JSONL)
    expected = {
        str(tmp_path / "absent.jsonl"): "no such data file or folder",
        "absent/rows.jsonl": "no such data file or folder",
        "./absent": "no such data file or folder",
        "imdb": "no such data file or folder",
        str(tmp_path / "rows.xlsx"): "known suffixes are .jsonl",
        str(tmp_path / "rows.parquet.gz"): "known suffixes are .jsonl",
        str(tmp_path / "empty"): "contains no data file",
        str(tmp_path / "*.csv"): "no data file matches",
    }
    found = problems([Source(str(good)), Source("owner/name"), *(Source(path) for path in expected)])
    assert len(found) == len(expected)
    for problem, (path, reason) in zip(found, expected.items()):
        assert problem.startswith(f"{path}: ")
        assert reason in problem
        with pytest.raises(InputError, match="data"):
            list(read(Source(path)))


def test_file_that_may_not_be_read_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def closed(path: str, mode: str) -> None:  # nothing is closed to the superuser
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    (tmp_path / "rows.jsonl").write_bytes(JSONL)
    monkeypatch.setattr(byte_stream, "open", closed, raising=False)
    with pytest.raises(InputError, match=r"rows\.jsonl: the file cannot be opened \(Permission denied\)"):
        everything(tmp_path / "rows.jsonl")


def test_identity_changes_with_the_content_of_a_file(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(JSONL)
    before = identity([Source(str(path))])
    assert before == json.loads(json.dumps(identity([Source(str(path), weight=2.0)])))
    os.utime(path, ns=(0, 1))
    touched = identity([Source(str(path))])
    path.write_bytes(JSONL + JSONL)
    assert len({json.dumps(seen) for seen in (before, touched, identity([Source(str(path))]))}) == 3


@pytest.fixture
def with_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finetune.data.sources.hub.refuse_without_access", lambda *_, **__: None)


@pytest.mark.usefixtures("with_access")
def test_hub_dataset_is_read_row_by_row_without_the_keys_that_arrow_fills(monkeypatch: pytest.MonkeyPatch):
    rows = [{"m": [{"a": 1}]}, {"m": [{"b": "x"}]}]
    asked = []

    def load(path: str, subset: str | None, *, split: str, revision: str, streaming: bool) -> datasets.Dataset:
        asked.append((path, subset, split, revision, streaming))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = Source("owner/name", subset="main", split="test", revision="v1.0")
    assert problems([source]) == []
    assert list(read(source)) == [Record(f"owner/name[test]:row {i}", row) for i, row in enumerate(rows, start=1)]
    assert asked == [("owner/name", "main", "test", "v1.0", False)]


@pytest.mark.usefixtures("with_access")
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_sound_and_pictures_are_not_decoded_and_json_is(monkeypatch: pytest.MonkeyPatch, streaming: bool):
    media = {"path": None, "bytes": b"neither sound nor picture"}
    rows = [{"text": "a", "sound": media, "pictures": [media], "calls": '{"x": [1]}'}]
    kinds = {"text": datasets.Value("string"), "sound": datasets.Audio(), "pictures": datasets.List(datasets.Image())}
    features = datasets.Features(kinds | {"calls": datasets.Json()})

    def load(path: str, subset: str | None, **how: Any) -> Any:
        found = datasets.Dataset(pa.Table.from_pylist(rows, schema=features.arrow_schema))
        return found.to_iterable_dataset() if streaming else found

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(read(Source("owner/name"), streaming)) == [
        Record("owner/name[train]:row 1", {"text": "a", "calls": {"x": [1]}})
    ]


@pytest.mark.usefixtures("with_access")
def test_hub_dataset_that_cannot_be_had_is_an_input_error(monkeypatch: pytest.MonkeyPatch):
    def load(*_: Any, **__: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Config name is missing.\nPick one among: ['main', 'other']")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    with pytest.raises(
        InputError, match=r"owner/name: .*\['main', 'other'\].*; check the name, subset, split and revision"
    ):
        list(read(Source("owner/name")))
    with pytest.raises(InputError, match=r"owner/name: .* check the name, subset, split and revision"):
        identity([Source("owner/name")])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt", "rows.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str):
    def peak(rows: int) -> int:
        content = [{"text": f"{i:08d} " * 50, "n": i} for i in range(rows)]
        path = tmp_path / name
        if name == "rows.parquet":
            pq.write_table(pa.Table.from_pylist(content), path, row_group_size=1000)
        elif name == "rows.csv":
            path.write_bytes(table(content, ","))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        source = Source(str(path))
        del content
        before, counted, of_arrow = pa.total_allocated_bytes(), 0, 0
        # tracemalloc does not see what Arrow allocates
        tracemalloc.start()
        for _ in read(source):
            counted, of_arrow = counted + 1, max(of_arrow, pa.total_allocated_bytes() - before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert counted >= rows // 200
        assert of_arrow < 2**22
        return peak

    peak(500)
    assert peak(20_000) < 1.3 * peak(2_000) + 2**18


JSON_SCRAPS = st.sampled_from(
    [b"{", b"}", b"[", b"]", b",", b":", b'"', b'"a"', b"1", b"\n", b"\r\n", b" ", b"\\u", b"\xff", b"\0", b'{"a": 1}']
)
BYTES = st.binary(max_size=200) | st.lists(JSON_SCRAPS, max_size=30).map(b"".join)


@pytest.mark.parametrize(
    "name", ["f.jsonl", "f.json", "f.csv", "f.tsv", "f.txt", "f.parquet", "f.jsonl.gz", "f.csv.zst", "g.jsonl.gz"]
)
@given(content=BYTES)
@example(content=b"\xef\xbb")
@example(content=b"[[" * 50_000)
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_records_and_rejections_that_name_the_file(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
):
    path = tmp_path_factory.getbasetemp() / name
    for item in everything(path, gzip.compress(content) if name == "g.jsonl.gz" else content):
        assert item.source.startswith(f"{path}:")
        if isinstance(item, Record):
            assert isinstance(item.value, dict)
        else:
            assert item.reason
            assert not item.reason.endswith(".")
            item.raw.encode()


@given(place=st.integers(0, 10**6), bits=st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_parquet_file_with_any_byte_changed_gives_records_and_rejections(
    tmp_path_factory: pytest.TempPathFactory, place: int, bits: int
):
    content = bytearray(FILES["rows.parquet"])
    content[place % len(content)] ^= bits
    path = tmp_path_factory.getbasetemp() / "mutated.parquet"
    assert all(item.source.startswith(f"{path}:row ") for item in everything(path, bytes(content)))


@given(lines=st.lists(BYTES.map(lambda line: line.replace(b"\n", b"")) | st.just(b'{"a": 1}'), max_size=20))
@settings(max_examples=200, deadline=None)
def test_every_line_that_is_not_blank_is_a_record_or_a_rejection(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
):
    # The first line is good, so that no beginning of the file looks like another encoding.
    content = b"\n".join([b'{"a": 1}', *lines])
    blank = [line.decode(errors="replace").removeprefix("\ufeff").strip() == "" for line in content.split(b"\n")]
    found = everything(tmp_path_factory.getbasetemp() / "counted.jsonl", content)
    assert places(found) == [p if p in places(found) else f"!{p}" for p in _numbers(blank)]


def _numbers(blank: list[bool]) -> list[str]:
    return [str(number) for number, is_blank in enumerate(blank, start=1) if not is_blank]
