"""Streaming: the rows of the files without a cache, the same for every process, refused or rejected as they come."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny

from finetune.data import encoding_workers, streaming
from finetune.data.encoding import Settings
from finetune.data.sources import Source
from finetune.data.streaming import Stream
from finetune.errors import InputError, RunStopped
from finetune.run.examination import Examination
from finetune.run.session import Session
from recipes import sft

TOKENIZER = tiny.build_tokenizer()


def stream(*paths: Path | Source, **changes: Any) -> Stream:
    values: dict[str, Any] = {
        "packing": False,
        "flat": False,
        "steps": 100,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "seed": 0,
        "vocabulary": 512,
        "skip_bad_rows": False,
    }
    entries = [path if isinstance(path, Source) else Source(str(path)) for path in paths]
    return Stream(entries, TOKENIZER, changes.pop("settings", Settings(64)), **(values | changes))


def documents(work: Stream, step: int) -> list[Any]:
    return [row for place in work.step(step).places for row in work.documents(place)]


@pytest.mark.parametrize("packing", [False, True])
def test_epochs_hold_every_document_once_and_are_shuffled_within_a_window(tmp_path: Path, packing: bool):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 1200)  # a whole window and a part of one
    work = stream(path, packing=packing, global_batch_size=1, micro_batch_size=1)
    seen: list[str] = []
    step = 0
    while len(seen) < 1200:
        step += 1
        seen += [row.source for row in documents(work, step)]
    lines = [int(source.rsplit(":")[-1]) for source in seen]
    assert sorted(lines) == list(range(1, 1201))
    assert sorted(lines[:1000]) == list(range(1, 1001))
    assert lines[:1000] != list(range(1, 1001))
    step += 1  # the next epoch begins
    assert documents(work, step)[0].source in seen


@pytest.mark.parametrize("packing", [False, True])
def test_two_processes_see_the_same_steps_and_a_later_step_can_be_reached(tmp_path: Path, packing: bool):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 60)
    one, other, late = (stream(path, packing=packing) for _ in range(3))
    for step in range(1, 12):
        batch = one.step(step)
        assert other.step(step) == batch
        found = [[row.source for row in one.documents(place)] for place in batch.places]
        assert found == [[row.source for row in other.documents(place)] for place in batch.places]
        assert batch.trained_tokens == sum(r.trained_tokens for place in batch.places for r in one.documents(place))
    assert late.step(11) == batch
    assert [[row.source for row in late.documents(place)] for place in batch.places] == found
    with pytest.raises(AssertionError, match="does not go back"):
        late.step(3)


def test_weights_repeat_the_rows_of_a_source(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 8)
    work = stream(Source(str(path), weight=2), global_batch_size=16)
    sources = [row.source for row in documents(work, 1)]
    assert sorted(sources) == sorted([f"{path}:{i}" for i in range(1, 9)] * 2)


def test_sources_take_turns_by_their_weights(tmp_path: Path):
    one, other = (tiny.write_conversations(tmp_path / f"{name}.jsonl", 400) for name in ("one", "other"))
    work = stream(Source(str(one), weight=1), Source(str(other), weight=3))
    assert len(work.first_window) == 1000
    first = [row.source.partition(":")[0] for row in work.first_window]
    assert [first[:count].count(str(other)) for count in (4, 400, 800, 1000)] == [3, 300, 600, 750]


def test_source_of_which_a_part_is_kept_is_read_faster_so_that_its_rows_come_by_its_weight(tmp_path: Path):
    one, other = (tiny.write_conversations(tmp_path / f"{name}.jsonl", 900) for name in ("one", "other"))
    work = stream(Source(str(one), weight=1), Source(str(other), weight=0.5))
    first = [row.source.partition(":")[0] for row in work.first_window]
    for count in (300, 600, 900):
        assert first[:count].count(str(other)) == pytest.approx(count / 3, rel=0.2)


def test_a_pass_that_is_left_off_waits_for_none_of_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The garbage collector may leave it off, in a thread that holds the lock for which they wait."""
    monkeypatch.setattr(encoding_workers, "RECORDS_AT_ONCE", 1)
    encode, may_go_on = encoding_workers._encode, threading.Event()

    def waits_after_the_first(chunk: Any, *args: Any) -> Any:
        if chunk[0][1].value["messages"][1]["content"] != "first":
            assert may_go_on.wait(60)
        return encode(chunk, *args)

    monkeypatch.setattr(encoding_workers, "_encode", waits_after_the_first)
    file = tmp_path / "rows.jsonl"
    answers = ["first", *map(str, range(40))]
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}] for answer in answers]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    settings = Settings(64)
    encoder = encoding_workers.Encoder(TOKENIZER, settings)
    batches: Any = encoding_workers.encoded(encoding_workers.records_of([Source(str(file))]), encoder, settings)
    assert next(batches).rows
    leaving = threading.Thread(target=batches.close, daemon=True)
    leaving.start()
    leaving.join(30)
    is_left = not leaving.is_alive()
    may_go_on.set()
    assert is_left


def test_stream_tells_what_the_template_leaves_out_of_its_first_documents(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 20)
    thought = {"role": "assistant", "content": "b", "reasoning_content": "because"}
    rows = [json.dumps({"messages": [{"role": "user", "content": "a"}, thought]})] * 3
    path.write_text(path.read_text() + "\n".join(rows))
    work = stream(path, settings=Settings(64, on_dropped="warn"))
    assert work.describe()[1:] == ["of the first 23 documents, the chat template leaves out reasoning of 3"]


