"""The README's figures are those that were measured, and its lists are complete."""

import json
from pathlib import Path

import pytest
from parity import ACCUMULATIONS, BF16_TOLERANCE, FP32_TOLERANCE, LAUNCHES, MAX_GRAD_NORMS, OPTIMIZERS

from benchmarks import checkpoint_speed, data_preparation, kills, plan_example, resume_table, trl_reference
from benchmarks.parity_table import RESULTS, table, with_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def comparisons() -> list[dict]:
    return json.loads(RESULTS.read_text())["comparisons"]


def test_table_is_generated_from_the_recorded_parity_run():
    assert with_table(README, table(json.loads(RESULTS.read_text()))) == README


def test_recorded_run_covers_every_launch_and_setting_within_the_tolerances(comparisons: list[dict]):
    exact = [row for row in comparisons if row["precision"] == "fp32"]
    launches = [("single", 1), *LAUNCHES]
    assert len(exact) == (len(launches) * len(OPTIMIZERS) - 1) * len(MAX_GRAD_NORMS) * len(ACCUMULATIONS)
    assert {(row["strategy"], row["processes"]) for row in exact} == set(launches)
    rounded = [row for row in comparisons if row["precision"] == "bf16"]
    assert [(row["strategy"], row["processes"]) for row in rounded] == LAUNCHES
    for rows, tolerance in ((exact, FP32_TOLERANCE), (rounded, BF16_TOLERANCE)):
        assert all(row[key] <= tolerance[key] for row in rows for key in tolerance)


def test_comparison_with_trl_is_the_recorded_one_and_keeps_its_bounds():
    recorded = json.loads((ROOT / "benchmarks" / "results" / "trl_reference.json").read_text())
    assert trl_reference.table(recorded) in README
    assert trl_reference.broken_bounds(recorded) == []
    assert {pair for pair, bound in trl_reference.BOUNDS.items() if bound == 0.005} == {
        ("trl", "recipe"),
        ("trl_4_bits", "recipe_4_bits"),
    }


def test_speed_and_memory_of_data_preparation_are_the_recorded_ones():
    recorded = json.loads(data_preparation.RESULTS.read_text())
    assert data_preparation.speed_table(recorded["speed"]) in README
    assert data_preparation.memory_table(recorded["memory"]) in README
    assert data_preparation.too_large(recorded["memory"]) == []
    assert recorded["speed"]["setup"]["rows"] == 100_000


def test_table_of_resumed_runs_is_the_recorded_one_and_has_every_pair():
    recorded = json.loads(resume_table.RESULTS.read_text())
    assert resume_table.table(recorded) in README
    pairs = {(row["method"], row["before"], row["after"]) for row in recorded["comparisons"]}
    assert len(pairs) == len(recorded["comparisons"]) == 9 * 9 + 2 * 5 * 5
    assert all(row["loss"] == row["grad_norm"] == 0 for row in recorded["comparisons"] if row["before"] == row["after"])
    assert all(row[key] <= 1e-5 for row in recorded["comparisons"] for key in ("loss", "grad_norm"))


def test_kills_are_the_recorded_ones_and_more_than_a_hundred():
    recorded = json.loads(kills.RESULTS.read_text())
    assert kills.table(recorded["runs"]) in README
    assert len(recorded["runs"]) >= 100
    assert len(recorded["launches"]) == 6


def test_speed_and_memory_of_checkpoints_are_the_recorded_ones():
    assert checkpoint_speed.table(json.loads(checkpoint_speed.RESULTS.read_text())) in README


def test_example_of_a_plan_is_what_the_command_prints():
    assert plan_example.with_example(README, plan_example.example()) == README


def test_stated_tolerances_are_those_of_the_tests():
    assert "1e-5 in fp32" in README
    assert FP32_TOLERANCE == {"loss": 1e-5, "grad_norm": 1e-5}
    assert "3e-3 (loss) and 1e-2 (gradient norm) in bf16" in README
    assert BF16_TOLERANCE == {"loss": 3e-3, "grad_norm": 1e-2}


def test_every_strategy_file_is_in_the_readme():
    names = [path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")]
    assert len(names) == 10
    assert all(f"| `{name}` |" in README for name in names)
