"""Where a setting does not fit: the nearest one that does, by the fewest and mildest changes."""

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_models import arithmetic
from test_plan_choose import GIB, LLAMA_8B, SMALL, row_of

from finetune.hardware.cards import parse_gpus
from finetune.planner.candidates import Judge
from finetune.planner.judged_rows import Row, judged
from finetune.planner.memory import needed_bytes
from finetune.planner.model import Model
from finetune.planner.nearest import Nearest, nearest_that_fits
from finetune.planner.question import Question, question_about
from finetune.trace.setting import Setting

CHANGES = {
    "train.micro_batch_size": lambda setting: setting.micro_batch_size == 1,
    "train.activation_checkpointing": lambda setting: setting.activation_checkpointing,
    "train.optimizer": lambda setting: setting.optimizer == "adamw_8bit",
    "train.weights": lambda setting: setting.weights == "bf16",
    "strategy": lambda setting: setting.strategy != "ddp",
    "adapter.type": lambda setting: setting.adapter == "lora",
    "quantization.bits": lambda setting: setting.bits == 4,
    "data.max_length": lambda setting: setting.row_tokens <= 512,
}


def nearest(model: Model, start: Setting, gpus: str, judge: Judge = judged, **known: int) -> Nearest | None:
    asked = question_about(model, start, parse_gpus(gpus), mean_document_tokens=start.row_tokens)
    return nearest_that_fits(replace(asked, **known), start, judge)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(needed=st.sets(st.sampled_from(sorted(CHANGES))))
def test_nearest_that_fits_changes_what_is_needed_and_nothing_else(needed: set[str]):
    """Where exactly some changes make a run fit, these are proposed."""
    needed |= {"adapter.type"} if "quantization.bits" in needed else set()
    start = Setting("ddp", 4, row_tokens=2048, micro_batch_size=2, accumulation=2)

    def judge(asked: Question, setting: Setting) -> Row:
        return row_of(asked, setting, 10 * GIB if all(CHANGES[key](setting) for key in needed) else 100 * GIB)

    found = nearest(SMALL, start, "4xH100", judge)
    assert found is not None
    assert set(found.changes) | ({"strategy"} if found.strategy else set()) == needed
    assert found.row.setting.micro_batch_size * found.row.setting.accumulation == 4
    if "data.max_length" in needed:
        assert found.changes["data.max_length"] == "512"
    assert all(f"{key} to {value}" in found.text for key, value in found.changes.items())


def test_a_milder_change_is_proposed_before_a_harsher_one():
    start = Setting("ddp", 4, row_tokens=2048, micro_batch_size=4, accumulation=1)

    def judge(asked: Question, setting: Setting) -> Row:
        enough = setting.micro_batch_size <= 2 or setting.adapter == "lora" or setting.row_tokens < 2048
        return row_of(asked, setting, GIB if enough else 100 * GIB)

    found = nearest(SMALL, start, "4xH100", judge)
    assert found is not None
    assert (found.changes, found.strategy) == ({"train.micro_batch_size": "2"}, None)


def test_harsher_changes_are_made_only_where_all_milder_ones_are_not_enough():
    """The order of the changes: each alone is enough, and the mildest that is left is taken."""
    start = Setting("ddp", 4, row_tokens=2048, micro_batch_size=2, accumulation=2)
    mildest_first = [
        "train.micro_batch_size",
        "train.activation_checkpointing",
        "strategy",
        "train.optimizer",
        "train.weights",
        "adapter.type",
    ]
    for number, mildest in enumerate(mildest_first):
        enough = mildest_first[number:]

        def judge(asked: Question, setting: Setting, enough: list[str] = enough) -> Row:
            return row_of(asked, setting, 10 * GIB if any(CHANGES[key](setting) for key in enough) else 100 * GIB)

        found = nearest(SMALL, start, "4xH100", judge)
        assert found is not None
        assert [*found.changes, *(["strategy"] if found.strategy else [])] == [mildest]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["fsdp2_offload", "zero3_offload", "zero3_nvme"])
def test_nearest_to_what_needs_too_much_host_memory_stays_on_the_gpus(strategy: str, precision: str):
    start = Setting(strategy, 8, row_tokens=2048, micro_batch_size=2, precision=precision)
    found = nearest(LLAMA_8B, start, "8xH100", host_bytes=40 * GIB)
    assert found is not None
    assert not found.row.offloads
    assert found.strategy not in (None, "hsdp")
    assert found.row.setting.weights == "fp32_master"


def test_nearest_says_what_bf16_weights_give_up():
    found = nearest(LLAMA_8B, Setting(row_tokens=2048), "1xH100")
    assert found is not None
    assert found.changes["train.weights"] == "bf16"
    assert any("no fp32 master copy" in sentence for sentence in found.given_up)


def test_nearest_that_fits_is_none_where_nothing_does():
    def judge(asked: Question, setting: Setting) -> Row:
        return row_of(asked, setting, 1000 * GIB)

    assert nearest(SMALL, Setting(row_tokens=2048), "1xH100", judge) is None


def test_rows_are_not_cut_for_a_tenth_of_the_memory_that_is_left_free():
    start = Setting("ddp", 4, row_tokens=2048, micro_batch_size=2, accumulation=2)

    def judge(asked: Question, setting: Setting) -> Row:
        there = asked.machines.gpu.memory_gib * GIB
        return row_of(asked, setting, (0.95 if setting.row_tokens == 2048 else 0.1) * there)

    found = nearest(SMALL, replace(start, micro_batch_size=1), "4xH100", judge)
    assert found is not None
    assert (found.row.verdict, "data.max_length" in found.changes) == ("tight", False)


def test_nearest_of_an_8b_model_fits():
    start = Setting("ddp", 8, row_tokens=4096, micro_batch_size=4, accumulation=2)
    found = nearest(LLAMA_8B, start, "8xH100")
    assert found is not None
    memory = LLAMA_8B.memory(found.row.setting)
    assert needed_bytes(memory, found.row.setting) <= 0.9 * 79.1 * GIB
    assert found.row.setting.adapter == "none"  # sharding suffices
    assert math.isclose(found.row.gpu.there or 0, 79.1 * GIB, abs_tol=1)
    assert asdict(found.row.setting)["world_size"] == 8


def test_what_is_tried_in_place_of_a_setting_that_does_not_fit_is_traced_together():
    model = arithmetic("llama-3.1-8b")
    start = Setting("ddp", 8, row_tokens=4096, micro_batch_size=4, accumulation=2)
    assert nearest(model, start, "8x12GB") is not None
    assert {each.strategy for each in model.tracer.rounds[0]} == {"fsdp2", "zero1", "zero2", "zero3"}
