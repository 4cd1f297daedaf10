"""The plan of rows that several GPUs compute together: operations and traffic by hand, and when it is proposed."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from plan_models import arithmetic
from test_plan_choose import GIB, LLAMA_8B, row_of
from tracing import begun, traced_step

from finetune.cli.planning.launch_command import launcher_flags
from finetune.hardware.cards import parse_gpus
from finetune.hardware.rates import rates_of
from finetune.planner.candidates import candidates, is_pointless
from finetune.planner.changes import LONG_ROW_TOKENS
from finetune.planner.communication import transfers
from finetune.planner.judged_rows import Row
from finetune.planner.nearest import nearest_that_fits
from finetune.planner.possible import why_not
from finetune.planner.question import Question, question_about
from finetune.planner.speed import Parts, StepTime
from finetune.trace.setting import Setting
from finetune.trace.shallow import Step

LAYERS, HEADS, KEY_HEADS, WIDTH = 3, 8, 4, 8
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HEADS * WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
TOKENS = 512
ALONE = Setting("fsdp2", 4, row_tokens=TOKENS, layout="flat", accumulation=2)
TOGETHER = [replace(ALONE, strategy=strategy, context=context) for strategy in ("cp", "ulysses") for context in (2, 4)]
MACHINES = parse_gpus("4xH100")


@pytest.fixture(scope="module", autouse=True)
def steps() -> "Iterator[dict[Setting, Future[Step]]]":
    calls = {each: partial(traced_step, SMALL, each, row_tokens=TOKENS) for each in (ALONE, *TOGETHER)}
    with begun(calls) as found:
        yield found


def flops_of_attention(step: Step, setting: Setting) -> float:
    """Of a micro-batch of one row on one GPU, forward and backward."""
    micro_batch = step.micro_batch(1, setting.own_row_tokens)
    every = (each for each in step.kernels if each.kind == "attention")
    return sum(each.calls * micro_batch.value(each.flops) for each in every) / step.micro_batches


@pytest.mark.parametrize("setting", TOGETHER, ids=str)
def test_each_gpu_does_its_share_of_the_attention_of_a_row(setting: Setting, steps: "dict[Setting, Future[Step]]"):
    whole = flops_of_attention(steps[ALONE].result(), ALONE)
    assert whole == pytest.approx((1 + 2.5) * LAYERS * 2 * TOKENS**2 * HEADS * WIDTH)
    assert flops_of_attention(steps[setting].result(), setting) == pytest.approx(whole / setting.context)


@pytest.mark.parametrize("setting", TOGETHER, ids=str)
def test_what_positions_need_of_one_another_is_sent_in_each_layer(
    setting: Setting, steps: "dict[Setting, Future[Step]]"
):
    sent = transfers(steps[setting].result(), setting, MACHINES, rates_of(MACHINES.gpu))
    found = {each.what: each for each in sent if " of rows " in each.what}
    times, size = LAYERS * setting.accumulation, setting.context
    own, others = 2 * WIDTH * TOKENS / size, (size - 1) / size  # bytes of a head's positions here; elsewhere
    if setting.strategy == "cp":
        rows = 2 * KEY_HEADS * size * own
        expected = {"all-gather of rows in the forward pass": rows, "reduce-scatter of rows in the backward pass": rows}
    else:
        heads = 2 * HEADS + 2 * max(KEY_HEADS, size)  # queries and outputs, keys and values
        expected = {f"all-to-all of rows in the {name} pass": heads * own for name in ("forward", "backward")}
    assert {what: each.bytes for what, each in found.items()} == pytest.approx(
        {what: others * times * row for what, row in expected.items()}
    )
    assert not any(each.overlaps for each in found.values())


def question(setting: Setting, gpus: str = "8xH100") -> Question:
    return question_about(LLAMA_8B, setting, parse_gpus(gpus), mean_document_tokens=setting.row_tokens)


def test_the_fewest_gpus_for_each_row_are_proposed_where_nothing_milder_fits():
    start = Setting("fsdp2", 8, row_tokens=65536, layout="flat", accumulation=2)

    def judge(asked: Question, setting: Setting) -> Row:
        row = row_of(asked, setting, 10 * GIB if setting.context >= 4 else 100 * GIB)
        return replace(row, time=StepTime(Parts(1.0, 0, 0, 0, 0, 0, 0), 1000, 1.0, 1.0, (), None))

    found = nearest_that_fits(question(start), start, judge)
    assert found is not None
    assert found.text == "launch with accelerate_configs/cp.yaml --parallelism_config_cp_size 4"
    assert found.row.setting.accumulation == 8  # of the same global batch


def test_no_gpus_share_rows_that_are_padded():
    padded = Setting("cp", 8, context=2, row_tokens=65536)
    assert "has its own attention" in (why_not(LLAMA_8B, padded) or "")
    assert why_not(LLAMA_8B, replace(padded, layout="flat")) is None


@pytest.mark.parametrize(("strategy", "tokens"), [("cp", LONG_ROW_TOKENS), ("cp", 1024), ("ulysses", LONG_ROW_TOKENS)])
def test_long_rows_are_compared_with_shared_ones_without_being_asked(strategy: str, tokens: int):
    is_left_out = is_pointless(strategy, parse_gpus("8xH100"), tokens)
    assert is_left_out == (strategy != "cp" or tokens < LONG_ROW_TOKENS)
    asked = replace(question(replace(ALONE, world_size=8)), strategies=(strategy,), global_batch_size=8)
    rows, left_out = candidates(asked, lambda of, setting: row_of(of, setting, GIB))
    assert [row.setting.context for row in rows] == [2, 4, 8]  # by name
    assert left_out == []


def test_a_row_that_several_gpus_compute_needs_no_rows_for_the_others():
    asked = replace(question(ALONE), global_batch_size=2, micro_batch_size=None)
    assert asked.ways(replace(ALONE, world_size=8), checkpointing=False) == []
    (way,) = asked.ways(replace(ALONE, strategy="cp", world_size=8, context=4), checkpointing=False)
    assert (way.micro_batch_size, way.accumulation, way.tokens) == (1, 1, TOKENS // 4)


@pytest.mark.parametrize(("strategy", "flag"), [("cp", "cp_size"), ("ulysses", "sp_size")])
def test_the_command_says_how_many_gpus_compute_a_row(strategy: str, flag: str):
    words = launcher_flags(replace(ALONE, strategy=strategy, context=4), MACHINES)
    assert [f"--parallelism_config_{flag}", "4"] in words


def test_heads_that_gpus_cannot_share_are_no_option():
    odd = arithmetic("llama-3.1-8b", num_attention_heads=33, num_key_value_heads=11)
    settings = [Setting(strategy, 8, context=2, layout="flat") for strategy in ("cp", "ulysses")]
    assert why_not(odd, settings[0]) is None
    assert "shares the attention heads among 2 processes" in (why_not(odd, settings[1]) or "")
