"""Garbage is collected between steps and never left uncollected behind a run; a profile is of the steps asked for."""

import gc
import gzip
import json
import weakref
from pathlib import Path

import pytest
import scenarios
import torch

from finetune.run.between_steps import between_steps, profiled


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_garbage_is_collected_after_each_step_and_not_within(tmp_path: Path):
    with between_steps(0, tmp_path, print) as step_is_over:
        garbage = weakref.ref(Cycle())
        for _ in range(20_000):
            json.loads("[[]]")
        assert garbage() is not None
        step_is_over()
        assert garbage() is None


def test_garbage_is_collected_as_before_once_a_run_ends_with_an_error(tmp_path: Path):
    before = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0
    with pytest.raises(RuntimeError), between_steps(0, tmp_path, print):
        raise RuntimeError
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0) == before


@pytest.mark.parametrize(("made", "shown"), [(1, []), (2, []), (3, [3]), (5, [3, 4, 5]), (9, [3, 4, 5])])
def test_profile_is_of_so_many_steps_from_the_third_on(made: int, shown: list[int], tmp_path: Path):
    said: list[str] = []
    with profiled(3, tmp_path, said.append) as step_is_over:
        for step in range(1, made + 1):
            with torch.profiler.record_function(f"step number {step}"):
                torch.ones(2)
            step_is_over()
    (line,) = said
    file = tmp_path / "profile.json.gz"
    assert file.exists() == bool(shown)
    if not shown:
        assert line == "log.profile: this launch made no more than 2 steps, which are not profiled"
        return
    assert line == f"a profile of {len(shown)} step{'s' if len(shown) > 1 else ''} is in {file}; open it in Perfetto"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert sorted({event["name"] for event in events if event["name"].startswith("step number")}) == [
        f"step number {step}" for step in shown
    ]


def test_a_profile_that_cannot_be_written_is_a_line_and_training_goes_on(tmp_path: Path):
    said, file = list[str](), tmp_path / "profile.json.gz"
    file.symlink_to("/dev/full")
    with profiled(1, tmp_path, said.append) as step_is_over:
        for _ in range(6):
            torch.ones(2)
            step_is_over()
    assert said == [f"log.profile: {file} cannot be written (No space left on device), so there is no profile"]
    assert not file.is_symlink()


def test_a_profiled_run_is_the_same_run_with_a_trace_of_its_step(
    model_folder: Path, conversations: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    from recipes import sft

    plain, watched = (
        scenarios.configuration(model_folder, conversations, tmp_path / name, train__steps=4, log__profile=profile)
        for name, profile in (("plain", 0), ("watched", 1))
    )
    sft.main(plain)
    sft.main(watched)
    printed = capfd.readouterr()
    assert f"a profile of 1 step is in {tmp_path / 'watched' / 'profile.json.gz'}" in printed.out
    assert printed.err == ""
    losses = [[line["loss"] for line in scenarios.read_metrics(tmp_path / name)] for name in ("plain", "watched")]
    assert losses[0] == losses[1]
    assert not (tmp_path / "plain" / "profile.json.gz").exists()
    trace = gzip.decompress((tmp_path / "watched" / "profile.json.gz").read_bytes()).decode()
    assert "aten::mm" in trace
    assert "AdamW" in trace or "_fused_adamw" in trace
