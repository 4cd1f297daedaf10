"""The plan of shards of parts: held against what real processes hold, and its traffic against arithmetic by hand."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import live_bytes
import pytest
import scenarios
from full_trace import full_trace
from plan_models import arithmetic
from test_plan_choose import GIB, row_of
from thinning import thinned
from tracing import traced_step

from finetune.cli.planning.launch_command import launcher_flags
from finetune.hardware.cards import Machines, parse_gpus
from finetune.planner import pipelines
from finetune.planner.candidates import candidates, splits
from finetune.planner.changes import sharded
from finetune.planner.model import Model
from finetune.planner.nearest import Nearest
from finetune.planner.possible import why_not
from finetune.planner.question import METHODS, Question, question_about
from finetune.trace.setting import Setting
from finetune.trace.tensor_parts import part_config
from finetune.trace.tracer import Tracer

TOKENS, LAYERS, WIDTH, INNER, VOCABULARY = 64, 8, 64, 96, 512
HEADS, KEY_HEADS, HEAD = 8, 4, 8
MODEL = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SPLIT = Setting("fsdp2_tp", 8, tensor=2, row_tokens=TOKENS, accumulation=3, layout="flat")
SPREAD = replace(SPLIT, strategy="cp_tp", context=2)
STAGED = Setting("fsdp2_pp", 8, stages=2, row_tokens=TOKENS, accumulation=4, layout="flat")
MACHINES = parse_gpus("4x2xH100")
LLAMA_70B = arithmetic("llama-3.1-70b")
AS_STAGES = {"strategy": "fsdp2_pp", "tensor": 1, "stages": 4}
ADAPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "lora": ({"adapter": "lora", "rank": 4}, {"adapter__type": "lora", "adapter__rank": 4}),
}
OF_ATTENTION = ("q_proj", "v_proj", "o_proj")
"""Layers with adapters in a mixture, whose experts can have none under these strategies."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Tracer(MODEL, row_tokens=TOKENS, folder=tmp_path_factory.mktemp("traces")) as tracer:
        yield Model(MODEL, tracer)


def asked_of(model: Model, base: Setting, machines: Machines, **others: Any) -> Question:
    asked = question_about(model, base, machines, mean_document_tokens=base.row_tokens)
    return replace(asked, micro_batch_size=None, checkpointing=(False, True), **others)


