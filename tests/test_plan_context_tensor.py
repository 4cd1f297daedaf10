"""The plan of rows that are spread over GPUs which split layers: bytes, operations and traffic by hand, and when it is
proposed. ``test_plan_part_shards.py`` holds it against what real processes hold."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import live_bytes
import pytest
from plan_models import arithmetic
from test_plan_choose import GIB, row_of
from test_plan_part_shards import (
    HEAD,
    HEADS,
    INNER,
    KEY_HEADS,
    LAYERS,
    MACHINES,
    MODEL,
    SPLIT,
    SPREAD,
    TOKENS,
    VOCABULARY,
    WIDTH,
    asked_of,
    sent,
)

from finetune.cli.planning.launch_command import launcher_flags
from finetune.errors import InputError
from finetune.hardware.cards import parse_gpus
from finetune.planner.candidates import candidates, is_pointless, splits
from finetune.planner.changes import LONG_ROW_TOKENS, sharded, spread
from finetune.planner.communication import route
from finetune.planner.judged_rows import Row
from finetune.planner.model import Model
from finetune.planner.nearest import nearest_that_fits
from finetune.planner.of_run import plan_run
from finetune.planner.possible import why_not
from finetune.planner.question import METHODS, Question
from finetune.planner.speed import Parts, StepTime
from finetune.trace.setting import Setting
from finetune.trace.tracer import Tracer

LLAMA_70B = arithmetic("llama-3.1-70b")
LONG = Setting("cp_tp", 16, context=2, tensor=4, row_tokens=LONG_ROW_TOKENS, layout="flat", accumulation=2)
KEYS_AND_VALUES = 2 * KEY_HEADS * HEAD
LAYER = (2 * (HEADS + KEY_HEADS) * HEAD * WIDTH + 3 * WIDTH * INNER) // 2 + 2 * WIDTH
"""Elements of one of two parts of a layer, whose norms are whole."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Tracer(MODEL, row_tokens=TOKENS, folder=tmp_path_factory.mktemp("traces")) as tracer:
        yield Model(MODEL, tracer)


def in_sizes(context: int, tensor: int, world_size: int = 8) -> Setting:
    return replace(SPREAD, world_size=world_size, context=context, tensor=tensor)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4)], ids=str)
def test_weights_gradients_and_state_are_divided_by_parts_and_by_all_that_have_the_same_one(
    sizes: tuple[int, int], model: Model
):
    setting = in_sizes(*sizes)
    assert setting.placement.weight_shards == 8 // setting.tensor
    step = model.tracer.step(setting)
    every, tokens = 4 * model.anatomy.parameters, setting.own_row_tokens
    moments = [each.categories for each in step.moments(step.micro_batch(1, tokens)) if each.phase == "step"]
    norms = 4 * (2 * LAYERS + 1) * WIDTH * (setting.tensor - 1) / 8  # whole on each GPU of a layer
    room = live_bytes.ROUNDING * (9 * LAYERS + 3)
    for part, times in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
        found = max(each[part] for each in moments)
        assert found == pytest.approx(times * (every / 8 + norms), abs=times * room)
    assert model.checkpoint_bytes(setting) == model.checkpoint_bytes(Setting())


@pytest.mark.slow
def test_attention_of_a_row_is_divided_by_both_sizes_and_so_are_its_keys_and_values(model: Model):
    def flops(setting: Setting) -> float:
        step = model.tracer.step(setting)
        micro_batch = step.micro_batch(1, setting.own_row_tokens)
        attention = (each for each in step.kernels if each.kind == "attention")
        return sum(each.calls * micro_batch.value(each.flops) for each in attention) / step.micro_batches

    whole = (1 + 2.5) * LAYERS * 2 * TOKENS**2 * HEADS * HEAD
    for sizes in ((2, 2), (4, 2), (2, 4)):
        assert flops(in_sizes(*sizes)) == pytest.approx(whole / sizes[0] / sizes[1])
    by_rows, by_layers = (model.time(each, MACHINES, mean_document_tokens=TOKENS) for each in (SPREAD, SPLIT))
    assert 2 * by_rows.tokens == by_layers.tokens  # of as many micro-batches
    assert by_rows.model_flops == pytest.approx(by_layers.model_flops / 2, rel=0.01)