def test_bad_row_stops_the_run_with_its_line_or_is_told_once_and_skipped(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 5)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(InputError, match=r"rows\.jsonl:6: .*data\.on_bad_row skip"):
        stream(path)
    work = stream(path, skip_bad_rows=True, global_batch_size=5, micro_batch_size=1)
    for step in range(1, 5):  # pass after pass
        assert len(documents(work, step)) == 5
    (line,) = work.newly_rejected()
    assert json.loads(line)["source"] == f"{path}:6"
    assert work.newly_rejected() == []


def test_bad_row_behind_the_first_window_stops_the_run(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 1500)
    path.write_text(path.read_text() + "{broken\n")
    work = stream(path, global_batch_size=1000)
    work.step(1)
    with pytest.raises(RunStopped, match=r"rows\.jsonl:1501: "):
        work.step(2)


def test_rows_of_a_step_are_named_though_the_stream_has_gone_on(tmp_path: Path):
    work = stream(tiny.write_conversations(tmp_path / "rows.jsonl", 40))
    first = work.step(1)
    expected = [row.source for place in first.places for row in work.documents(place)]
    work.step(2)
    assert first.sources() == expected


def test_copies_of_files_on_other_machines_have_the_same_fingerprint(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 40)
    before = stream(path).fingerprint
    os.utime(path, (1, 1))
    assert stream(path).fingerprint == before
    tiny.write_conversations(path, 41)
    assert stream(path).fingerprint != before


def test_files_without_a_row_are_refused_and_not_read_for_ever(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(InputError, match="no row can be trained"):
        stream(tmp_path / "rows.jsonl")


def test_token_that_the_model_does_not_know_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="the model's vocabulary has only 100 tokens"):
        stream(tiny.write_conversations(tmp_path / "rows.jsonl", 5), vocabulary=100)


def test_settings_that_a_stream_cannot_have_are_refused():
    assert streaming.problems(["held_out.jsonl"], 10) == []
    assert [problem.split()[-1] for problem in streaming.problems(0.1, None)] == ["data.", "train.steps."]


def test_recipe_trains_on_a_stream_and_writes_what_it_skipped(model_folder: Path, held_out: Path, tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 30)
    path.write_text(path.read_text() + "{broken\n")
    changes = {"data__streaming": True, "data__packing": True, "data__on_bad_row": "skip", "data__eval": str(held_out)}
    sft.main(scenarios.configuration(model_folder, path, tmp_path / "run", train__steps=12, **changes))
    metrics = scenarios.read_metrics(tmp_path / "run")
    assert [line["step"] for line in metrics] == list(range(1, 13))
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    rejected = (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["source"] for line in rejected] == [f"{path}:31"]


def test_a_run_of_a_stream_that_is_resumed_at_its_end_keeps_what_it_skipped(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streaming, "WINDOW", 8)  # the unusable row is not in the first, which is always read
    monkeypatch.setattr(encoding_workers, "RECORDS_AT_ONCE", 8)
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 30)
    path.write_text(path.read_text() + "{broken\n")
    changes = {"data__streaming": True, "data__on_bad_row": "skip", "train__steps": 12, "train__overwrite": False}
    run = tmp_path / "run"
    sft.main(scenarios.configuration(model_folder, path, run, **changes))
    before = (run / "rejected.jsonl").read_text()
    assert len(before.splitlines()) == 1
    shutil.rmtree(run / "final")
    sft.main(scenarios.configuration(model_folder, path, run, **changes, checkpoint__resume="auto"))
    assert (run / "rejected.jsonl").read_text() == before


def test_what_the_last_step_rejected_is_written_before_its_checkpoint(
    model_folder: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that ends in its last evaluation reads nothing again when it is resumed."""
    monkeypatch.setattr(streaming, "WINDOW", 8)
    monkeypatch.setattr(encoding_workers, "RECORDS_AT_ONCE", 8)
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 30)
    path.write_text(path.read_text() + "{broken\n")
    changes = {"data__streaming": True, "data__on_bad_row": "skip", "train__steps": 4, "train__overwrite": False}
    config = scenarios.configuration(model_folder, path, tmp_path / "run", **changes, data__eval=str(held_out))
    figures, evaluations = Examination.figures, iter(range(9))

    def die(examination: Examination) -> dict[str, Any]:
        if next(evaluations) == 1:
            raise KeyboardInterrupt
        return figures(examination)

    with monkeypatch.context() as patched:
        patched.setattr(Examination, "figures", die)
        with pytest.raises(KeyboardInterrupt):
            sft.main(config)
    assert len((tmp_path / "run" / "rejected.jsonl").read_text().splitlines()) == 1


def test_a_run_that_is_resumed_has_read_its_stream_before_its_first_step(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 30)
    changes = {"data__streaming": True, "checkpoint__every": 2, "train__overwrite": False}
    sft.main(scenarios.configuration(model_folder, path, tmp_path / "run", train__steps=4, **changes))
    seen = []
    steps = Session.steps

    def noted(session: Session) -> Iterator[int]:
        seen.append(session.batches.next_step)
        return steps(session)

    monkeypatch.setattr(Session, "steps", noted)
    changes |= {"checkpoint__resume": "auto"}
    shutil.rmtree(tmp_path / "run" / "final")
    for last, expected in ((4, 1), (2, 3)):  # no step is left, for which a stream would be read; two are
        for path_of_step in (tmp_path / "run" / "checkpoints").iterdir():
            if int(path_of_step.name.removeprefix("step-")) > last:
                shutil.rmtree(path_of_step)
        sft.main(scenarios.configuration(model_folder, path, tmp_path / "run", train__steps=4, **changes))
        assert seen.pop() == expected
        shutil.rmtree(tmp_path / "run" / "final")
    assert [line["step"] for line in scenarios.read_metrics(tmp_path / "run")] == list(range(1, 5))
