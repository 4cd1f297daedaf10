"""The plan of a pipeline: each stage by the trace of the whole model, and held against what real stages hold."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import live_bytes
import pytest
import scenarios
import tiny
from test_plan_choose import GIB, LLAMA_8B, row_of
from tracing import begun, traced_anatomy, traced_step

from finetune.cli.planning.launch_command import launcher_flags, recipe_flags
from finetune.errors import InputError
from finetune.hardware.cards import parse_gpus
from finetune.planner import pipelines
from finetune.planner.candidates import candidates, splits
from finetune.planner.changes import in_plain_order, sharded, spread
from finetune.planner.choose import plan
from finetune.planner.memory import step_memory
from finetune.planner.possible import why_not
from finetune.planner.question import question_about
from finetune.planner.speed import step_time
from finetune.trace.layers import Anatomy
from finetune.trace.partly import partly_recomputed
from finetune.trace.setting import Setting
from finetune.trace.shallow import Step

LAYERS, TOKENS = 12, 64
SINGLE = Setting(row_tokens=TOKENS, accumulation=2, layout="flat")
AGAIN = replace(SINGLE, activation_checkpointing=True)
IN_FP32 = replace(SINGLE, precision="no", layout="padded")
STAGES = 3
PIPELINE = replace(SINGLE, strategy="pp", world_size=STAGES, stages=STAGES, accumulation=4)
ROUNDING = 512
"""Bytes to whose multiples each block is rounded up in a step."""


@pytest.fixture(scope="module", params=[pytest.param(True, marks=pytest.mark.prove), False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tiny.build_model_folder(tmp_path_factory.mktemp("deep"), tied=request.param)
    described = json.loads((found / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (found / "config.json").write_text(json.dumps(described))
    return found


@pytest.fixture(scope="module")
def traces(folder: Path) -> "Iterator[dict[Any, Future[Any]]]":
    config = json.loads((folder / "config.json").read_text())
    asked = (SINGLE, AGAIN, IN_FP32)
    calls: dict[Any, Any] = {each: partial(traced_step, config, each, row_tokens=TOKENS) for each in asked}
    with begun(calls | {"anatomy": partial(traced_anatomy, config)}) as found:
        yield found


@pytest.fixture(scope="module")
def step(traces: "dict[Any, Future[Step]]") -> Step:
    return traces[SINGLE].result()


@pytest.fixture(scope="module")
def anatomy(traces: "dict[Any, Future[Anatomy]]") -> Anatomy:
    return traces["anatomy"].result()


def test_a_pipeline_of_one_stage_is_the_model_on_one_gpu(traces: "dict[Any, Future[Step]]", anatomy: Anatomy):
    step, whole = traces[IN_FP32].result(), pipelines.Stage(0, 1, ((0, LAYERS),), 1.0)
    micro_batch = step.micro_batch(1, TOKENS)
    found = pipelines.moments_of(step, IN_FP32, whole, micro_batch, anatomy)
    expected = step.moments(micro_batch, accumulation=IN_FP32.accumulation)
    assert [(each.phase, each.bytes) for each in found] == [(each.phase, each.bytes) for each in expected]
    assert pipelines.kernels_of(step, IN_FP32, whole) == [each for each in step.kernels if each.phase != "step"]
    assert pipelines.trained_share(step, whole) == 1


def test_weights_gradients_and_state_of_stages_are_those_that_real_stages_hold(
    step: Step, anatomy: Anatomy, folder: Path, ranks: Any, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(folder, conversations, tmp_path, train__steps=2, train__micro_batch_size=2)
    everyone = ranks(2).run(live_bytes.bytes_held, config, strategy="pp", mixed_precision="bf16")
    two = replace(PIPELINE, world_size=2, stages=2)
    micro_batch = step.micro_batch(2, TOKENS)
    for stage, real in zip(pipelines.stages_of(two, anatomy), everyone, strict=True):
        every = pipelines.moments_of(step, two, stage, micro_batch, anatomy)
        found = max((each for each in every if each.phase == "step"), key=lambda each: each.bytes).categories
        room = ROUNDING * (len(real["tensors"]) + 2)
        assert found["weights"] == pytest.approx(real["parameters"], abs=room)
        assert found["gradients"] == pytest.approx(real["gradients"], abs=room)
        assert found["optimizer"] == pytest.approx(real["state"], abs=3 * room)


def test_a_stage_keeps_the_micro_batches_that_are_ahead_of_it(step: Step, anatomy: Anatomy):
    micro_batch = step.micro_batch(1, TOKENS)
    kept, found = pipelines.kept_by_layer(step, micro_batch), []
    for micro_batches in (2, 8):
        asked = replace(PIPELINE, accumulation=micro_batches)
        highest = []
        for stage in pipelines.stages_of(asked, anatomy):
            every = pipelines.moments_of(step, asked, stage, micro_batch, anatomy)
            highest.append(max(each.categories["activations"] for each in every if each.phase == "backward"))
        found.append(highest)
    layers = [each.layers for each in pipelines.stages_of(PIPELINE, anatomy)]
    assert sum(layers) == LAYERS
    hidden = 2 * TOKENS * anatomy.width
    for number, (two, eight) in enumerate(zip(*found)):
        neighbours = 1 if number in (0, STAGES - 1) else 2
        more = 1 if number == 0 else 0  # 3, 2 and 1 ahead, of 8; 2, 2 and 1 of 2
        assert eight - two == pytest.approx(layers[number] * kept * more + 6 * neighbours * hidden)


def test_the_stage_that_needs_most_is_told(step: Step, anatomy: Anatomy):
    micro_batch = step.micro_batch(1, TOKENS)
    peaks = [
        max(each.bytes for each in pipelines.moments_of(step, PIPELINE, stage, micro_batch, anatomy))
        for stage in pipelines.stages_of(PIPELINE, anatomy)
    ]
    memory = step_memory(step, PIPELINE, anatomy)
    assert memory.peak - memory.parts["workspace"] == pytest.approx(max(peaks), rel=0.01)
    assert max(size for _, parts in memory.course for size in parts.values()) > 0


def test_stages_wait_for_one_another_less_with_more_micro_batches(step: Step, anatomy: Anatomy):
    machines, shares = parse_gpus("3xH100"), []
    for micro_batches in (1, 4, 64):
        asked = replace(PIPELINE, accumulation=micro_batches)
        time = step_time(step, asked, machines, anatomy, mean_document_tokens=TOKENS)
        assert time.tokens == TOKENS * micro_batches
        busy = time.step_seconds - time.parts.communication - time.parts.optimizer
        shares.append(time.parts.idle / busy)
    # (s - 1) / (m + s - 1) where stages are equal; here one has no less than three quarters of another's work
    assert shares == pytest.approx([(STAGES - 1) / (m + STAGES - 1) for m in (1, 4, 64)], rel=0.25)


def test_hidden_states_are_sent_once_a_micro_batch_and_gradients_of_replicas_once_a_step(step: Step, anatomy: Anatomy):
    asked = replace(PIPELINE, world_size=2 * STAGES)
    time = step_time(step, asked, parse_gpus("6xH100"), anatomy, mean_document_tokens=TOKENS)
    sent = {each.what: each.bytes for each in time.transfers}
    stages = pipelines.stages_of(asked, anatomy)
    trained = max(pipelines.trained_share(step, stage) for stage in stages) * anatomy.parameters
    assert sent == {
        "hidden states to the next stage": 4 * TOKENS * anatomy.width * 2,
        "gradients to the stage before": 4 * TOKENS * anatomy.width * 2,
        "all-reduce over replicas": pytest.approx(4 * trained),  # 2 (n - 1) / n of 4 bytes
    }


@pytest.mark.parametrize("recomputed", [2, 6, 12])
def test_layers_that_are_recomputed_are_the_first_of_the_model(
    recomputed: int, step: Step, traces: "dict[Any, Future[Step]]", anatomy: Anatomy
):
    """The first of three stages recomputes all of its layers, some of them, or none."""
    again = traces[AGAIN].result()
    partly = partly_recomputed(step, again, layers=recomputed) if recomputed < LAYERS else again
    micro_batch = step.micro_batch(1, TOKENS)

    def peaks(of: Step) -> list[float]:
        stages = pipelines.stages_of(PIPELINE, anatomy)
        every = (pipelines.moments_of(of, PIPELINE, each, micro_batch, anatomy) for each in stages)
        return [max(moment.bytes for moment in moments) for moments in every]

    found, none, all_ = peaks(partly), peaks(step), peaks(again)
    for stage, size, kept, whole in zip(pipelines.stages_of(PIPELINE, anatomy), found, none, all_, strict=True):
        ((first, end),) = stage.spans
        if first >= recomputed:
            assert size == kept
        elif end <= recomputed:
            assert size == whole
        else:
            assert whole < size < kept
    machines = parse_gpus("3xH100")
    of_both = (step_time(each, PIPELINE, machines, anatomy, mean_document_tokens=TOKENS) for each in (partly, again))
    some, every = (time.parts.seconds for time in of_both)
    assert some <= every * (1 + 1e-9)


def test_from_a_pipeline_that_does_not_fit_others_and_deeper_ones_are_tried():
    setting = Setting("pp", 8, stages=2, accumulation=4, layout="flat")
    found = {(each.strategy, each.stages, each.accumulation) for each in sharded(setting)}
    assert {("pp", 4, 8), ("pp", 8, 16), ("fsdp2", 1, 2), ("zero3", 1, 2)} <= found
    assert all(each.data_processes * each.accumulation == 16 for each in sharded(setting))
    of_few_rows = {each.strategy for each in sharded(replace(setting, accumulation=1))}
    assert of_few_rows == {"pp", "fsdp2_pp"}  # 4 for 8 GPUs
    assert spread(setting) == []


def test_hand_overs_of_several_machines_take_the_network():
    step = LLAMA_8B.tracer.step(Setting())
    found = []
    for gpus, stages in (("16xH100", 4), ("2x8xH100", 4), ("2x8xH100", 16)):
        machines = parse_gpus(gpus)
        setting = Setting("pp", 16, stages=stages, accumulation=4, row_tokens=2048, layout="flat")
        time = step_time(step, setting, machines, LLAMA_8B.anatomy, mean_document_tokens=2048)
        found.append(time.transfers[0].seconds_of_one)
    assert found[0] < found[1] == pytest.approx(found[2])


@pytest.mark.parametrize(
    ("gpus", "batch", "words"),
    [
        ("1xH100", 4, "use a multiple of 2 GPUs"),
        ("37x1xH100", 37, "use a multiple of 2 GPUs"),  # a prime number, and more than there are layers
        ("4xH100", 1, "global_batch_size"),
    ],
)
def test_where_no_number_of_stages_is_possible_a_sentence_says_why(gpus: str, batch: int, words: str):
    asked = question_about(LLAMA_8B, Setting(layout="flat"), parse_gpus(gpus), mean_document_tokens=2048)
    asked = replace(asked, base=replace(asked.base, world_size=asked.machines.world_size), global_batch_size=batch)
    if batch == 1:  # one replica of four stages takes a row a step; two of two do not
        rows, left_out = candidates(replace(asked, strategies=("pp",)), lambda of, setting: row_of(of, setting, GIB))
        assert {row.setting.stages for row in rows} == {4}
        assert words in left_out[0].why
        return
    with pytest.raises(InputError, match=words):
        plan(replace(asked, strategies=("pp",)))


def test_processes_of_a_quantised_pipeline_may_each_quantise_all_of_it_in_host_memory():
    setting = Setting("pp", 8, adapter="lora", bits=4, stages=8, layout="flat")
    whole = LLAMA_8B.host_bytes(setting, processes_of_machine=8)
    assert whole > 8 * 0.5 * LLAMA_8B.anatomy.linear_parameters


def test_pipelines_of_every_number_of_stages_are_compared_and_the_command_says_it():
    machines = parse_gpus("6x8xH100")
    assert [each["stages"] for each in splits("pp", machines, 40)] == [2, 3, 4, 6, 8, 12, 16, 24]
    base = Setting("pp", 48, stages=6, layout="flat")
    asked = replace(
        question_about(LLAMA_8B, base, machines, mean_document_tokens=2048),
        strategies=("pp",),
        global_batch_size=96,
        micro_batch_size=None,
    )
    rows, left_out = candidates(asked, lambda of, setting: row_of(of, setting, GIB))
    assert [row.setting.stages for row in rows] == [2, 3, 4, 6, 8, 12, 16, 24]
    assert left_out == []
    assert ["--megatron_lm_pp_degree", "6"] in launcher_flags(base, machines)
    assert base.launched == "pp 6"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 5}, "use a multiple of 5 GPUs"),
        ({"paired": True}, "preferences take several"),
        ({"embedding_noise": True}, "train.neftune_alpha draws noise"),
        ({"precision": "fp16"}, "pp does not scale losses"),
        ({"stages": 48}, "48 stages, but the model has 32 layers"),
    ],
)
def test_what_a_run_would_refuse_is_no_option(change: dict[str, Any], words: str):
    setting = replace(Setting("pp", 48, stages=6, layout="flat"), **change)
    assert words in (why_not(LLAMA_8B, setting) or "")


def test_a_model_that_is_no_list_of_layers_is_no_option():
    unlike = mock.PropertyMock(return_value=replace(LLAMA_8B.anatomy, costs=()))
    with mock.patch.object(type(LLAMA_8B), "anatomy", unlike):
        assert "which this model is not" in (why_not(LLAMA_8B, Setting("pp", 8, stages=2, layout="flat")) or "")


def test_parts_keep_more_activations_and_wait_less_by_what_is_held_of_each(step: Step, anatomy: Anatomy):
    one, two = (replace(PIPELINE, stages=STAGES, parts=parts, accumulation=6) for parts in (1, 2))
    micro_batch, machines = step.micro_batch(1, TOKENS), parse_gpus("3xH100")
    kept, activations, idle = pipelines.kept_by_layer(step, micro_batch), [], []
    for asked in (one, two):
        stages = pipelines.stages_of(asked, anatomy)
        assert sum(each.layers for each in stages) == LAYERS
        assert {len(each.spans) for each in stages} == {asked.parts}
        assert [each.ahead(asked.order, 6) for each in stages] == ([3, 2, 1] if asked.parts == 1 else [4, 3, 2])
        moments = pipelines.moments_of(step, asked, stages[0], micro_batch, anatomy)
        activations.append(max(each.categories["activations"] for each in moments if each.phase == "backward"))
        time = step_time(step, asked, machines, anatomy, mean_document_tokens=TOKENS)
        idle.append(time.parts.idle)
        assert {each.what: each.calls for each in time.transfers}["hidden states to the next stage"] == 6 * asked.parts
    buffers = 2 * 6 * 2 * TOKENS * anatomy.width  # two more neighbours of parts, in 16 bits
    layers = pipelines.stages_of(one, anatomy)[0].layers
    assert layers == pipelines.stages_of(two, anatomy)[0].layers
    assert activations[1] - activations[0] == pytest.approx(layers * kept + buffers)
    assert idle[1] == pytest.approx(idle[0] / 2, rel=0.25)


def test_what_gradients_are_deferred_of_is_kept_by_later_stages_more(step: Step, anatomy: Anatomy):
    plain = replace(PIPELINE, accumulation=6)
    deferred = replace(plain, pipeline_schedule="zero_bubble")
    micro_batch = step.micro_batch(1, TOKENS)
    for number, stage in enumerate(pipelines.stages_of(plain, anatomy)):
        assert stage.ahead(deferred.order, 6) == stage.ahead(plain.order, 6)
        of_pass = 2 * TOKENS * anatomy.deferrable_width * stage.layers
        phases: dict[str, list[float]] = {}
        moments = [pipelines.moments_of(step, each, stage, micro_batch, anatomy) for each in (plain, deferred)]
        for one, other in zip(*moments, strict=True):
            more = other.categories.get("activations", 0.0) - one.categories.get("activations", 0.0)
            phases.setdefault(one.phase, []).append(more)
        assert phases["forward"] == pytest.approx([number * of_pass] * len(phases["forward"]))
        assert min(phases["backward"]) == pytest.approx(number * of_pass)
        assert max(phases["backward"]) == pytest.approx((number + 1) * of_pass)
        assert set(phases["step"]) == {0.0}


def test_stages_wait_for_one_another_without_the_gradients_of_weights():
    step, machines = LLAMA_8B.tracer.step(Setting()), parse_gpus("4xH100")
    plain = Setting("pp", 4, stages=4, accumulation=8, row_tokens=2048, layout="flat")
    deferred = replace(plain, pipeline_schedule="zero_bubble")
    assert pipelines.deferred_share(deferred, LLAMA_8B.anatomy) == 1.0
    idle = [
        step_time(step, each, machines, LLAMA_8B.anatomy, mean_document_tokens=2048).parts.idle
        for each in (plain, deferred)
    ]
    assert idle[0] / 3 < idle[1] < idle[0] / 2  # products are not all that takes time
    for nothing in ({"adapter": "lora"}, {"fp8": True}, {"pipeline_schedule": "1f1b"}):
        assert pipelines.deferred_share(replace(deferred, **nothing), LLAMA_8B.anatomy) == 0.0


def test_where_deferred_gradients_do_not_fit_the_plain_order_is_tried_first():
    asked = Setting("pp", 8, stages=4, accumulation=8, parts=2, pipeline_schedule="zero_bubble", layout="flat")
    found = [(each.parts, each.pipeline_schedule) for each in in_plain_order(asked)]
    assert found == [(2, "1f1b"), (1, "1f1b")]
    assert in_plain_order(replace(asked, parts=1, pipeline_schedule="1f1b")) == []
    orders = {(each.pipeline_schedule, each.stages) for each in sharded(asked)}
    assert orders == {("zero_bubble", 8), ("1f1b", 4), ("1f1b", 1)}  # deeper, or sharded, or neither


def test_parts_are_those_of_the_configuration_and_of_pipelines_alone():
    machines = parse_gpus("8xH100")
    asked = question_about(LLAMA_8B, Setting(layout="flat", parts=2), machines, mean_document_tokens=2048)
    base = replace(asked.base, world_size=8)
    asked = replace(asked, base=base, global_batch_size=64, strategies=("pp", "fsdp2"))
    rows, _ = candidates(asked, lambda of, setting: row_of(of, setting, GIB))
    assert {(row.setting.strategy, row.setting.parts) for row in rows} == {("pp", 2), ("fsdp2", 1)}
    other = next(row.setting for row in rows if row.setting.strategy == "fsdp2")
    assert recipe_flags(asked, other)["train.pipeline_parts"] == "1"
    too_many = replace(base, strategy="pp", stages=4, parts=9)
    assert "36 parts, but the model has 32 layers; set it to 8 or less" in (why_not(LLAMA_8B, too_many) or "")