@pytest.mark.slow
def test_a_gpu_keeps_what_it_computes_of_a_row_and_the_keys_and_values_of_its_own_heads_of_all(model: Model):
    def kept(setting: Setting) -> float:
        step = model.tracer.step(setting)
        micro_batch = step.micro_batch(1, setting.own_row_tokens)
        moments = (each for each in step.moments(micro_batch) if each.phase == "loss")
        return max(each.categories["activations"] for each in moments)

    rows = 64  # so many times the positions: blocks are rounded up
    whole = replace(SPLIT, row_tokens=rows * TOKENS)
    half, long = replace(whole, row_tokens=rows * TOKENS // 2), replace(SPREAD, row_tokens=rows * TOKENS)
    seen = 2 * KEYS_AND_VALUES // 2 * (rows * TOKENS * 3 // 2)  # bytes of half the heads: of a row, and of a chunk
    own = 2 * KEYS_AND_VALUES // 2 * (rows * TOKENS // 2)
    assert kept(long) - kept(half) == pytest.approx(LAYERS * (seen - own), rel=0.02)


@pytest.mark.slow
def test_hidden_states_are_of_a_part_of_the_row_and_all_with_the_same_part_gather_it(model: Model):
    again = VOCABULARY * WIDTH // 2  # of the embedding, in the backward pass too
    ends = 2 * again + WIDTH
    hidden = 3 * TOKENS // 2 * WIDTH * 2 * (2 * 1 / 2)  # bf16, 2 (n - 1) / n of it
    rows = 3 * LAYERS * 2 * TOKENS * KEYS_AND_VALUES // 2 * 1 / 2  # (n - 1) / n of half the heads
    assert sent(model, SPREAD) == {
        "all-reduce of hidden states": (2 * LAYERS + 1) * hidden,
        "all-gather of scores": 3 * TOKENS // 2 * VOCABULARY * 2 / 2,
        "all-reduce of gradients of hidden states": (2 * LAYERS + 1) * hidden,
        "all-gather of rows in the forward pass": pytest.approx(rows),
        "reduce-scatter of rows in the backward pass": pytest.approx(rows),
        "all-gather in the forward pass": pytest.approx(3 * 2 * (LAYERS * LAYER + ends) * 3 / 4),
        "all-gather in the backward pass": pytest.approx(3 * 2 * (LAYERS * LAYER + again) * 3 / 4),
        "reduce-scatter in the backward pass": pytest.approx(3 * 4 * (LAYERS * LAYER + ends) * 3 / 4),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "is_inside"), [((2, 4), True), ((4, 2), True), ((4, 4), False)], ids=str)
