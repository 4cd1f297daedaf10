"""A checkpoint on disk: read back exactly under any division, and refused by name when it is not what was written."""

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import savers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from savers import Gather, even_cuts, share

from finetune.checkpoint import newest, open_checkpoint
from finetune.checkpoint.host_copy import HostCopy
from finetune.checkpoint.manifest import NAME, OwnStretch, Part, StoredFile, checksum, file_name, merged
from finetune.distributed import Piece
from finetune.errors import InputError

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float16, torch.int64)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of random bits, so that every value there is may occur, and no two tensors are alike."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
tensor_lists = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=5)


def some_cuts(draw: Callable[[Any], Any], tensors: dict[str, torch.Tensor], world_size: int) -> dict[str, list[int]]:
    cuts = {}
    for name, tensor in tensors.items():
        inner = draw(st.lists(st.integers(0, tensor.numel()), min_size=world_size - 1, max_size=world_size - 1))
        cuts[name] = [0, *sorted(inner), tensor.numel()]
    return cuts


@settings(max_examples=40, deadline=None)
@given(data=st.data(), specs=tensor_lists, writers=st.integers(1, 4), readers=st.integers(1, 5))
def test_what_any_number_of_processes_wrote_is_read_exactly_by_any_other_number(
    data: st.DataObject, specs: list[tuple[tuple[int, ...], torch.dtype]], writers: int, readers: int
):
    tensors = {f"weights/{i}": random_tensor(shape, dtype, seed=i) for i, (shape, dtype) in enumerate(specs)}
    written, read = (some_cuts(data.draw, tensors, size) for size in (writers, readers))
    with tempfile.TemporaryDirectory() as run:

        def on(rank: int, gather: Gather) -> list[str]:
            saver = savers.saver(Path(run), rank, writers, gather)
            saver.save(3, share(tensors, written, rank), {"who": "all"}, {"mine": {f"{rank}": rank}}, "fsdp2")
            saver.finish()
            return saver.problems()

        assert savers.together(writers, on) == [[]] * writers
        checkpoint = open_checkpoint(Path(run))
        assert len(checkpoint.manifest.files) == checkpoint.manifest.processes == writers
        assert checkpoint.contents == {"who": "all", "mine": {f"{rank}": rank for rank in range(writers)}}
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        for rank in range(readers):
            checkpoint.fill(share(found, read, rank))
        for name, tensor in tensors.items():
            assert same_bits(found[name], tensor)
            assert same_bits(checkpoint.tensor(name), tensor)


def test_replicas_that_divide_the_writing_give_one_copy(tmp_path: Path):
    whole = torch.arange(10.0)

    def on(rank: int, gather: Gather) -> None:
        saver = savers.saver(tmp_path, rank, 3, gather)
        part = (10 * rank // 3, 10 * (rank + 1) // 3)
        saver.save(1, [Piece("weights/a", (10,), 0, whole, part)], {}, {}, "ddp")
        saver.finish()

    savers.together(3, on)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.manifest.files) == 3
    assert [stretch[1:] for stretch in checkpoint.manifest.tensors["weights/a"].stretches] == [(0, 3), (3, 6), (6, 10)]
    assert torch.equal(checkpoint.tensor("weights/a"), whole)