@pytest.mark.parametrize(
    ("split", "family", "method"),
    thinned(
        [(SPLIT, "llama", "full"), (SPLIT, "qwen3_moe", "full"), (SPREAD, "llama", "lora")],
        [(SPLIT, "llama", "lora"), (SPLIT, "qwen3_moe", "lora"), (SPREAD, "llama", "full")],
    ),
    ids=lambda value: value.strategy if isinstance(value, Setting) else value,
)
def test_weights_gradients_and_state_are_those_that_a_real_process_holds(
    split: Setting, family: str, method: str, ranks: Any, conversations: Path, tmp_path: Path
):
    asked, changes = ADAPTED[method]
    experts = {"model_type": family, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    changed = {"num_hidden_layers": 4, "head_dim": 16} | (experts if family == "qwen3_moe" else {})
    described = live_bytes.model_with(tmp_path / "model", **changed)
    if family == "qwen3_moe" and method == "lora":
        asked, changes = asked | {"targets": OF_ATTENTION}, changes | {"adapter__targets": list(OF_ATTENTION)}
    changes = changes | {"train__steps": 2, "train__micro_batch_size": 2}
    config = scenarios.configuration(tmp_path / "model", conversations, tmp_path / "run", **changes)
    everyone = ranks(4).run(live_bytes.bytes_held, config, strategy=split.strategy, mixed_precision="bf16")
    assert len(everyone) == 4
    step = traced_step(described, replace(split, world_size=4, accumulation=2, **asked), row_tokens=TOKENS)
    every = step.moments(step.micro_batch(2, TOKENS), accumulation=2)
    live_bytes.assert_as_planned(every, everyone)


@pytest.mark.parametrize("method", thinned(["lora"], ["full"]))
def test_weights_gradients_and_state_of_stages_are_those_that_real_stages_hold(
    method: str, ranks: Any, conversations: Path, tmp_path: Path
):
    asked, changes = ADAPTED[method]
    described = live_bytes.model_with(tmp_path / "model", num_hidden_layers=8)
    changes = changes | {"train__steps": 2, "train__micro_batch_size": 2}
    config = scenarios.configuration(tmp_path / "model", conversations, tmp_path / "run", **changes)
    everyone = ranks(4).run(live_bytes.bytes_held, config, strategy="fsdp2_pp", mixed_precision="bf16")
    assert len(everyone) == 4
    two = replace(STAGED, world_size=4, stages=2, accumulation=2, **asked)
    with tempfile.TemporaryDirectory() as traces, Tracer(described, row_tokens=TOKENS, folder=Path(traces)) as tracer:
        step, anatomy = tracer.step(two), tracer.anatomy
    for stage in pipelines.stages_of(two, anatomy):
        every = pipelines.moments_of(step, two, stage, step.micro_batch(2, TOKENS), anatomy)
        live_bytes.assert_as_planned(every, everyone[2 * stage.number : 2 * stage.number + 2])


def test_a_sharded_pipeline_of_one_stage_is_the_model_sharded_over_its_gpus(model: Model):
    one, whole = replace(STAGED, world_size=4, stages=1), pipelines.Stage(0, 1, ((0, LAYERS),), 1.0)
    step = model.tracer.step(one)
    micro_batch = step.micro_batch(1, TOKENS)
    found = pipelines.moments_of(step, one, whole, micro_batch, model.anatomy)
    expected = step.moments(micro_batch, accumulation=one.accumulation)
    assert [(each.phase, each.bytes) for each in found] == [(each.phase, each.bytes) for each in expected]
    assert pipelines.sent_of(step, one, whole) == step.sent


def gathered_beside_layers(model: Model) -> dict[tuple[str, int], float]:
    """The most that is gathered in each of four stages, by phase: of layers, and of what stays gathered beside them;
    and of what is apart from layers."""
    four = replace(STAGED, world_size=8, stages=4)
    step, found = model.tracer.step(four), dict[tuple[str, int], float]()
    for stage in pipelines.stages_of(four, model.anatomy):
        for moment in pipelines.moments_of(step, four, stage, step.micro_batch(1, TOKENS), model.anatomy):
            phase, _, where, _ = moment.place or ("", 0, "", 0)
            kind = f"{phase}, apart" if where == "apart" else phase, stage.number
            found[kind] = max(found.get(kind, 0.0), moment.categories["gathered"])
    return found


def test_a_stage_gathers_an_embedding_and_a_head_where_it_has_them_each_for_its_own_use(model: Model):
    gathered, embedding = gathered_beside_layers(model), 2 * VOCABULARY * WIDTH
    assert gathered["forward, apart", 0] >= 2 * embedding  # with the buffer of the gathering
    assert gathered["backward, apart", 0] >= embedding
    assert gathered["backward, apart", 3] >= embedding
    for phase in ("forward", "backward"):
        assert len({gathered[phase, stage] for stage in range(4)}) == 1
        assert not {(f"{phase}, apart", stage) for stage in (1, 2)} & gathered.keys()


def test_an_embedding_that_is_the_head_too_stays_gathered_in_the_first_and_in_the_last_stage(tmp_path: Path):
    tied = MODEL | {"tie_word_embeddings": True}
    with Tracer(tied, row_tokens=TOKENS, folder=tmp_path) as tracer:
        gathered = gathered_beside_layers(Model(tied, tracer))
    room = pytest.approx(2 * VOCABULARY * WIDTH, rel=0.01)  # but for the norm before the head
    for phase in ("forward", "backward"):
        assert gathered[phase, 0] - gathered[phase, 1] == room
        assert gathered[phase, 1] == gathered[phase, 2]
    assert gathered["forward", 3] == gathered["forward", 0]
    assert gathered["backward", 3] - gathered["backward", 0] == room  # of the head's gradient


def test_a_stage_gathers_its_own_layers_for_each_pass_of_each_micro_batch(model: Model):
    layer = 2 * (HEADS + KEY_HEADS) * HEAD * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH
    two = replace(STAGED, world_size=8, stages=2, accumulation=3)
    step, (first, last) = model.tracer.step(two), pipelines.stages_of(two, model.anatomy)
    ends = VOCABULARY * WIDTH + WIDTH / 2  # of embedding, head and the norm before it, half
    for stage in (first, last):
        of_traced = {}
        for each in pipelines.sent_of(step, two, stage):
            kind = each.phase, "gather" if pipelines.is_gather(each) else "other"
            of_traced[kind] = of_traced.get(kind, 0.0) + each.calls * sum(each.bytes.values()) / step.micro_batches
        assert of_traced["forward", "gather"] == pytest.approx(2 * (stage.layers * layer + ends), rel=1e-3)
        again = VOCABULARY * WIDTH if stage.is_first else 0  # of the embedding
        assert of_traced["backward", "gather"] == pytest.approx(2 * (stage.layers * layer + again))
        assert of_traced["backward", "other"] == pytest.approx(4 * (stage.layers * layer + ends), rel=1e-3)
    found = sent(model, two)
    again = VOCABULARY * WIDTH
    assert found["all-gather in the backward pass"] == pytest.approx(3 * 2 * (first.layers * layer + again) * 3 / 4)
    assert found["hidden states to the next stage"] == 3 * 2 * TOKENS * WIDTH
    halves = replace(two, parts=2, accumulation=2)
    layers = pipelines.stages_of(halves, model.anatomy)[0].layers
    found = sent(model, halves)
    assert found["all-gather in the backward pass"] == pytest.approx(2 * 2 * 2 * (layers * layer + again) * 3 / 4)
    added_up = found["reduce-scatter in the backward pass"]
    assert added_up == pytest.approx(2 * 4 * (layers * layer + ends) * 3 / 4, rel=1e-3)


@pytest.mark.parametrize("change", thinned([{}], [{"adapter": "lora", "activation_checkpointing": True}]))
def test_peak_by_two_shallow_traces_is_that_of_all_layers_of_a_part(change: dict[str, Any], model: Model):
    setting = replace(SPLIT, micro_batch_size=2, accumulation=2, world_size=4, tensor=1, **change)
    part = part_config(MODEL, dict(model.anatomy.sizes), 2)
    step = traced_step(part, setting, row_tokens=TOKENS)
    every = step.moments(step.micro_batch(2, TOKENS), accumulation=2)
    whole = full_trace(part, setting)
    assert max(each.bytes for each in every) == pytest.approx(whole.peak.bytes, rel=0.01)


def sent(model: Model, setting: Setting) -> dict[str, float]:
    """Bytes in a step, by what they are, but for a few of flags and norms."""
    found = model.time(setting, MACHINES, mean_document_tokens=TOKENS).transfers
    return {each.what: each.bytes for each in found if each.bytes > 1000}


def test_parts_of_layers_are_gathered_twice_in_each_micro_batch_and_hidden_states_added_up_beside_them(model: Model):
    layer = (2 * (HEADS + KEY_HEADS) * HEAD * WIDTH + 3 * WIDTH * INNER) // 2 + 2 * WIDTH  # norms are whole
    again = VOCABULARY * WIDTH // 2  # of the embedding, in the backward pass too
    ends = 2 * again + WIDTH
    hidden = 3 * TOKENS * WIDTH * 2 * (2 * 1 / 2)  # bf16, 2 (n - 1) / n of it
    found = sent(model, SPLIT)
    assert found == {
        "all-reduce of hidden states": (2 * LAYERS + 1) * hidden,
        "all-gather of scores": 3 * TOKENS * VOCABULARY * 2 / 2,
        "all-reduce of gradients of hidden states": (2 * LAYERS + 1) * hidden,
        "all-gather in the forward pass": pytest.approx(3 * 2 * (LAYERS * layer + ends) * 3 / 4),
        "all-gather in the backward pass": pytest.approx(3 * 2 * (LAYERS * layer + again) * 3 / 4),
        "reduce-scatter in the backward pass": pytest.approx(3 * 4 * (LAYERS * layer + ends) * 3 / 4),
    }
    overlapping = {
        each.what for each in model.time(SPLIT, MACHINES, mean_document_tokens=TOKENS).transfers if each.overlaps
    }
    assert {what for what in found if "pass" in what} <= overlapping
    assert not {what for what in found if " of " in what} & overlapping


def test_shards_of_a_part_that_is_as_wide_as_a_machine_go_through_the_network_each_by_its_own_share(model: Model):
    """Eight rings beside one another, of a GPU of each machine, share what one ring of all GPUs has for itself."""
    time = {}
    for gpus in ("2x8xH100", "16xH100"):
        machines = parse_gpus(gpus)
        split = replace(SPLIT, world_size=16, tensor=8)
        found = LLAMA_70B.time(split, machines, mean_document_tokens=TOKENS).transfers
        (time[gpus],) = [each for each in found if each.what == "all-gather in the forward pass"]
    one = machines.gpu
    assert time["2x8xH100"].bytes == time["16xH100"].bytes
    seconds = time["2x8xH100"].bytes / (one.network.of_machine(8) / 8 * 1e9)
    assert time["2x8xH100"].seconds == pytest.approx(seconds, rel=0.1)


def test_weights_gradients_and_state_are_divided_by_parts_and_shards_and_checkpoints_are_of_whole_weights(model: Model):
    every = 4 * model.anatomy.parameters
    for size in (2, 4):
        split = replace(SPLIT, tensor=size)
        step = model.tracer.step(split)
        moments = [each.categories for each in step.moments(step.micro_batch(1, TOKENS)) if each.phase == "step"]
        norms = 4 * (2 * LAYERS + 1) * WIDTH * (size - 1) / 8  # whole on each GPU of a layer
        room = live_bytes.ROUNDING * (9 * LAYERS + 3)
        for part, times in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
            found = max(each[part] for each in moments)
            assert found == pytest.approx(times * (every / 8 + norms), abs=times * room)
        assert model.checkpoint_bytes(split) == model.checkpoint_bytes(Setting())


def test_at_least_two_gpus_must_have_the_same_part_and_the_command_says_how_many_share_each_layer():
    machines = parse_gpus("2x8xH100")
    assert [each["tensor"] for each in splits("fsdp2_tp", machines, 80)] == [2, 4, 8]
    assert [each["tensor"] for each in splits("fsdp2_tp", parse_gpus("8xH100"), 80)] == [2, 4]
    split = replace(SPLIT, world_size=16, tensor=8)
    assert ["--megatron_lm_tp_degree", "8"] in launcher_flags(split, machines)
    assert split.launched == "fsdp2_tp 8"
    assert "use at least 16 of them" in (why_not(LLAMA_70B, replace(split, world_size=8)) or "")


def test_shards_of_parts_are_compared_on_several_machines_where_parts_do_not_fit():
    for gpus, size, there in (("4x8xH100", 100, True), ("4x8xH100", 1, False), ("8xH100", 100, False)):
        machines = parse_gpus(gpus)
        base = Setting(world_size=machines.world_size, row_tokens=2048, accumulation=2)
        strategies = "tp", "pp", "fsdp2_tp", "fsdp2_pp"
        asked = asked_of(LLAMA_70B, base, machines, strategies=strategies, methods=(METHODS["full"],))
        rows, _ = candidates(
            asked, lambda of, setting, size=size: row_of(of, setting, (1 if setting.shards_parts else size) * GIB)
        )
        found = {row.setting.launched for row in rows if row.setting.shards_parts}
        every = {"fsdp2_tp 2", "fsdp2_tp 4", "fsdp2_tp 8", "fsdp2_pp 2", "fsdp2_pp 4"}  # no machine has two stages
        assert found == (every if there else set())


def test_shards_of_stages_are_compared_where_a_pipeline_defers_gradients_which_they_do_not():
    base = Setting(world_size=32, row_tokens=2048, accumulation=2, pipeline_schedule="zero_bubble")
    asked = asked_of(LLAMA_70B, base, parse_gpus("4x8xH100"), strategies=("pp", "fsdp2_pp"), methods=(METHODS["full"],))
    rows, _ = candidates(asked, lambda of, setting: row_of(of, setting, (1 if setting.shards_parts else 100) * GIB))
    assert {row.setting.order.schedule for row in rows if row.setting.shards_parts} == {"1f1b"}


def test_from_parts_that_do_not_fit_shards_of_them_are_the_next_change():
    split = replace(SPLIT, strategy="tp", world_size=16, tensor=8)
    assert replace(split, strategy="fsdp2_tp") in sharded(split)
    assert {each.strategy for each in sharded(replace(split, strategy="fsdp2_tp"))} == set()
    asked = asked_of(LLAMA_70B, split, parse_gpus("2x8xH100"))
    nearest = Nearest(row_of(asked, replace(split, strategy="fsdp2_tp"), GIB), {}, "fsdp2_tp", ())
    assert nearest.text == "launch with accelerate_configs/fsdp2_tp.yaml --megatron_lm_tp_degree 8"
    staged = replace(STAGED, strategy="pp", world_size=16, stages=4, parts=2, pipeline_schedule="zero_bubble")
    assert replace(staged, strategy="fsdp2_pp", pipeline_schedule="1f1b") in sharded(staged)
    deeper = {each.stages for each in sharded(replace(staged, strategy="fsdp2_pp")) if each.shards_parts}
    assert deeper == {8}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor": 3}, "use a multiple of 3 GPUs"),
        ({"precision": "fp16"}, "fsdp2_tp does not scale losses"),
        ({"adapter": "lora", "bits": 8}, "cannot shard the 8-bit layers"),
        (AS_STAGES | {"pipeline_schedule": "zero_bubble"}, "before it frees them; set it to 1f1b"),
        (AS_STAGES | {"optimizer": "adafactor"}, "fsdp2_pp"),
        (AS_STAGES | {"stages": 16}, "use at least 32 of them"),
    ],
)
def test_what_a_run_would_refuse_is_no_option(change: dict[str, Any], words: str):
    split = replace(SPLIT, **{"world_size": 16, "tensor": 8} | change)
    assert words in (why_not(LLAMA_70B, split) or "")