def test_gpus_of_a_row_are_as_far_apart_as_a_layer_is_wide(sizes: tuple[int, int], is_inside: bool, model: Model):
    machines, (context, tensor) = parse_gpus("2x8xH100"), sizes
    setting = in_sizes(*sizes, world_size=16)
    every = {each.what: each for each in model.time(setting, machines, mean_document_tokens=TOKENS).transfers}
    inside, network = machines.gpu.node_link, machines.gpu.network
    link = inside if is_inside else network
    speed = link.gb_per_second if is_inside else network.of_machine(8) / tensor
    assert route(machines, context, tensor) == pytest.approx((speed, (context - 1) * link.microseconds * 1e-6))
    found = every["all-gather of rows in the forward pass"]
    hops = found.calls * (context - 1) * link.microseconds * 1e-6
    assert found.seconds == pytest.approx(found.bytes / (speed * 1e9) + hops)
    assert not found.overlaps
    of_weights = every["all-gather in the forward pass"]  # of both machines
    hops = of_weights.calls * (16 // tensor - 1) * network.microseconds * 1e-6
    assert of_weights.seconds == pytest.approx(of_weights.bytes / (network.of_machine(8) / tensor * 1e9) + hops)
    assert of_weights.overlaps


def test_by_name_every_pair_of_sizes_is_planned_that_the_gpus_can_be_divided_into():
    machines = parse_gpus("2x8xH100")
    pairs = [tuple(each.values()) for each in splits("cp_tp", machines, 80)]
    assert pairs == [(2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (8, 2)]
    assert [tuple(each.values()) for each in splits("cp_tp", parse_gpus("4xH100"), 80)] == [(2, 2)]
    base = replace(LONG, **dict.fromkeys(("context", "tensor"), 1), strategy="fsdp2")
    asked = asked_of(LLAMA_70B, base, machines, strategies=("cp_tp",), methods=(METHODS["full"],))
    rows, left_out = candidates(asked, lambda of, setting: row_of(of, setting, GIB))
    assert [row.setting.launched for row in rows] == [f"cp_tp {context}x{tensor}" for context, tensor in pairs]
    assert left_out == []
    assert is_pointless("cp_tp", machines, LONG_ROW_TOKENS)


def test_the_command_says_both_sizes():
    flags = launcher_flags(LONG, parse_gpus("2x8xH100"))
    assert flags[:4] == [
        ["--config_file", "accelerate_configs/cp_tp.yaml"],
        ["--num_processes", "16"],
        ["--megatron_lm_context_parallel_size", "2"],
        ["--megatron_lm_tp_degree", "4"],
    ]
    assert LONG.launched == "cp_tp 2x4"


def compared(gpus: str, fits: set[str], row_tokens: int = LONG_ROW_TOKENS) -> set[str]:
    """What is compared of both together where these fit of everything else, and nothing but these."""
    machines = parse_gpus(gpus)
    base = Setting(world_size=machines.world_size, row_tokens=row_tokens, layout="flat", accumulation=2)
    strategies = "fsdp2", "cp", "tp", "pp", "fsdp2_tp", "cp_tp"
    asked = asked_of(LLAMA_70B, base, machines, strategies=strategies, methods=(METHODS["full"],))

    def judge(of: Question, setting: Setting) -> Row:
        return row_of(of, setting, (1 if setting.launched in fits else 100) * GIB)

    return {row.setting.launched for row in candidates(asked, judge)[0] if row.setting.strategy == "cp_tp"}


@pytest.mark.slow
def test_both_are_compared_for_long_rows_where_neither_fits_by_itself():
    pairs = {"cp_tp 2x2", "cp_tp 2x4", "cp_tp 4x2"}
    assert compared("8xH100", set()) == pairs
    assert compared("2x8xH100", set()) == pairs | {"cp_tp 2x8", "cp_tp 4x4", "cp_tp 8x2"}
    assert compared("8xH100", {"fsdp2"}) == pairs  # of which the others need less
    for fitting in ("cp 8", "tp 8", "cp 2"):
        assert compared("8xH100", {fitting}) == set()
    assert compared("2x8xH100", {"fsdp2_tp 8"}) == set()
    assert compared("8xH100", set(), LONG_ROW_TOKENS - 1) == set()
    assert compared("1xH100", set()) == set()
    assert compared("2xH100", set()) == set()


def test_from_shards_of_split_layers_that_do_not_fit_rows_are_spread_over_the_gpus_that_there_are():
    split = replace(LONG, strategy="fsdp2_tp", context=1, accumulation=1)
    found = spread(split)
    assert [(each.launched, each.accumulation) for each in found] == [("cp_tp 2x4", 2), ("cp_tp 4x4", 4)]
    assert {each.data_processes * each.accumulation for each in found} == {4}
    assert spread(LONG) == []
    assert sharded(LONG) == []

    def judge(asked: Question, setting: Setting) -> Row:
        row = row_of(asked, setting, 10 * GIB if setting.context >= 4 else 100 * GIB)
        return replace(row, time=StepTime(Parts(1.0, 0, 0, 0, 0, 0, 0), 1000, 1.0, 1.0, (), None))

    nearest = nearest_that_fits(asked_of(LLAMA_70B, split, parse_gpus("2x8xH100")), split, judge)
    assert nearest is not None
    assert nearest.text == (
        "launch with accelerate_configs/cp_tp.yaml --megatron_lm_context_parallel_size 4 --megatron_lm_tp_degree 4"
    )


@pytest.mark.slow
def test_a_run_is_planned_with_its_own_sizes(model: Model):
    known: dict[str, Any] = {"mean_document_tokens": TOKENS, "mean_row_tokens": TOKENS, "machines": MACHINES}
    left_open = {"micro_batch_size": None, "activation_checkpointing": None}
    plan = plan_run(model, SPREAD, global_batch_size=4, **known, **left_open)
    assert (plan.setting.launched, plan.setting.data_processes) == ("cp_tp 2x2", 2)
    assert plan.setting.micro_batch_size * plan.setting.accumulation == 2
    assert plan.describe()[1].endswith("fits")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 12}, "cp_tp has each row computed by 2 GPUs and splits each layer over 4 GPUs; use a"),
        ({"context": 1}, "use a multiple of 8 GPUs"),
        ({"tensor": 1}, "use a multiple of 4 GPUs"),
        ({"world_size": 4, "tensor": 2}, None),
        ({"world_size": 2, "tensor": 2}, "use at least 4 of them"),
        (
            {"layout": "padded"},
            "cp_tp has its own attention; set model.attention to auto, or use the strategy file fsdp2",
        ),
        ({"paired": True}, "answers are compared as a whole; use the strategy file fsdp2_tp"),
        ({"embedding_noise": True}, "train.neftune_alpha draws noise"),
        ({"precision": "fp16"}, "cp_tp does not scale losses"),
        ({"optimizer": "adafactor"}, "cp_tp"),
        ({"adapter": "dora"}, "cp_tp"),
        ({"adapter": "lora", "bits": 8}, "cp_tp cannot shard the 8-bit layers"),
        ({"fp8": True}, "model.fp8: cp_tp gives each process a part"),
    ],
    ids=str,
)
def test_what_a_run_would_refuse_is_no_option(change: dict[str, Any], words: str | None):
    found = why_not(LLAMA_70B, replace(LONG, **change))
    assert (found is None) if words is None else words in (found or "")


