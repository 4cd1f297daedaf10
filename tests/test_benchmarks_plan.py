"""The benchmark of the planner: its runs cover what it claims, and it counts errors and false verdicts right."""

import json
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import plan_accuracy as accuracy
from benchmarks import plan_cases, plan_results, plan_runs
from finetune.config.compatibility import Cell, refusal
from finetune.errors import InputError
from finetune.hardware.cards import parse_gpus
from recipes.sft import Config

H200 = parse_gpus("1xH200")
LOOKED_AT_BEFORE = {
    # model, adapter, bits, trained weights, recomputed, positions: measured when the planner was written
    ("Llama-3.2-1B", "none", None, "bf16", False, 16384),
    ("Llama-3.1-8B", "lora", None, "fp32_master", True, 16384),
    ("Llama-3.1-8B", "lora", None, "fp32_master", False, 8192),
    ("Llama-3.1-8B", "lora", 4, "fp32_master", True, 16384),
    ("Llama-3.1-8B", "lora", 4, "fp32_master", False, 8192),
    ("Llama-3.1-8B", "none", None, "bf16", True, 16384),
}


@pytest.fixture(scope="module")
def every() -> list[plan_cases.Case]:
    """All runs for an H200; two settings are traced to find the length of those at the edge."""
    return plan_cases.cases(H200)


def test_runs_are_many_and_distinct_and_cover_what_the_planner_is_asked_about(every: list[plan_cases.Case]):
    settings = [case.setting for case in every]
    assert len({case.name for case in every}) == len({(c.model, c.setting) for c in every}) == len(every) >= 24
    assert len(plan_cases.ON_ONE_GPU) >= 24  # without those at the edge, whose lengths depend on the GPU
    ways = {(s.adapter, s.bits, s.weights if s.adapter == "none" else "", s.activation_checkpointing) for s in settings}
    for way in (
        ("none", None, "fp32_master"),
        ("none", None, "bf16"),
        ("lora", None, ""),
        ("lora", 4, ""),
        ("lora", 8, ""),
    ):
        assert {(*way, False), (*way, True)} <= ways
    assert {s.packing for s in settings} == {True, False}
    rows = [case.setting.row_tokens for case in plan_cases.ON_ONE_GPU]
    assert (min(rows), max(rows)) == (2048, 32768)
    models = {case.model for case in every}
    vocabularies = [plan_cases.MODELS[model]["vocab_size"] for model in models]
    assert min(vocabularies) <= 32000
    assert max(vocabularies) >= 150000
    assert {"SmolLM2-135M", "Llama-3.1-8B"} <= models


def test_no_run_had_been_measured_when_the_planner_was_written(every: list[plan_cases.Case]):
    for case in every:
        s = case.setting
        key = (case.model, s.adapter, s.bits, s.weights, s.activation_checkpointing, s.tokens)
        assert key not in LOOKED_AT_BEFORE


@pytest.mark.parametrize("gpus", ["1xH200", "4xA100", "1xRTX 4090"])
def test_the_recipe_takes_every_run(gpus: str):
    for case in plan_cases.cases(parse_gpus(gpus)):
        s = case.setting
        assert refusal(Cell(s.strategy, s.bits, s.adapter, s.optimizer)) is None
        Config.model_validate(plan_cases.configuration(case, Path("model"), Path("rows"), Path("run"), steps=4))
        assert s.row_tokens % case.document_tokens == 0


def test_several_gpus_are_all_used():
    several = [case for case in plan_cases.cases(parse_gpus("8xH200")) if case.setting.world_size == 8]
    assert len(several) == len(plan_cases.ON_ALL_GPUS) == len({case.name for case in several})


@pytest.mark.parametrize("gpus", ["1xH200", "1xA10"])
def test_runs_at_the_edge_need_the_share_that_they_say_and_are_called_all_there_is_to_call_them(gpus: str):
    machines = parse_gpus(gpus)
    edges = [case for case in plan_cases.cases(machines) if case.edge is not None]
    verdicts = []
    for case in edges:
        with plan_cases.asked(case.model, plan_cases.POSITIONS) as model:
            found = accuracy.predict(case, machines, model)
        assert case.edge is not None
        assert case.edge - 0.03 < found["needed_gib"] / machines.gpu.memory_gib <= case.edge
        verdicts.append(found["verdict"])
    assert set(verdicts) == {"fits", "tight", "does not fit"}


