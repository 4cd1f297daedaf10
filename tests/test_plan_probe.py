"""`--probe`: what two real steps change in a prediction, with made-up measurements, and real steps on a CPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from finetune.errors import InputError
from finetune.hardware.cards import Machines, parse_gpus
from finetune.planner import probed as probing
from finetune.planner.calibration import (
    ROOM,
    Calibration,
    MemoryLine,
    Probed,
    calibrate,
    error_line,
    fit_rates,
    probe_settings,
    slowed,
)
from finetune.planner.judged_rows import judged
from finetune.planner.peak_memory import needed_bytes, step_memory
from finetune.planner.question import question_about
from finetune.planner.rates import RATES
from finetune.planner.shape import shape_of
from finetune.planner.speed import Parts, step_time
from finetune.trace.probe import probe_in_child
from finetune.trace.setting import Setting

CONFIGS = json.loads((Path(__file__).parent / "model_configs.json").read_text())
SHAPE = shape_of(CONFIGS["llama-3.2-1b"]["config"])
H200 = parse_gpus("1xH200")
FULL = Setting(micro_batch_size=2, row_tokens=4096)
LORA = Setting(adapter="lora", row_tokens=8192)


def measured(setting: Setting, *, rates: Any = RATES, more_bytes: float = 0.0, more_per_token: float = 0.0) -> Probed:
    """What a machine would measure that differs from the formulas in this."""
    time = step_time(SHAPE, setting, H200, mean_document_tokens=setting.row_tokens, rates=rates)
    peak = step_memory(SHAPE, setting).peak + more_bytes + more_per_token * setting.tokens
    return Probed(setting.tokens, round(peak), time.step_seconds)


def calibrated(setting: Setting, **how: Any) -> Calibration:
    settings = probe_settings(SHAPE, setting, H200.gpu.memory_gib * 2**30)
    first, second = (measured(each, **how) for each in settings)
    return calibrate(
        SHAPE, setting, H200, mean_document_tokens=setting.row_tokens, settings=settings, probed=(first, second)
    )


@given(slope=st.floats(-1e6, 1e6), constant=st.floats(-1e10, 1e10), tokens=st.lists(st.integers(1, 10**6), min_size=3))
def test_line_through_two_points_gives_all_others(slope: float, constant: float, tokens: list[int]):
    first, second, *others = tokens
    assume(first != second)
    line = MemoryLine.through((first, constant + slope * first), (second, constant + slope * second))
    for other in others:
        allowed = 1e-9 * (abs(constant) + abs(slope) * 1e6) * (1 + 1e6 / abs(first - second))
        assert line.at(other) == pytest.approx(constant + slope * other, abs=allowed + 1e-6)


def test_straight_prediction_is_corrected_to_the_straight_line_through_both_measurements():
    formula = [Probed(tokens, 5 * tokens + 1000, 1.0) for tokens in (100, 200, 400)]
    real = (Probed(100, 2000, 1.0), Probed(200, 2700, 1.0))
    error = error_line(formula[:2], real)
    assert formula[2].peak_bytes + error.at(400) == 7 * 400 + 1300


@pytest.mark.parametrize("setting", [FULL, LORA, replace(LORA, activation_checkpointing=True)])
def test_constant_and_bytes_of_a_token_that_were_overlooked_are_found(setting: Setting):
    found = calibrated(setting, more_bytes=3 * 2**30, more_per_token=50_000.0)
    expected = step_memory(SHAPE, setting).peak + 3 * 2**30 + 50_000 * setting.tokens
    assert found.corrected.peak_bytes == pytest.approx(expected, abs=16)
    assert found.needed_bytes > needed_bytes(step_memory(SHAPE, setting), setting) + 3 * 2**30


def test_row_that_is_asked_about_may_be_longer_than_those_that_were_probed():
    setting = replace(LORA, row_tokens=65536, micro_batch_size=4)
    memory_bytes = H200.gpu.memory_gib * 2**30
    short, long = probe_settings(SHAPE, setting, memory_bytes)
    assert 2 * short.row_tokens == long.row_tokens < setting.row_tokens
    assert needed_bytes(step_memory(SHAPE, long), long) <= ROOM * memory_bytes
    found = calibrated(setting, more_bytes=2**30)
    assert found.verdict == "does not fit"
    assert found.corrected.peak_bytes == step_memory(SHAPE, setting).peak + 2**30


def test_what_fits_is_probed_at_the_length_that_is_asked_about():
    short, long = probe_settings(SHAPE, replace(FULL, accumulation=8), H200.gpu.memory_gib * 2**30)
    assert (short.row_tokens, long.row_tokens) == (2048, 4096)
    assert long.accumulation == 2  # more change neither the peak nor the time of a micro-batch


def test_model_without_any_room_is_not_probed():
    with pytest.raises(InputError, match="nothing to probe"):
        probe_settings(SHAPE, FULL, 2**33)


@pytest.mark.parametrize(("computing", "moving"), [(1.0, 1.0), (1.2, 1.5), (0.9, 1.1)])
def test_both_efficiencies_are_found_where_the_steps_tell_them_apart(computing: float, moving: float):
    rates = slowed(RATES, computing=computing, moving=moving)
    found = calibrated(replace(FULL, row_tokens=2048), rates=rates)
    assert found.rates.fitted == ("matrix_efficiency", "memory_efficiency")
    assert found.rates.rates.matrix_efficiency == pytest.approx(rates.matrix_efficiency)
    assert found.rates.rates.memory_efficiency == pytest.approx(rates.memory_efficiency)
    assert found.corrected.step_seconds == pytest.approx(
        step_time(SHAPE, replace(FULL, row_tokens=2048), H200, mean_document_tokens=2048, rates=rates).step_seconds
    )


def test_one_factor_is_fitted_where_they_do_not():
    found = calibrated(LORA, rates=slowed(RATES, computing=1.3, moving=1.3))
    assert found.rates.fitted == ("all",)
    assert found.rates.rates.memory_efficiency == pytest.approx(RATES.memory_efficiency / 1.3)
    assert found.corrected.step_seconds == pytest.approx(1.3 * found.asked.step_seconds, rel=1e-3)


def parts(**seconds: float) -> Parts:
    names = ("matrix_products", "attention", "elementwise", "weights", "loss", "launches")
    return Parts(**{name: seconds.get(name, 0.0) for name in (*names, "communication", "offload", "optimizer")})


@given(st.floats(0.2, 5), st.floats(0.2, 5))
def test_no_efficiency_beyond_the_data_sheet_is_believed(first: float, second: float):
    found = fit_rates([parts(matrix_products=1, optimizer=1), parts(matrix_products=2, optimizer=1)], [first, second])
    if "all" not in found.fitted:
        assert 0.05 < found.rates.matrix_efficiency <= 1
        assert 0.05 < found.rates.memory_efficiency <= 1


def test_nothing_is_fitted_to_a_step_that_waits_for_the_host():
    found = fit_rates([parts(matrix_products=1, launches=1), parts(matrix_products=2)], [3.0, 2.0])
    assert found.fitted == ()
    assert found.rates == RATES


def test_probe_says_what_it_found_and_json_has_its_numbers():
    question = question_about(SHAPE, FULL, H200, mean_document_tokens=4096)
    row = judged(question, FULL)
    found = calibrated(FULL, more_bytes=2**30, rates=slowed(RATES, computing=1.25, moving=1.25))
    text = "\n".join(probing.lines_of(row, found))
    assert "Probed: full fine-tuning under single" in text
    assert f"a peak of {found.corrected.peak_bytes / 2**30:.2f} GiB" in text
    assert "matrix products reach 58% of the data sheet (72% assumed)" in text
    written = json.loads(json.dumps(probing.record_of(row, found)))
    assert written["corrected"]["peak_bytes"] == found.asked.peak_bytes + 2**30
    assert written["rates"]["matrix_efficiency"] == pytest.approx(0.72 / 1.25)


def test_speed_of_an_unknown_card_is_not_corrected():
    question = question_about(SHAPE, FULL, H200, mean_document_tokens=4096)
    unknown = replace(calibrated(FULL), knows_speed=False)
    assert "nothing is said of its speed" in probing.lines_of(judged(question, FULL), unknown)[-1]


def test_other_gpus_than_the_one_that_is_here_are_refused_in_a_sentence():
    question = question_about(SHAPE, FULL, H200, mean_document_tokens=4096)
    row = judged(question, FULL)
    assert probing.row_to_probe((row,), question, Machines(H200.gpu, 8)) is row
    with pytest.raises(InputError, match="measures the H100 that is here"):
        probing.row_to_probe((row,), question, parse_gpus("1xH100"))
    sharded = replace(row, setting=replace(FULL, strategy="fsdp2", world_size=2))
    with pytest.raises(InputError, match="ask about --gpus 1xH200"):
        probing.row_to_probe((sharded,), question, H200)


@pytest.mark.slow
def test_steps_are_taken_by_the_recipes_own_pieces():
    """On the CPU, where time is measured and memory is not."""
    setting = Setting(
        row_tokens=32, adapter="lora", bits=4, rank=4, packing=True, activation_checkpointing=True, accumulation=2
    )
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300}
    config = CONFIGS["smollm2-135m"]["config"] | small | {"num_attention_heads": 4, "num_key_value_heads": 2}
    found = probe_in_child(config, [setting, replace(setting, row_tokens=64)])
    assert [each.tokens for each in found] == [32, 64]
    assert all(each.step_seconds > 0 for each in found)