def test_models_that_cannot_be_spread_or_split_and_saved_parts_of_layers_are_refused_as_by_a_run():
    anatomy = LLAMA_70B.anatomy
    saved = replace(LONG, adapter="lora", modules_to_save=("q_proj",))
    for changed, setting, words in (
        ({"not_spread": ("has layers that look back",)}, LONG, "has layers that look back"),
        ({"not_split": ((4, None, "33 heads cannot be shared by 4"),)}, LONG, "33 heads cannot be shared by 4"),
        ({"split_names": ("q_proj",)}, saved, "adapter.modules_to_save names q_proj, of which cp_tp gives"),
    ):
        known: Any = replace(anatomy, **changed)
        with mock.patch.object(type(LLAMA_70B), "anatomy", mock.PropertyMock(return_value=known)):
            assert words in (why_not(LLAMA_70B, setting) or "")


@pytest.mark.slow
def test_adapters_of_experts_have_no_plan():
    config = MODEL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    setting = replace(SPREAD, adapter="lora")
    with Tracer(config, row_tokens=TOKENS) as tracer:
        with pytest.raises(InputError, match=r"cp_tp does not shard adapters of experts .* use the strategy file cp"):
            tracer.step(setting)
        assert tracer.step(replace(setting, targets=("q_proj",))).trained()