def test_runs_that_say_most_come_first(every: list[plan_cases.Case]):
    half = every[: len(every) // 2]
    ways = {(case.setting.adapter, case.setting.bits) for case in half}
    assert ways == {("none", None), ("lora", None), ("lora", 4), ("lora", 8)}
    assert {case.setting.activation_checkpointing for case in half} == {True, False}
    assert {case.edge for case in half} >= {None, 0.97, 1.02}


@pytest.mark.slow
def test_list_needs_no_gpu_and_shows_the_runs(capsys: pytest.CaptureFixture[str]):
    assert accuracy.main(["--list", "--gpus", "8xH100", "--only", "SmolLM2-135M full"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = [case.name for case in plan_cases.ON_ONE_GPU if "SmolLM2-135M full" in case.name]
    assert [line.split("  ")[0] for line in lines] == ["run", *named]
    assert all(line.endswith("fits") for line in lines[1:])


def test_without_a_gpu_or_with_a_wrong_word_it_ends_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert accuracy.main([]) == 2
    assert "There is no GPU here" in capsys.readouterr().err
    assert accuracy.main(["--list", "--only", "nothing"]) == 2
    assert "see --list" in capsys.readouterr().err
    assert accuracy.main(["--table", "--results", str(tmp_path / "none.json")]) == 2
    assert "Nothing is recorded" in capsys.readouterr().err
    assert accuracy.main(["--rehearse"]) == 2
    assert "measures nothing" in capsys.readouterr().err


def finished(
    predicted: float, allocated: float, *, verdict: str = "fits", speeds: tuple[float, float] = (9.0, 10.0)
) -> Any:
    return {
        "predicted": {"peak_gib": predicted, "verdict": verdict, "tokens_per_second": speeds[0]},
        "measured": {
            "outcome": "finished",
            "allocated_gib": allocated,
            "reserved_gib": allocated + 1,
            "tokens_per_second": speeds[1],
        },
    }


def ran_out(verdict: str) -> Any:
    return finished(99.0, 1.0, verdict=verdict) | {"measured": {"outcome": "out of memory", "allocated_gib": 1.0}}


SAMPLE = {
    "exact": finished(10.0, 10.0),
    "two percent over": finished(10.2, 10.0, speeds=(12.0, 10.0)),
    "four percent under": finished(9.6, 10.0, verdict="does not fit"),
    "beyond": ran_out("does not fit"),
    "at the edge": ran_out("tight"),
}


def test_table_shows_each_run_and_what_all_amount_to():
    lines = plan_results.table(SAMPLE).splitlines()
    assert [line.count("|") for line in lines[:7]] == [11] * 7
    assert "| 9.60 | 10.00 | -4.0% | 11.00 | 9 | 10 | -10% | does not fit | ran |" in lines[4]
    assert lines[5].endswith("| does not fit | ran out of memory |")
    assert lines[8:] == [
        "3 of 5 runs finished.",
        "Peak of memory: median error 2.0%, worst -4.0% (four percent under).",
        "Speed: median error 10.0%, worst +20.0% (two percent over).",
        "Ran out of memory: 0 of those that should fit, 1 of the tight ones, 1 of those that should not fit; 1 that "
        "should not fit ran.",
    ]


def test_bounds_break_where_they_should():
    assert plan_results.broken_bounds(SAMPLE) == []
    false = SAMPLE | {"false": ran_out("fits")}
    assert plan_results.broken_bounds(false) == ["false: called to fit, and ran out of memory."]
    failed = {"ended": finished(1, 1) | {"measured": {"outcome": "failed", "why": "it fell over"}}}
    assert "the run failed" in plan_results.broken_bounds(failed)[0]
    (worst,) = plan_results.broken_bounds(SAMPLE | {"far": finished(10.6, 10.0), "near": finished(10, 10)})
    assert worst.startswith("far: the peak is +6.0% off")


@given(st.lists(st.floats(0.8, 1.2), min_size=1, max_size=9))
def test_every_peak_beyond_the_bound_is_told_and_the_median_too(ratios: list[float]):
    told = plan_results.broken_bounds({str(i): finished(10.0 * ratio, 10.0) for i, ratio in enumerate(ratios)})
    errors = [abs(10.0 * ratio / 10.0 - 1) for ratio in ratios]
    assert len(told) == sum(error > 0.05 for error in errors) + (statistics.median(errors) > 0.03)


def test_predictions_are_written_before_and_results_after_each_run(tmp_path: Path):
    results, seen = tmp_path / "found.json", []
    results.write_text(json.dumps({"runs": {"an earlier one": finished(1, 1)}}))
    chosen = [plan_cases.REHEARSED, replace(plan_cases.REHEARSED, document_tokens=64)]
    foretold = {case: {"peak_gib": 1.0, "verdict": "fits", "tokens_per_second": 9.0} for case in chosen}

    def measure(case: plan_cases.Case) -> Any:
        written = json.loads(results.read_text())["runs"]
        assert "an earlier one" in written
        assert all(written[one.name]["predicted"]["peak_gib"] > 0 for one in chosen)
        seen.append([written[one.name]["measured"] is None for one in chosen])
        if len(seen) == 1:
            raise RuntimeError("A process ended with 9.")
        return finished(1, 1)["measured"]

    runs = accuracy.record(foretold, H200, results, measure, {"packages": {}})
    assert seen == [[True, True], [False, True]]
    assert [run["measured"]["outcome"] for run in runs.values()] == ["failed", "finished"]
    assert json.loads(results.read_text())["runs"].keys() == {"an earlier one", *runs}


def test_no_run_begins_once_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results, case = tmp_path / "found.json", plan_cases.REHEARSED
    foretold = {case: {"peak_gib": 1.0, "verdict": "fits", "tokens_per_second": 9.0}}

    def measure(case: plan_cases.Case) -> Any:
        raise AssertionError(case)

    runs = accuracy.record(foretold, H200, results, measure, {}, until=time.monotonic() - 1)
    assert runs[case.name]["measured"] is None
    assert json.loads(results.read_text())["runs"][case.name]["predicted"] == foretold[case]
    assert case.name in capsys.readouterr().out
    assert "was not run" in plan_results.table(runs)


@pytest.mark.slow
def test_predictions_of_another_process_are_those_of_this_one():
    (mine,) = accuracy.predictions(H200, rehearses=True).items()
    ((case, found),) = accuracy.elsewhere(accuracy.predictions, H200, [mine[0].name], rehearses=True).items()
    assert (case, found) == mine


def test_errors_that_mean_too_little_memory_are_told_from_others():
    assert plan_runs.ran_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert plan_runs.ran_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    refused = InputError("The largest micro-batch of the run does not fit on the GPU.")
    assert not plan_runs.ran_out_of_memory(refused)
    refused.__cause__ = RuntimeError("CUDA out of memory.")
    assert plan_runs.ran_out_of_memory(refused)


def test_most_of_any_process_counts_and_one_that_ran_out_is_enough():
    part = {"outcome": "finished", "memory": dict.fromkeys(plan_runs.KINDS, 2**30), "free_bytes_at_start": 2**33}
    other = part | {"memory": dict.fromkeys(plan_runs.KINDS, 2**31), "free_bytes_at_start": 2**32}
    found = plan_runs.together([part, other])
    assert (found["outcome"], found["allocated_gib"], found["free_gib_at_start"]) == ("finished", 2.0, 4.0)
    assert plan_runs.together([part, other | {"outcome": "out of memory"}])["outcome"] == "out of memory"


ENDS = {
    "finished": ('{"outcome": "finished"}', 0),
    "out of memory": ('{"outcome": "out of memory"}', 0),
    "lost another": ("", 1),
    "waits": ("", None),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (("finished", "finished"), ["finished", "finished"]),
        (("lost another", "out of memory"), ["out of memory"]),
        (("waits", "out of memory"), ["out of memory"]),
        (("finished", "lost another"), "A process ended with 1: lost another"),
        (("waits", "lost another"), "A process ended with 1: lost another"),
        (("finished", "waits"), "no answer within 1 seconds"),
    ],
    ids=str,
)
def test_a_process_without_memory_is_told_from_those_that_it_left_alone(
    ends: tuple[str, str], expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plan_runs, "PATIENCE_SECONDS", 1.0 if "no answer" in expected else 60.0)
    answers, logs = ([tmp_path / f"{kind}-{rank}" for rank in range(2)] for kind in ("answer", "said"))
    processes: list[Any] = []
    for end, answer, log in zip(ends, answers, logs):
        said, code = ENDS[end]
        does = "sleep 60" if code is None else f"echo '{said}' > {answer}; exit {code}"
        log.write_text(end)
        processes.append(subprocess.Popen(["sh", "-c", does]))
    ready = plan_runs.Waiting(cast(Any, None), processes, logs)
    try:
        if isinstance(expected, str):
            with pytest.raises(RuntimeError, match=expected):
                plan_runs._answered(ready, answers)
        else:
            assert [each["outcome"] for each in plan_runs._answered(ready, answers)] == expected
    finally:
        plan_runs._end(processes)


@pytest.mark.slow
def test_one_tiny_run_goes_through_the_same_processes_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    results = tmp_path / "found.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert accuracy.main(["--rehearse", "--results", str(results)]) == 0
    (run,) = json.loads(results.read_text())["runs"].values()
    measured = run["measured"]
    assert measured["outcome"] == "finished"
    assert (
        measured["tokens_of_a_step"] == plan_cases.REHEARSED.setting.tokens * plan_cases.REHEARSED.setting.accumulation
    )
    # the run asked the planner the same question, and traced nothing anew: the model's sizes, and a step of all layers
    assert len([*(tmp_path / "cache" / "finetune").rglob("*.json")]) == 2
    assert measured["peak_gib_predicted_by_the_run"] == round(run["predicted"]["peak_gib"], 4)
    assert measured["allocated_gib"] == pytest.approx(run["predicted"]["peak_gib"])
    assert {"torch", "transformers"} <= set(run["environment"]["packages"])