@settings(max_examples=40, deadline=None)
@given(specs=tensor_lists, block_bytes=st.sampled_from([8, 16, 64]))
def test_a_copy_cut_into_blocks_of_any_size_is_the_file_that_safetensors_reads(
    specs: list[tuple[tuple[int, ...], torch.dtype]], block_bytes: int
):
    tensors = {f"{i}": random_tensor(shape, dtype, seed=i) for i, (shape, dtype) in enumerate(specs)}
    copy = HostCopy(block_bytes)
    for changed in (True, False):  # the second copy goes into the blocks of the first
        copy.take(share({n: t + 1 if changed else t for n, t in tensors.items()}, even_cuts(tensors, 1), 0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        contents = b"".join(copy.chunks())
        path.write_bytes(contents)
        found = load_file(path)
    data = 8 + int.from_bytes(contents[:8], "little")
    for name, entry in json.loads(contents[8:data]).items():  # aligned, for readers that map the file
        assert (data + entry["data_offsets"][0]) % tensors[name].itemsize == 0
    assert {name: tensor.shape for name, tensor in found.items()} == {n: (t.numel(),) for n, t in tensors.items()}
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_larger_than_what_is_read_at_once_is_read_whole(tmp_path: Path):
    large = torch.arange(2**24 + 5, dtype=torch.int32).to(torch.uint8)
    savers.save(tmp_path, 1, {"weights/large": large}, world_size=2)
    found = torch.zeros(2**24 + 2, dtype=torch.uint8)
    open_checkpoint(tmp_path).fill([Piece("weights/large", (2**24 + 5,), 3, found, (0, 0))])
    assert torch.equal(found, large[3:])


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two processes wrote; to be copied before it is changed."""
    return savers.save(tmp_path_factory.mktemp("run"), 7, world_size=2)


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(intact, tmp_path / "checkpoints" / intact.name)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), flip=st.integers(1, 255))
def test_a_changed_byte_anywhere_is_found_and_its_file_named(intact: Path, data: st.DataObject, flip: int):
    with tempfile.TemporaryDirectory() as folder:
        changed = shutil.copytree(intact, Path(folder) / intact.name)
        path = changed / data.draw(st.sampled_from(sorted(os.listdir(intact))))
        contents = bytearray(path.read_bytes())
        contents[data.draw(st.integers(0, len(contents) - 1))] ^= flip
        path.write_bytes(contents)
        try:
            problems = open_checkpoint(changed).damaged()
        except InputError as error:
            problems = error.problems
        assert len(problems) == 1
        assert str(path) in problems[0]


def test_every_file_is_looked_at_by_exactly_one_process(copy: Path):
    for path in copy.glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    checkpoint = open_checkpoint(copy)
    for world_size in (1, 2, 3):
        found = [problem for rank in range(world_size) for problem in checkpoint.damaged(rank, world_size)]
        assert len(found) == 2
        assert len(set(found)) == 2


def test_what_is_cut_short_or_gone_is_passed_over_and_named(copy: Path):
    run = copy.parent.parent
    path = copy / file_name(1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    found, passed_over = newest(run)
    assert found is None
    assert len(passed_over) == 1
    assert f"{path.name} has {len(whole) - 1:,} bytes instead of {len(whole):,}" in passed_over[0]
    path.unlink()
    assert f"{path.name} is missing" in newest(run)[1][0]
    (copy / NAME).unlink()
    assert "manifest.json is missing" in newest(run)[1][0]
    earlier = savers.save(run, 6)
    found, passed_over = newest(run)
    assert found
    assert found.path == earlier
    assert len(passed_over) == 1


def edit(change: Callable[[dict[str, Any]], None], *, signed: bool) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / NAME).read_text())
        del manifest["checksum"]
        before = checksum(manifest)
        change(manifest)
        (folder / NAME).write_text(json.dumps({**manifest, "checksum": checksum(manifest) if signed else before}))

    return apply


def rename_file(to: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][to] = manifest["files"].pop(file_name(0, 2))
        for tensor in manifest["tensors"].values():
            tensor["stretches"][0][0] = to

    return change


def shift(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["weights/a"]["stretches"][0][2] -= 1


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "edited by hand": (edit(lambda m: m.update(step=8), signed=False), "was changed after it was written"),
    "another format": (edit(lambda m: m.update(format=2), signed=True), "format 2, but this version of finetune reads"),
    "a file outside": (
        edit(rename_file("../rank-00000-of-00002.safetensors"), signed=True),
        "is not a checkpoint manifest",
    ),
    "an absolute path": (
        edit(rename_file("/etc/rank-00000-of-00002.safetensors"), signed=True),
        "is not a checkpoint manifest",
    ),
    "a line break in a name": (edit(rename_file(file_name(0, 2) + "\n"), signed=True), "is not a checkpoint manifest"),
    "a pickle in place": (edit(rename_file("rank-00000-of-00002.pt"), signed=True), "is not a checkpoint manifest"),
    "a gap": (edit(shift, signed=True), "does not place each element of weights/a exactly once"),
    "a file of a process is not named": (edit(lambda m: m.update(processes=3), signed=True), "2 files for 3 processes"),
    "an unknown key": (edit(lambda m: m.update(run="rm"), signed=True), "is not a checkpoint manifest"),
    "no dictionary": (lambda folder: (folder / NAME).write_text("[1]") and None, "is not a checkpoint manifest"),
    "no JSON": (lambda folder: (folder / NAME).write_text("{") and None, "cannot be read"),
    "not UTF-8": (lambda folder: (folder / NAME).write_bytes(b'{"a": "\xff"}') and None, "cannot be read"),
    "a deep nest": (lambda folder: (folder / NAME).write_text("[" * 200_000) and None, "cannot be read"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_was_changed_is_refused_by_name(name: str, copy: Path):
    change, reason = CHANGES[name]
    change(copy)
    with pytest.raises(InputError) as refusal:
        open_checkpoint(copy)
    assert reason in str(refusal.value)
    assert str(copy / NAME) in str(refusal.value)


@pytest.mark.parametrize("name", [file_name(0, 2), NAME])
def test_a_link_in_place_of_a_file_is_not_followed(name: str, copy: Path, tmp_path: Path):
    (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=f"{name} is missing"):
        open_checkpoint(copy)


@pytest.mark.parametrize("name", ["step-7", "step-000000007", "step-00000007.old", "step-٠٠٠٠٠٠٠٧"])
def test_a_folder_of_another_name_is_no_checkpoint(name: str, copy: Path):
    run = copy.parent.parent
    copy.rename(copy.with_name(name))
    assert newest(run) == (None, [])
    copy.symlink_to(copy.with_name(name))
    assert newest(run) == (None, [])


def test_a_file_with_other_tensors_than_its_manifest_says_is_refused(copy: Path, tmp_path: Path):
    other = savers.save(
        tmp_path / "other", 7, {"weights/b": torch.zeros(40, 10), "optimizer/exp_avg/b": torch.zeros(400)}, 2
    )
    shutil.copy(other / file_name(0, 2), copy / file_name(0, 2))
    assert (copy / file_name(0, 2)).stat().st_size == json.loads((copy / NAME).read_text())["files"][file_name(0, 2)][
        "bytes"
    ]
    with pytest.raises(InputError, match=file_name(0, 2)):
        open_checkpoint(copy).tensor("weights/a")


def test_pieces_that_do_not_fit_are_named_before_anything_is_overwritten(copy: Path):
    checkpoint = open_checkpoint(copy)
    fits = Piece("weights/a", (40, 10), 0, torch.zeros(400), (0, 400))
    wrong = [
        Piece("weights/c", (2,), 0, torch.zeros(2), (0, 2)),
        Piece("weights/a", (10, 40), 0, torch.zeros(400), (0, 400)),
        Piece("optimizer/exp_avg/a", (40, 10), 0, torch.zeros(400, dtype=torch.bfloat16), (0, 400)),
    ]
    with pytest.raises(InputError) as refusal:
        checkpoint.fill([fits, *wrong])
    assert "weights/c is missing" in str(refusal.value)
    assert "weights/a has shape [40, 10], but [10, 40] in this run" in str(refusal.value)
    assert "optimizer/exp_avg/a is stored as float32, but bfloat16 in this run" in str(refusal.value)
    assert len(refusal.value.problems) == 1
    assert not fits.values.any()
    assert checkpoint.problems([fits]) == []


@pytest.mark.parametrize(
    ("saved", "asked"),
    [
        ("@zero2 2 processes, process 1", ""),
        ("", "@fsdp2 2 processes, process 0"),
        ("@zero2 2 processes, process 1",) * 2,
    ],
)
def test_8_bit_state_that_cannot_be_cut_anew_is_refused_with_the_launch_that_it_needs(
    saved: str, asked: str, tmp_path: Path
):
    codes = torch.arange(9, dtype=torch.uint8)
    savers.save(tmp_path, 1, {f"optimizer/state1/a{saved}": codes})
    problems = open_checkpoint(tmp_path).problems([Piece(f"optimizer/state1/a{asked}", (9,), 0, codes, (0, 9))])
    if saved == asked:
        assert problems == []
    else:
        assert len(problems) == 1
        assert "8-bit state was cut into blocks at other elements" in problems[0]
        assert ("zero2 2 processes" in problems[0]) == bool(saved)
        assert "checkpoint.resume_weights_only" in problems[0]


def test_the_manifest_of_a_large_model_is_made_and_read_within_a_second(tmp_path: Path):
    tensors, ranks, each = 3000, 8, 1000
    parts = [
        Part(
            name=file_name(rank, ranks),
            file=StoredFile(bytes=1, xxh3_128="0" * 32),
            tensors={
                f"optimizer/exp_avg/model.layers.{i}.mlp.down_proj.weight": OwnStretch(
                    shape=[ranks, each], dtype="float32", begin=rank * each, end=(rank + 1) * each
                )
                for i in range(tensors)
            },
            own={},
        )
        for rank in range(ranks)
    ]
    for rank in range(ranks):
        (tmp_path / file_name(rank, ranks)).write_bytes(b"0")
    start = time.process_time()
    manifest = merged(parts, step=1, strategy="fsdp2", processes=ranks, written="", contents={})
    (tmp_path / NAME).write_text(manifest.text())
    made = time.process_time()
    assert len(open_checkpoint(tmp_path).names()) == tensors
    assert made - start < 1
    assert time.process_time() - made < 1


def test_parts_that_are_not_whole_tensors_or_contradict_each_other_are_no_checkpoint():
    def part(rank: int, begin: int, end: int, shape: int = 10, own: int = 1) -> Part:
        stretch = OwnStretch(shape=[shape], dtype="float32", begin=begin, end=end)
        file = StoredFile(bytes=1, xxh3_128="0" * 32)
        return Part(name=file_name(rank, 2), file=file, tensors={"a": stretch}, own={"steps": {"a": own}})

    wrong = {
        "do not cover it exactly once": [
            (part(0, 0, 4), part(1, 5, 10)),
            (part(0, 0, 6), part(1, 5, 10)),
            (part(0, 0, 4), part(1, 4, 9)),
        ],
        "disagree about a": [(part(0, 0, 4), part(1, 4, 10, shape=11))],
        "disagree about contents.steps.a": [(part(0, 0, 4), part(1, 4, 10, own=2))],
    }
    assert sum(map(len, wrong.values())) == 5
    for reason, cases in wrong.items():
        for parts in cases:
            with pytest.raises(RuntimeError, match=reason):
                merged(parts, step=1, strategy="ddp", processes=2, written="", contents={})


def test_nothing_that_is_given_leads_to_a_sentence(tmp_path: Path):
    assert newest(tmp_path) == (None, [])
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match=r"give the folder of a checkpoint"):
            open_checkpoint(path)
