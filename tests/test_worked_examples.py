"""The worked examples in docstrings are what the functions return."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
import torch.distributed as dist
from chat_templates import TOKENIZERS, encode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from finetune.checkpoint import folder
from finetune.checkpoint.manifest import OwnStretch, Part, StoredFile, file_name, merged
from finetune.compat.fake_tensors import FakeStore
from finetune.data.chat_template import ChatTemplate
from finetune.data.packing import efficiency, pack
from finetune.data.sampler import (
    EMPTY,
    dealt,
    dealt_batch,
    epoch_order,
    global_batch,
    heaviest_micro_batch,
    micro_batches,
    positions_of,
)
from finetune.data.templates import Template
from finetune.distributed import flat_shards, sharded_state
from finetune.distributed.flat_shards import FlatShard
from finetune.distributed.held_parts import held_of
from finetune.distributed.part_groups import Grid
from finetune.distributed.strategy import Strategy
from finetune.models.tensor_plan import Share, Split
from finetune.optim.rounding import round_stochastically

CONVERSATION = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]


def strategy(name: str, rank: int, world_size: int, replicas: int = 1) -> Strategy:
    return Strategy(name, rank, world_size, replicas, "no", rehearsal=True)


def test_sampler():
    run: dict[str, Any] = {"rows_in_run": 10, "global_batch_size": 4, "seed": 0}
    assert [epoch_order(5, 0, epoch).tolist() for epoch in (0, 1)] == [[2, 4, 3, 0, 1], [1, 4, 3, 0, 2]]
    steps = [global_batch(step, rows=5, **run) for step in (1, 2, 3)]
    assert steps == [[2, 4, 3, 0], [1, 1, 4, 3], [0, 2, EMPTY, EMPTY]]
    in_order = dealt_batch(steps[1], np.array([9, 7, 5, 4, 2]), 1, flat=True)
    shares = [micro_batches(in_order, rank=rank, world_size=2, micro_batch_size=1) for rank in (0, 1)]
    assert shares == [[[1], [3]], [[1], [4]]]


def test_dealt():
    sizes = np.array([[9, 2, 7, 3, 5, 2]])
    for flat, expected, positions in ((False, [9, 7, 5, 3, 2, 2], [18, 10, 4]), (True, [9, 2, 7, 2, 5, 3], [11, 9, 8])):
        found = sizes[0][dealt(sizes, 2, flat=flat)[0]]
        assert found.tolist() == expected
        assert positions_of(found, 2, flat=flat).tolist() == positions


def test_heaviest_micro_batch():
    lengths = np.array([3, 9, 2, 7, 5])
    of_run: dict[str, Any] = {"rows_in_run": 10, "global_batch_size": 4, "micro_batch_size": 2, "seed": 0}
    expected = {False: ([1, 1, 3, 4], [18, 14], [1, 1]), True: ([1, 3, 1, 4], [16, 14], [1, 3])}
    for flat, (in_order, positions, heaviest) in expected.items():
        assert dealt_batch([1, 1, 4, 3], lengths, 2, flat=flat) == in_order
        assert positions_of(lengths[in_order], 2, flat=flat).tolist() == positions
        assert heaviest_micro_batch(lengths, flat=flat, **of_run) == heaviest


def test_packing():
    lengths = np.array([3, 6, 4, 5, 2])
    packs = pack(lengths, 8)
    assert [packs[number].tolist() for number in range(len(packs))] == [[1, 4], [3, 0], [2]]
    assert efficiency(lengths, packs, 8) == 20 / 24


def test_span_finding():
    tokenizer = TOKENIZERS["chatml"]
    (found,) = ChatTemplate(Template.of(tokenizer)).render(CONVERSATION, None)
    text, turns = found.text, found.turns
    assert text == "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\nc d<|im_end|>\n"
    assert turns == {1: (53, 66)}
    assert text[53:66] == "c d<|im_end|>"
    row = encode(tokenizer, CONVERSATION)
    assert (len(row.tokens), row.spans, row.trained_tokens) == (19, [(14, 18)], 4)
    assert [tokenizer.decode([token]) for token in row.tokens[14:19]] == ["c", " ", "d", "<|im_end|>", "\n"]


def test_flat_shards_and_pieces_of_fsdp():
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        model = torch.nn.Linear(3, 5, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        own = strategy("fsdp2", 1, 2)
        (shard,) = flat_shards.flat_shards(own, model, values=False)
        assert (shard.begin, shard.count) == (9, 6)
        optimizer: Any = SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters()))
        optimizer.optimizer.param_groups[0]["params"][0].grad = torch.zeros_like(model.weight)
        optimizer.optimizer.step()
        found = [(p.name, p.begin, len(p.values), p.written) for p in sharded_state.pieces(own, model, optimizer)]
        names = ("weights/weight", "optimizer/exp_avg/weight", "optimizer/exp_avg_sq/weight")
        assert found == [(name, 9, 6, (0, 6)) for name in names]
    finally:
        dist.destroy_process_group()


def test_parts_and_their_holders():
    last = strategy("tp", 3, 4)
    rows = held_of(Share(Split(0, 2)), torch.Size((8, 6)), last, 2, None)
    assert rows.own(torch.arange(48), stretches=1).tolist() == [*range(24, 48)]
    assert (rows.part, rows.holder, rows.holders) == (1, 1, 2)
    norm = held_of(Share(), torch.Size((6,)), last, 2, None)
    assert (norm.holder, norm.holders) == (3, 4)
    sharded = held_of(Share(), torch.Size((6,)), strategy("fsdp2_tp", 3, 4), 2, None)
    assert (sharded.holder, sharded.holders) == (1, 2)


def test_places_of_processes():
    grid = Grid(world_size=8, stages=2, size=2)
    assert grid.alike("stage", "copy") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.alike("stage") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [1, 5] in grid.alike("copy", "place")
    assert [5, 7] in grid.alike("stage", "place")
    assert [2, 3, 6, 7] in grid.alike("copy")


def test_flat_shards_of_columns_that_are_sharded():
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        part = torch.nn.Linear(3, 4, bias=False)  # columns 3 to 5 of a weight of shape (4, 6)
        fully_shard(part, mesh=DeviceMesh.from_group(dist.new_group([1, 3]), "cpu"))
        held = held_of(Share(Split(1, 2)), torch.Size((4, 6)), strategy("fsdp2_tp", 3, 4), 2, None)
        (shard,) = flat_shards._of_part(held, "w", part.weight)
        assert (shard.begin, shard.count, shard.stretches, shard.begin_of_group) == (15, 6, 2, 12)
        assert held.own(torch.arange(12, 24), shard.stretches).tolist() == [15, 16, 17, 21, 22, 23]
        rows = held_of(Share(Split(0, 2)), torch.Size((8, 3)), strategy("fsdp2_tp", 3, 4), 2, None)
        (shard,) = flat_shards._of_part(rows, "w", part.weight)
        assert (shard.begin, shard.count, shard.stretches) == (18, 6, 1)  # rows 6 and 7 of 8
    finally:
        dist.destroy_process_group()


def test_pieces_of_replicas_and_of_8_bit_state():
    written = [
        sharded_state._piece(strategy("hsdp", rank, 4, 2), "weights/w", (5, 3), 9, torch.zeros(6)).written
        for rank in (1, 3)
    ]
    assert written == [(0, 3), (3, 6)]
    shard = FlatShard("w", (32, 64), 1024, 1024, torch.zeros(1024), 0, keeps_blocks=True)
    piece = sharded_state._state_piece(
        strategy("fsdp2", 1, 2), shard, "absmax1", torch.zeros(4), blockwise=True, writes=True
    )
    assert (piece.shape, piece.begin, len(piece.values)) == ((8,), 4, 4)


def test_flat_shards_of_zero():
    """Of what DeepSpeed notes of the parameters, which is written down here as it would."""
    model = torch.nn.Module()
    model.weight, model.bias = torch.nn.Parameter(torch.zeros(5, 3)), torch.nn.Parameter(torch.zeros(5))
    inner = SimpleNamespace(param_groups=[{"params": [torch.zeros(10)]}])

    def place(start: int, numel: int) -> Any:
        return SimpleNamespace(start=start, numel=numel)

    for parameter, in_whole, in_partition in (
        (model.weight, place(10, 5), place(0, 5)),
        (model.bias, place(0, 5), place(5, 5)),
    ):
        parameter._hp_mapping = SimpleNamespace(
            lp_fragment_address=in_whole, hp_fragment_address=in_partition, param_group_index=0
        )
    zero2 = flat_shards._of_common_partitions(strategy("zero2", 1, 2), model, SimpleNamespace(optimizer=inner))
    assert [(s.name, s.begin, s.count, s.offset) for s in zero2] == [("weight", 10, 5, 0), ("bias", 0, 5, 5)]

    alone = torch.nn.Module()
    alone.weight = model.weight
    alone.weight.ds_numel, alone.weight.ds_shape = 15, (5, 3)
    zero = SimpleNamespace(
        fp32_partitioned_groups_flat=[torch.zeros(8)], grad_position={0: (0, 0, 8)}, get_param_id=lambda _: 0
    )
    zero3 = flat_shards._of_own_partitions(strategy("zero3", 1, 2), alone, zero, values=False)
    assert [(s.begin, s.count) for s in zero3] == [(8, 7)]


def test_stochastic_rounding():
    value = 1 + 2**-9
    assert [struct.pack(">f", number).hex() for number in (value, 1, 1 + 2**-7)] == ["3f804000", "3f800000", "3f810000"]
    values = torch.full((100_000,), value)
    found = round_stochastically(values, torch.Generator().manual_seed(0)).float()
    assert set(found.tolist()) == {1.0, 1.0078125}
    assert (found > 1).float().mean().item() == pytest.approx(0.25, abs=0.005)
    assert found.mean().item() == pytest.approx(1.001953125, abs=5e-5)


def test_eight_bit_state():
    values = torch.zeros(512)
    values[0], values[256] = -1, 0.001
    codes, state = bnb.quantize_blockwise(values, blocksize=256)
    assert state.absmax.tolist() == pytest.approx([1, 0.001])
    assert codes[256] == 255
    assert bnb.dequantize_blockwise(codes, state)[256].item() == pytest.approx(0.001)
    codes, state = bnb.quantize_blockwise(values, blocksize=512)
    assert bnb.dequantize_blockwise(codes, state)[256].item() == pytest.approx(0.00094, abs=1e-5)


def test_manifest():
    def part(rank: int, begin: int, end: int) -> Part:
        stretch = OwnStretch(shape=[5, 3], dtype="float32", begin=begin, end=end)
        file = StoredFile(bytes=1, xxh3_128="0" * 32)
        return Part(name=file_name(rank, 2), file=file, tensors={"weights/w": stretch}, own={})

    whole = merged([part(1, 9, 15), part(0, 0, 9)], step=1, strategy="fsdp2", processes=2, written="", contents={})
    assert whole.tensors["weights/w"].stretches == [
        ("rank-00000-of-00002.safetensors", 0, 9),
        ("rank-00001-of-00002.safetensors", 9, 15),
    ]


def test_checkpoint_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "is_complete", lambda path: True)  # what makes it complete is not the subject here
    renamed, rename = [], Path.rename

    def noted(self: Path, target: Path) -> Path:
        renamed.append((self.name, target.name))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", noted)
    for name in ("step-00000050", "step-00000100", "step-00000200.tmp"):
        (tmp_path / name).mkdir()
    folder.put_in_place(tmp_path / "step-00000200.tmp", tmp_path / "step-00000200")
    folder.remove_older(tmp_path, 2)
    assert renamed == [
        ("step-00000200.tmp", "step-00000200"),
        ("step-00000050", "step-00000050.removed.tmp"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000100", "step-00000200"]
