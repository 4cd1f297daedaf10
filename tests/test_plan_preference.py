"""What a practitioner would take: the simplest of the fastest, on the GPUs, and told what it gives up and needs."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_models import arithmetic
from test_plan_choose import question, row_of

from finetune.cli.planning.largest_term import STATE, TERMS, levers, sentence
from finetune.cli.planning.launch_command import in_lines, launch_command
from finetune.cli.planning.reasons import reasons
from finetune.config.strategy_names import IN_PARTS, SHARDED_PARTS, STRATEGIES, TOGETHER
from finetune.planner import candidates as module_of_candidates
from finetune.planner.candidates import fastest
from finetune.planner.choose import plan
from finetune.planner.judged_rows import Row, judged
from finetune.planner.preference import SIMPLEST_FIRST, in_order
from finetune.planner.question import METHODS, Question
from finetune.planner.speed import Parts, StepTime
from finetune.trace.setting import Setting

GIB = 2**30
LLAMA_8B = arithmetic("llama-3.1-8b")
LLAMA_70B = arithmetic("llama-3.1-70b")


def row_at(strategy: str, tokens_per_second: float, gpus: str = "2x4xH100", **fields: object) -> Row:
    """A row that fits, of a speed that is given."""
    asked = question(gpus)
    setting = replace(asked.base, strategy=strategy, **fields)  # type: ignore[arg-type]
    time = StepTime(Parts(1.0, 0, 0, 0, 0, 0, 0), int(tokens_per_second), 1.0, 1.0, (), None)
    return replace(row_of(asked, setting, GIB), time=time)


def test_simplest_strategies_are_those_that_need_least():
    assert SIMPLEST_FIRST[:7] == ("single", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3")
    assert set(SIMPLEST_FIRST) == set(STRATEGIES)


ON_GPUS = ("ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", *TOGETHER, *IN_PARTS, *SHARDED_PARTS)


@settings(max_examples=100, deadline=None)
@given(speeds=st.dictionaries(st.sampled_from(SIMPLEST_FIRST[1:]), st.integers(800, 1200), min_size=1))
def test_first_is_the_simplest_on_the_gpus_within_a_tenth_of_the_fastest(speeds: dict[str, int]):
    first = in_order([row_at(strategy, speed) for strategy, speed in speeds.items()], question("2x4xH100").base)[0]
    candidates = {strategy: speed for strategy, speed in speeds.items() if strategy in ON_GPUS} or speeds
    equal = [strategy for strategy, speed in candidates.items() if speed >= 0.9 * max(candidates.values())]
    assert first.setting.strategy == min(equal, key=SIMPLEST_FIRST.index)


@settings(max_examples=100, deadline=None)
@given(speeds=st.lists(st.integers(1, 1000), min_size=1, max_size=12))
def test_no_row_stands_behind_one_that_is_slower_by_more_than_a_tenth(speeds: list[int]):
    rows = [row_at(ON_GPUS[number % 6], speed, rank=number + 1) for number, speed in enumerate(speeds)]
    ordered = in_order(rows, question("2x4xH100").base)
    assert sorted(map(id, ordered)) == sorted(map(id, rows))
    for before, after in pairwise(ordered):
        assert before.time.tokens_per_second >= 0.9 * after.time.tokens_per_second


def test_16_bits_come_before_4_where_speeds_are_equal_and_what_is_trained_is_decided_by_speed():
    base = question("2x4xH100").base
    rows = [
        row_at("ddp", 1000, adapter="lora", bits=4),
        row_at("ddp", 950, adapter="lora"),
        row_at("ddp", 940, adapter="none"),
    ]
    assert [row.setting.method.text for row in in_order(rows, base)] == ["LoRA", "full", "QLoRA"]


def test_setting_without_checkpointing_and_with_a_small_micro_batch_is_taken_where_speeds_are_equal(
    monkeypatch: pytest.MonkeyPatch,
):
    """Where a larger micro-batch would be faster without checkpointing, and does not fit."""
    speeds = {(False, 1): 990.0, (True, 8): 1000.0, (False, 8): 1100.0}

    def speed(asked: Question, setting: Setting) -> float:
        return speeds.get((setting.activation_checkpointing, setting.micro_batch_size), 900.0)

    def judge(asked: Question, setting: Setting) -> Row:
        is_too_large = setting.micro_batch_size == 8 and not setting.activation_checkpointing
        return row_of(asked, setting, 100 * GIB if is_too_large else GIB)

    asked = question()
    monkeypatch.setattr(module_of_candidates, "_tokens_per_second", speed)
    for slow, chosen in ((990.0, (False, 1)), (989.0, (True, 8))):
        speeds[(False, 1)] = slow
        found = fastest(asked, replace(asked.base, strategy="fsdp2"), judge).setting
        assert (found.activation_checkpointing, found.micro_batch_size) == chosen


@pytest.mark.parametrize(
    ("gpus", "strategies", "there"),
    [
        ("8xH100", STRATEGIES, False),
        ("8xH100", ("hsdp",), True),
        ("2x8xH100", STRATEGIES, True),
    ],
)
def test_hsdp_is_compared_on_several_machines_or_by_name(gpus: str, strategies: tuple[str, ...], there: bool):
    answer = plan(question(gpus, strategies=strategies, methods=(METHODS["full"],)))
    assert ("hsdp" in {row.setting.strategy for row in answer.rows}) == there


REDUCTIONS = (("fp32_master", "adamw"), ("fp32_master", "adamw_8bit"), ("bf16", "adamw"), ("bf16", "adamw_8bit"))


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([10, 75, 100]), min_size=4, max_size=4),
    chosen=st.sets(st.sampled_from(["weights", "optimizer"])),
)
def test_bf16_weights_and_8_bit_state_are_tried_before_offload_the_mildest_first(sizes: list[int], chosen: set[str]):
    gib = dict(zip(REDUCTIONS, sizes, strict=True))
    asked = question(methods=(METHODS["full"],), chosen=frozenset(chosen))

    def judge(asked: Question, setting: Setting) -> Row:
        size = 10 if setting.strategy.endswith(("offload", "nvme")) else gib[(setting.weights, setting.optimizer)]
        return row_of(asked, setting, size * GIB)

    answer = plan(asked, judge)
    assert answer.best is not None
    best, reason = answer.best, " ".join(reasons(answer))
    allowed = [pair for pair in REDUCTIONS if not ("weights" in chosen and pair[0] == "bf16")]
    allowed = [pair for pair in allowed if not ("optimizer" in chosen and pair[1] == "adamw_8bit")]
    fitting = [pair for pair in allowed if gib[pair] == 10]
    assert best.offloads == (not fitting)
    taken = fitting[0] if fitting else REDUCTIONS[0]
    assert (best.setting.weights, best.setting.optimizer) == taken
    assert ("no fp32 master copy: their updates are rounded stochastically" in reason) == (taken[0] == "bf16")
    assert ("moments in 8 bits, block-wise" in reason) == (taken[1] == "adamw_8bit")
    assert ("Leave out" in reason) == (best.offloads and bool(chosen))


@pytest.mark.parametrize(("gpus", "are_tried"), [("1x24GB", False), ("1xH100", True)])
def test_reductions_are_traced_only_where_half_of_weights_and_gradients_fit(gpus: str, are_tried: bool):
    """Of 8 billion weights they take 32 GB."""
    asked = question(gpus, model=arithmetic("llama-3.1-8b"), methods=(METHODS["full"],))
    plan(asked)
    traced = [setting for together in asked.model.tracer.rounds for setting in together]
    assert any((setting.weights, setting.optimizer) != ("fp32_master", "adamw") for setting in traced) == are_tried


def test_70b_on_8_gpus_is_trained_in_bf16_with_8_bit_state_and_not_offloaded():
    """Which offloads at a third of the speed, and needs more host memory than most machines have."""
    asked = question(model=LLAMA_70B, batch=16, methods=(METHODS["full"],))
    answer = plan(asked)
    assert answer.best is not None
    best, reason = answer.best, " ".join(reasons(answer))
    assert (best.setting.strategy, best.setting.weights, best.setting.optimizer) == ("fsdp2", "bf16", "adamw_8bit")
    command = in_lines(launch_command(asked, best.setting))
    assert "--train.weights bf16" in command
    assert "--train.optimizer adamw_8bit" in command
    offloaded = next(row for row in answer.rows if row.offloads and row.verdict == "fits")
    assert best.time.tokens_per_second > 2 * offloaded.time.tokens_per_second
    assert f"{offloaded.setting.strategy} reaches" in reason
    assert f"{offloaded.host.bytes / GIB:,.0f} GiB of host memory per machine" in reason


def test_what_may_just_fit_on_the_gpu_is_told_where_offload_is_recommended():
    asked = question("1x10.4GiB", model=LLAMA_8B, batch=16, host_bytes=16 * GIB)
    answer = plan(asked)
    assert answer.best is not None
    assert answer.best.offloads
    tight = next(row for row in answer.rows if row.verdict == "tight" and not row.offloads)
    first, *others = reasons(answer)
    assert first.startswith("On the GPU alone no option leaves a tenth of the memory free: ")
    assert (
        sum(f"Without offload {tight.name} may just fit (97% of the GPU), at" in sentence for sentence in others) == 1
    )


@pytest.mark.parametrize("there", [None, 4000 * GIB])
@pytest.mark.parametrize("strategies", [STRATEGIES, ("fsdp2_offload",), ("zero3_nvme",)])
def test_host_memory_of_what_offloads_is_told(there: int | None, strategies: tuple[str, ...]):
    asked = question(model=LLAMA_70B, batch=16, methods=(METHODS["full"],), strategies=strategies, host_bytes=there)
    asked = replace(asked, chosen=frozenset({"weights", "optimizer"}))
    answer = plan(asked)
    assert answer.best is not None
    assert answer.best.offloads
    reason = " ".join(reasons(answer))
    of_there = "" if there is None else " of 4,000"
    assert f"{answer.best.host.bytes / GIB:,.0f}{of_there} GiB of host memory per machine" in reason
    assert ("see --host-memory" in reason) == (there is None)
    assert ("Nothing fits on the GPUs alone" in reason) == (strategies == STRATEGIES)


CHECKPOINTED: dict[str, Any] = {"activation_checkpointing": True}
LORA: dict[str, Any] = {"adapter": "lora", **CHECKPOINTED}
REDUCED: dict[str, Any] = {"optimizer": "adamw_8bit", "weights": "bf16", **CHECKPOINTED}
ON_ROWS = "a smaller micro-batch or shorter rows"
LARGEST = [
    (Setting("fsdp2", 8, micro_batch_size=2), "activations", f"activation checkpointing, {ON_ROWS}"),
    (Setting("fsdp2", 8, **CHECKPOINTED), STATE, "8-bit optimizer state, bf16 weights or an adapter"),
    (Setting("ddp", 8, **REDUCED), STATE, "sharding with fsdp2 or an adapter"),
    (Setting("zero2", 8, **LORA), "weights", "sharding with fsdp2 or 4-bit weights"),
    (Setting(micro_batch_size=16, **LORA), "logits and loss", "shorter rows"),
    (Setting("fsdp2_offload", 8, row_tokens=256, **CHECKPOINTED), "gathered layers and buckets", "an adapter"),
]
"""A setting of an 8B model, the largest term of its peak, and what is not pulled yet of what shrinks it."""


@pytest.mark.parametrize(("setting", "term", "named"), LARGEST)
def test_largest_term_is_named_with_what_would_shrink_it(setting: Setting, term: str, named: str):
    asked = question(f"{setting.world_size}xH100", model=LLAMA_8B, base=setting, mean_document_tokens=256)
    row = judged(asked, setting)
    size = sum(row.memory.parts[part] for part in TERMS[term])
    assert size == max(sum(row.memory.parts[part] for part in parts) for parts in TERMS.values())
    start = f"{term[0].upper()}{term[1:]} are the largest part of the peak ({size / GIB:.1f} GiB)"
    assert sentence(asked, row) == f"{start}; {named} would shrink them."
    found = levers(asked, setting, term)
    assert [words for words, _ in found] == re.split(", | or ", named)
    for words, changed in found:
        smaller = LLAMA_8B.memory(changed)
        assert smaller.peak < row.memory.peak, words


def test_where_nothing_fits_the_largest_term_of_the_nearest_miss_is_named():
    asked = question("1x24GB", batch=1, model=LLAMA_8B, strategies=("single",), methods=(METHODS["full"],))
    sentences = reasons(plan(asked))
    assert "The nearest option that fits is LoRA under single" in sentences[0] or "QLoRA under single" in sentences[0]
    assert re.search("largest part of the peak of full fine-tuning under single .* would shrink them", sentences[-1])
