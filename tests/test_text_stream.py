"""A corpus that is streamed: rows that are cut through documents, batches and sources that change, and runs on them."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import corpora
import numpy as np
import pytest
import scenarios
import tiny
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.cli import commands
from finetune.config.token_budget import Stage
from finetune.data.concatenation import Concatenated
from finetune.data.encoding import Row, Settings
from finetune.data.sources import Source
from finetune.data.streaming import Stream
from finetune.data.text_stream import ConcatenatedStream, StagedStream
from finetune.errors import InputError

TOKENIZER = tiny.build_tokenizer()


def stream(*paths: Path, kind: type[Stream] = ConcatenatedStream, **changes: Any) -> Stream:
    values: dict[str, Any] = {
        "packing": False,
        "flat": True,
        "steps": 100,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "seed": 0,
        "vocabulary": 512,
        "skip_bad_rows": False,
    }
    entries = [Source(str(path)) for path in paths]
    return kind(entries, TOKENIZER, Settings(changes.pop("max_length", 48), format="text"), **(values | changes))


def rows_of(work: Stream, steps: range) -> list[tuple[int, ...]]:
    """The tokens of each row of some steps."""
    found = []
    for step in steps:
        for place in work.step(step).places:
            (row,) = work.documents(place)
            assert row.spans == [(1, len(row.tokens))]
            found.append(tuple(row.tokens.tolist()))
    return found


@pytest.mark.parametrize("max_length", [7, 16, 48, 1000])
def test_rows_of_a_pass_are_those_of_the_prepared_corpus(tmp_path: Path, max_length: int):
    """All in one window, so in another order; the last row goes on in the next pass."""
    path = corpora.write_texts(tmp_path / "texts.jsonl", rows=40)
    prepared = [
        tuple(row.tokens.tolist()) for row in Concatenated(tiny.read_rows(path, TOKENIZER, max_length), max_length)
    ]
    full = [row for row in prepared if len(row) == max_length]
    found = rows_of(
        stream(path, max_length=max_length, global_batch_size=1, micro_batch_size=1), range(1, len(full) + 1)
    )
    assert Counter(found) == Counter(full)
    assert found != full or len(full) < 9


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_token_of_every_window_stands_in_one_row_in_its_order(data: st.DataObject):
    length = data.draw(st.integers(2, 9))
    lengths = data.draw(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), min_size=1, max_size=5))
    tokens = iter(range(10**6))
    windows = [[Row(np.array([next(tokens) for _ in range(n)]), [], f"{n}") for n in window] for window in lengths]
    work = ConcatenatedStream.__new__(ConcatenatedStream)
    work.settings, work.seed, work.first_window = Settings(length), 0, windows[0]
    rows = [place[0].tokens.tolist() for place in work._shuffled(iter(windows[1:]))]
    total = sum(map(sum, lengths))
    assert sorted(rows) == [list(range(first, first + length)) for first in range(0, total - length + 1, length)]


def test_text_of_several_rows_has_each_token_once(tmp_path: Path):
    """Its parts, which are trained alone where documents are kept apart, share a token."""
    text = " ".join(tiny.WORDS * 20)
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "the end"}) + "\n")
    expected = [token for each in (text, "the end") for token in [*TOKENIZER.encode(each), TOKENIZER.eos_token_id]]
    parts = tiny.read_rows(path, TOKENIZER, 32)
    assert sum(parts.lengths) > len(expected)
    rows = Concatenated(parts, 32)
    assert [token for row in rows for token in row.tokens.tolist()] == expected
    assert rows.fingerprint != Concatenated(tiny.read_rows(path, TOKENIZER, 31), 31).fingerprint
    whole = stream(path, max_length=32, global_batch_size=1, micro_batch_size=1)
    full = range(1, len(expected) // 32 + 1)
    assert sorted(rows_of(whole, full)) == sorted(tuple(expected[32 * (i - 1) : 32 * i]) for i in full)


def test_parts_of_a_text_are_known_where_sources_are_mixed_and_repeated(tmp_path: Path):
    path = corpora.write_texts(tmp_path / "texts.jsonl", rows=30)
    rows = tiny.read_rows(path, TOKENIZER, 16)
    seen = list(rows)
    expected = [False] + [one.source == other.source for one, other in itertools.pairwise(seen)]
    assert rows.continues(16).tolist() == expected
    mixed = np.array([0, 0, 1, 2, 1, 2, 5, 4, 5])
    follows = [False, False, True, True, False, True, False, False, True]
    assert rows.choose(mixed).continues(16).tolist() == [
        follows[i] and expected[number] for i, number in enumerate(mixed.tolist())
    ]


def test_processes_see_the_same_steps_and_a_later_step_can_be_reached(tmp_path: Path):
    path = corpora.write_texts(tmp_path / "texts.jsonl", rows=40)
    one, other, late = (stream(path) for _ in range(3))
    for step in range(1, 9):
        batch = one.step(step)
        assert other.step(step) == batch
        found = [one.documents(place)[0].source for place in batch.places]
        assert found == [other.documents(place)[0].source for place in batch.places]
    assert late.step(8) == batch
    assert [late.documents(place)[0].source for place in batch.places] == found


def test_stages_take_the_rows_of_their_sources_from_where_each_was_left(tmp_path: Path):
    paths = [corpora.write_texts(tmp_path / f"{name}.jsonl", rows=40, seed=seed) for seed, name in enumerate("ab")]
    stages = [Stage(2, 2, 0), Stage(3, 4, 0), Stage(2, 4, 1)]

    def opened(mix: int, steps: int, rows: int) -> Stream:
        return stream(paths[mix], steps=steps, global_batch_size=rows)

    work = StagedStream(stages, opened)
    found = [rows_of(work, range(step, step + 1)) for step in range(1, 8)]
    assert [len(rows) for rows in found] == [2, 2, 4, 4, 4, 4, 4]
    alone = [rows_of(stream(path, global_batch_size=16), range(1, 2)) for path in paths]
    assert sorted(row for step in found[:5] for row in step) == sorted(alone[0])
    second = rows_of(stream(paths[1], global_batch_size=8), range(1, 2))
    assert sorted(row for step in found[5:] for row in step) == sorted(second)
    late = StagedStream(stages, opened)
    assert rows_of(late, range(6, 7)) == found[5]
    assert work.steps == 7
    assert "steps 3 to 5: 4 rows each, of data.train" in work.describe()


def test_longer_run_of_the_same_stages_has_the_same_fingerprint(tmp_path: Path):
    path = corpora.write_texts(tmp_path / "texts.jsonl", rows=40)

    def fingerprint(*stages: Stage) -> str:
        return StagedStream(stages, lambda mix, steps, rows: stream(path, global_batch_size=rows)).fingerprint

    first = fingerprint(Stage(2, 2, 0), Stage(3, 4, 0))
    assert first == fingerprint(Stage(2, 2, 0), Stage(9, 4, 0))
    assert first != fingerprint(Stage(1, 2, 0), Stage(3, 4, 0))


@pytest.fixture(scope="module")
def run(ranks: Any, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("streamed")
    texts, others = (corpora.write_texts(folder / f"{seed}.jsonl", rows=60, seed=seed) for seed in (0, 1))
    held_out = corpora.write_texts(folder / "held_out.jsonl", rows=5, seed=2)

    def train(strategy: str, world_size: int, name: str = "run", **changes: Any) -> list[dict[str, Any]]:
        settings = {"data__streaming": True, "data__eval": [str(held_out)], "train__steps": None}
        settings |= {"train__tokens": 3000, "train__global_batch_tokens": 384} | changes
        settings |= {"data__stages": [{"from_tokens": 2000, "train": str(others)}]} if "warm" in name else {}
        values = corpora.values_of(model_folder, texts, folder / name, **settings)
        assert ranks(world_size).run(corpora.pretrain, values, strategy=strategy) == [world_size] * world_size
        return scenarios.read_metrics(folder / name)

    train.folder, train.texts = folder, texts
    return train


COMPARED = ("loss", "grad_norm", "tokens", "total_tokens")
WARM = {"train__batch_warmup": [{"until_tokens": 1000, "global_batch_tokens": 192}]}


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        assert [one[name] for name in COMPARED] == pytest.approx([other[name] for name in COMPARED], rel=1e-5)
    assert found[-1]["eval_bits_per_byte"] == pytest.approx(expected[-1]["eval_bits_per_byte"], rel=1e-5)


@pytest.mark.parametrize("packing", ["concatenate", True])
def test_a_streamed_run_is_that_of_one_process_and_resumes_under_another_strategy(packing: Any, run: Any):
    expected = run("single", 1, data__packing=packing)
    assert len(expected) == 8
    assert_alike(run("fsdp2", 2, "saved", data__packing=packing, checkpoint__every=3, checkpoint__keep=5), expected)
    step = run.folder / "saved" / "checkpoints" / "step-00000003"
    assert_alike(run("ddp", 2, "resumed", data__packing=packing, checkpoint__resume=str(step)), expected[3:])


def test_a_streamed_run_whose_batches_and_sources_change_is_that_of_one_process_and_resumes(run: Any):
    expected = run("single", 1, "warm", **WARM)
    assert [-(-line["total_tokens"] // 48) for line in expected] == [4] * 6 + [8] * 5
    assert_alike(run("fsdp2", 2, "warm-saved", **WARM, checkpoint__every=1, checkpoint__keep=20), expected)
    for step in (5, 9):
        folder = run.folder / "warm-saved" / "checkpoints" / f"step-{step:08d}"
        assert_alike(run("zero3", 2, f"warm-{step}", **WARM, checkpoint__resume=str(folder)), expected[step:])


def test_what_is_no_text_is_refused_before_the_run(model_folder: Path, conversations: Path, tmp_path: Path):
    values = corpora.values_of(model_folder, conversations, tmp_path / "out", data__streaming=True)
    with pytest.raises(InputError, match="the key `text`, required by the format text, is missing"):
        corpora.pretrain(values)
    assert not (tmp_path / "out").exists()


def test_finetune_data_and_plan_answer_for_a_streamed_corpus(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arithmetic_steps: None
):
    texts = corpora.write_texts(tmp_path / "texts.jsonl", rows=30)
    changes = {"data__streaming": True, "train__steps": None, "train__tokens": 4000, "train__global_batch_tokens": 384}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(corpora.values_of(model_folder, texts, tmp_path / "out", **changes)))
    assert commands.main(["data", "--config", str(config)]) == 0
    assert "concatenated" in capsys.readouterr().out
    assert commands.main(["plan", "--config", str(config), "--gpus", "1x24GB", "--strategy", "single"]) == 0
    assert commands.main(["data", "--config", str(config), "--data.eval", "0.1"]) == 2
    assert "data.streaming cannot hold out a fraction" in capsys.readouterr().err
