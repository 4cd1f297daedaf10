"""The benchmark of layouts: it tries all that run, measures none that cannot fit, and compares what can be compared."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import layouts
from benchmarks.plan_cases import Case
from finetune.config.strategy_names import SIZES, STRATEGIES
from finetune.errors import InputError

ON_GPUS = {"gpus": ["H100"] * 4, "cpus": 8, "predicted_for": "4xH100", "environment": {}}
FITS = {"peak_gib": 10.0, "tokens_per_second": 1000.0, "verdict": "fits"}


def every(**changes: Any) -> list[Case]:
    asked = {"model": "tiny", "processes": 4, "row_tokens": [256, 512], "rows": 8, "method": "full"}
    return layouts.layouts(**asked | changes)


def test_layouts_are_all_strategies_that_run_on_so_many_processes_each_with_and_without_recomputation():
    found = every()
    assert len({case.name for case in found}) == len(found)
    expected = {name for name in STRATEGIES if name not in ("single", "zero3_nvme", *SIZES)}
    # ulysses shares four heads among as many processes, though there are two of keys and values; of three layers there
    # are no four stages; there are no experts
    sized = {"cp 2", "cp 4", "ulysses 2", "ulysses 4", "pp 2", "tp 2", "tp 4", "tp_pp 2x2", "fsdp2_tp 2", "fsdp2_pp 2"}
    sized |= {"cp_tp 2x2"}
    assert {case.setting.launched for case in found} == expected | sized
    of_eight = {case.setting.launched for case in every(processes=8)}
    assert {"tp_pp 4x2", "fsdp2_tp_pp 2x2", "cp_tp 2x2", "cp_tp 4x2", "cp_tp 2x4"} <= of_eight
    assert not {"ulysses 8", "pp 4", "tp_pp 2x4", "fsdp2_tp_pp 4x2"} & of_eight
    for name in {case.setting.launched for case in found}:
        ways = {(c.setting.row_tokens, c.setting.recomputes) for c in found if c.setting.launched == name}
        assert ways == {(length, how) for length in (256, 512) for how in ("none", "full")}
    assert {case.global_batch_size for case in found} == {8}


def test_a_mixture_has_layouts_whose_processes_share_its_experts():
    found = {case.setting.launched: case.setting for case in every(model="tiny-mixture", processes=8)}
    assert {name for name in found if name.startswith("ep")} == {"ep 2", "ep 4"}  # of four experts
    assert found["ep 4"].experts == 4


@pytest.mark.parametrize(("method", "missing"), [("lora_8bit", "fsdp2"), ("full", "single")])
def test_what_does_not_work_together_is_no_layout(method: str, missing: str):
    assert missing not in {case.setting.strategy for case in every(method=method)}


def test_rows_that_cannot_be_dealt_are_refused():
    with pytest.raises(InputError, match="6 rows cannot be dealt to 4 processes; take a multiple of 4"):
        every(rows=6)


def test_what_cannot_fit_is_not_run_and_what_fails_is_recorded_and_the_others_run_all_the_same(tmp_path: Path):
    cases, asked = every(row_tokens=[256])[:3], []
    foretold = dict.fromkeys(cases, FITS) | {cases[0]: FITS | {"verdict": "does not fit"}}

    def measure(case: Case) -> dict[str, Any]:
        asked.append(case)
        if case == cases[1]:
            raise RuntimeError("A process ended with 1")
        return {"outcome": "finished", "tokens_per_second": 500.0, "allocated_gib": 9.0}

    results = tmp_path / "there" / "layouts.jsonl"
    found = layouts.record(foretold, measure, ON_GPUS, results, until=math.inf)
    assert asked == cases[1:]
    assert [line["measured"] and line["measured"]["outcome"] for line in found] == [None, "failed", "finished"]
    assert [json.loads(line) for line in results.read_text().splitlines()] == json.loads(json.dumps(found))


def test_no_run_begins_once_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    foretold = dict.fromkeys(every(row_tokens=[256]), FITS)
    assert layouts.record(foretold, pytest.fail, ON_GPUS, tmp_path / "none.jsonl", until=time.monotonic() - 1) == []
    assert "The time is over" in capsys.readouterr().out


def test_the_report_compares_the_newest_of_layouts_with_the_same_rows_within_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cases = every()[:8]
    speeds = iter(range(100, 1000, 100))

    def measure(case: Case) -> dict[str, Any]:
        return {"outcome": "finished", "tokens_per_second": float(next(speeds)), "allocated_gib": 9.0}

    found = layouts.record(dict.fromkeys(cases, FITS), measure, ON_GPUS, tmp_path / "all.jsonl", until=math.inf)
    again = found[0] | {"measured": {"outcome": "finished", "tokens_per_second": 5000.0, "allocated_gib": 9.0}}
    compared = layouts.groups([*found, again])
    assert [len(lines) for lines in compared] == [4, 4]
    assert [layouts.speed(line) for line in compared[0]] == [5000.0, 600.0, 500.0, 200.0]
    capsys.readouterr()
    layouts.report([*found, again], tmp_path / "chart.svg")
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "5,000" in said
    assert "planned for 4xH100" in " ".join(said.split())
    assert (tmp_path / "chart.svg").stat().st_size > 1000


@pytest.mark.prove
def test_a_layout_that_spreads_rows_is_measured_as_that_layout(tmp_path: Path):
    how = ["--processes", "2", "--row_tokens", "256", "--only", "cp 2", "--results", str(tmp_path / "found.jsonl")]
    assert layouts.main(how) == 0
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [line["layout"] for line in lines] == ["cp 2", "cp 2"]
    assert all(line["measured"]["tokens_of_a_step"] == 2 * 256 for line in lines)
    if not lines[0]["gpus"]:
        assert not {"allocated_gib", "free_gib_at_start"} & set(lines[0]["measured"])  # which nobody measured
