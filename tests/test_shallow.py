"""Traces of few layers and one micro-batch tell what a whole model takes with any micro-batch."""

import json
import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from full_trace import full_trace
from hypothesis import given
from hypothesis import strategies as st
from tracing import begun, traced_step

from finetune.config.compatibility import ADAPTERS, OPTIMIZERS, Cell, refusal
from finetune.distributed import setup
from finetune.models.loading import config_from
from finetune.planner.speed import PHASES
from finetune.trace.accounts import CATEGORIES
from finetune.trace.depth import trace_depth
from finetune.trace.layers import Anatomy, repetition
from finetune.trace.placement import Placement, world_sizes_problem
from finetune.trace.powers import MicroBatch, prime_micro_batch
from finetune.trace.setting import Setting
from finetune.trace.shallow import Step, depth_of, record_of
from finetune.trace.tracer import Tracer
from finetune.training import loss

AXES: dict[str, list[Any]] = {
    "strategy": ["single", "ddp", "fsdp2", "hsdp", "fsdp2_offload", "zero1", "zero2", "zero3"],
    "adapter": [*ADAPTERS, "lora"],
    "bits": [None, None, 4, 8],
    "optimizer": OPTIMIZERS,
    "weights": ["fp32_master", "bf16"],
    "precision": ["bf16", "fp16", "no"],
    "layout": ["padded", "flat", "packed"],
    "activation_checkpointing": [False, True],
    "accumulation": [1, 2, 3],
    "processes": [2, 4, 8],
    "dropout": [0.0, 0.1],
    "rank": [2, 21, 33],  # of which the primes to trace with are no part
    "modules_to_save": [(), (), ("embed_tokens", "lm_head")],
    "micro_batch_size": [1, 2, 3],
    "row_tokens": [128, 256, 640],  # which attention does not pad
    "layers": [8, 9, 10],  # of fewer, all are traced
    "hidden": [96, 128, 192],
    "wider": [1.5, 2.7, 3.5],
    "heads": [2, 4, 8],
    "head_dim": [16, 24, 32],
    "vocabulary": [203, 509, 1000, 4001],
    "tied": [False, True],
    "family": ["llama", "qwen2", "qwen3", "phi3", "olmo2", "gemma", "mixtral"],
    "fused": [True, True, True, False],
}
POINTS = 8
LONGEST = max(AXES["row_tokens"])
Point = tuple[dict[str, Any], Setting]


def latin_square(points: int, seed: int) -> list[Point]:
    """Every axis goes through its values, each in an order of its own."""
    draw = random.Random(seed)
    columns = {}
    for name, values in AXES.items():
        column = [values[place % len(values)] for place in range(points)]
        draw.shuffle(column)
        columns[name] = column
    return [_point({name: column[place] for name, column in columns.items()}) for place in range(points)]


def _point(values: dict[str, Any]) -> Point:
    """Model and setting; where the values contradict one another, the simpler one of them."""
    family, strategy, heads = values["family"], values["strategy"], values["heads"]
    adapter, bits, optimizer = values["adapter"], values["bits"], values["optimizer"]
    if family == "mixtral":
        bits = None  # experts are no linear layers
        adapter = "lora" if adapter == "dora" else adapter
    if refusal(Cell(strategy, bits, adapter, optimizer)):
        bits = None if adapter == "none" or bits == 8 else bits
        optimizer = "adamw" if refusal(Cell(strategy, bits, adapter, optimizer)) else optimizer
    assert not refusal(Cell(strategy, bits, adapter, optimizer)), values
    fields = {
        "model_type": family,
        "hidden_size": -(-values["hidden"] // heads) * heads,
        "intermediate_size": 8 * int(values["hidden"] * values["wider"] / 8),
        "num_hidden_layers": values["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": values["head_dim"],
        "vocab_size": values["vocabulary"],
        "max_position_embeddings": 1024,
        "tie_word_embeddings": values["tied"],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family in ("phi3", "qwen2"):  # which know no head size
        fields["hidden_size"] = heads * fields.pop("head_dim")
    if family == "mixtral":
        fields |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    processes = {"single": 1, "hsdp": max(4, values["processes"])}.get(strategy, values["processes"])
    flat = values["layout"] != "padded"
    precision = "bf16" if flat and values["precision"] == "no" else values["precision"]
    of_setting = ("weights", "layout", "activation_checkpointing", "accumulation", "rank", "fused")
    setting = Setting(
        strategy=strategy,
        world_size=processes,
        bits=bits,
        adapter=adapter,
        optimizer=optimizer,
        precision=precision,
        dropout=values["dropout"] if adapter != "none" and family != "mixtral" else 0.0,
        modules_to_save=values["modules_to_save"] if adapter != "none" else (),
        micro_batch_size=max(values["micro_batch_size"], 5 if bits == 4 and values["row_tokens"] <= 128 else 1),
        row_tokens=values["row_tokens"],
        **{name: values[name] for name in of_setting},
    )
    return fields, setting


SQUARE = latin_square(POINTS, seed=23)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4001,
    "max_position_embeddings": 1024,
}
SETTING = Setting(row_tokens=512, micro_batch_size=2)
NARROW = LLAMA | {"vocab_size": 128}
REPLICAS = [
    Setting("ddp", 2, row_tokens=128, activation_checkpointing=True, accumulation=micro_batches)
    for micro_batches in (1, 3)
]


class Whole(Tracer):
    """Traces all layers."""

    def _depths(self, key: Setting) -> tuple[int, int]:
        return self.anatomy.layers, self.anatomy.layers


def of_split_weights(setting: Setting, kind: type[Tracer], reach: int) -> Step:
    """A step of a model of which ZeRO-3 splits all weights, as it does of a large one, and looks ahead as little."""
    small = {"stage3_param_persistence_threshold": 100, "reduce_bucket_size": 5_000}
    configure = setup._configure_deepspeed

    def configured(accelerator: Any, *args: Any) -> None:
        configure(accelerator, *args)
        accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"].update(small)

    setup._configure_deepspeed, Placement.reach = configured, reach  # in a process of its own
    return traced_step(NARROW | {"num_hidden_layers": 12}, setting, kind=kind)


@pytest.fixture(scope="module", autouse=True)
def traces() -> "Iterator[dict[Any, Future[Any]]]":
    """Of each point a trace of all layers with the micro-batch that is asked about, and its step."""
    calls: dict[Any, Callable[[], Any]] = {}
    for fields, setting in [*SQUARE, *((NARROW, setting) for setting in REPLICAS)]:
        calls["whole", setting] = partial(full_trace, fields, setting)
        calls["step", setting] = partial(traced_step, fields, setting, row_tokens=LONGEST)
    with begun(calls) as found:
        yield found


def peak(step: Step, setting: Setting) -> float:
    micro_batch = step.micro_batch(setting.micro_batch_size, setting.row_tokens)
    return max(moment.bytes for moment in step.moments(micro_batch, accumulation=setting.accumulation))


def test_square_covers_every_value_of_every_axis():
    names = ("strategy", "bits", "optimizer", "weights", "precision", "layout", "accumulation", "micro_batch_size")
    for name in (*names, "row_tokens", "fused", "adapter", "dropout", "modules_to_save"):
        assert {getattr(setting, name) for _, setting in SQUARE} == set(AXES[name]), name
    assert {setting.rank for _, setting in SQUARE if setting.adapter != "none"} == set(AXES["rank"])
    assert {setting.activation_checkpointing for _, setting in SQUARE} == {False, True}
    assert {fields["model_type"] for fields, _ in SQUARE} == set(AXES["family"])
    assert {fields["num_hidden_layers"] for fields, _ in SQUARE} == set(AXES["layers"])
    assert not [problem for _, s in SQUARE if (problem := world_sizes_problem(s.strategy, s.world_size, s.sizes))]


@pytest.mark.parametrize("number", range(POINTS))
def test_few_layers_and_another_micro_batch_tell_the_peak(number: int, traces: "dict[Any, Future[Any]]"):
    _, setting = SQUARE[number]
    expected, step = traces["whole", setting].result(), traces["step", setting].result()
    assert step.high.layers < step.layers
    assert peak(step, setting) == pytest.approx(expected.peak.bytes, rel=1e-3)
    assert step.on_host() == pytest.approx(expected.host_bytes, rel=0.01)


def test_gradients_of_replicas_lie_beside_their_buckets_until_the_last_micro_batch(traces: "dict[Any, Future[Any]]"):
    one, three = REPLICAS
    for setting, other in ((one, three), (three, one)):
        expected = traces["whole", setting].result().peak.bytes
        assert peak(traces["step", setting].result(), setting) == pytest.approx(expected, rel=1e-3)
        forgetful = traces["step", other].result()
        assert peak(forgetful, setting) != pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("bits", "without"),
    [pytest.param(each, share, marks=pytest.mark.prove) for each, share in ((4, 0.03), (None, 0.1))],
)
def test_two_layers_from_an_end_are_unlike_those_in_the_middle_under_zero_3(bits: int | None, without: float):
    """By one layer alone the peak would be wrong by this share and more."""
    setting = Setting("zero3", 8, bits, "lora", rank=2, row_tokens=128, activation_checkpointing=True)
    ways = {"whole": (Whole, 2), "step": (Tracer, 2), "near": (Tracer, 1)}
    calls = {name: partial(of_split_weights, setting, kind, reach) for name, (kind, reach) in ways.items()}
    with begun(calls) as traces:
        whole, step, near = (traces[name].result() for name in ways)
    assert whole.low.layers == 12
    assert (step.low.layers, step.high.layers) == (4, 5)
    expected = peak(whole, setting)
    assert peak(step, setting) == pytest.approx(expected, rel=0.005)
    assert peak(near, setting) != pytest.approx(expected, rel=without)


@pytest.fixture(scope="module")
def plain() -> Step:
    """Traced in this process, before a test changes its code."""
    return step_of(LLAMA, SETTING, (2, 3))


def test_primes_divide_no_dimension_rank_or_share(tmp_path: Path):
    """Of rank 21 is 7 a divisor, and of rank 20 each of 3 processes has 7 rows."""
    with Tracer(LLAMA, row_tokens=300, folder=tmp_path) as tracer:
        for rank, world_size, seven in ((16, 2, True), (21, 4, False), (20, 3, False)):
            traced = tracer.micro_batch(Setting("fsdp2", world_size, rank=rank))
            whole = [rank, *tracer.anatomy.dimensions]
            for size in (*whole, *(math.ceil(size / world_size) for size in whole)):
                assert size % traced.rows
                assert size % traced.row_tokens
            assert (traced.rows == 7) == seven


def test_picture_of_a_step_reaches_its_peak_and_goes_through_its_phases_in_order(plain: Step):
    micro_batch = plain.micro_batch(2, 512)
    course = list(plain.course(micro_batch))
    assert list(dict.fromkeys(moment.phase for moment in course)) == ["forward", "loss", "backward", "step"]
    assert max(moment.bytes for moment in course) == pytest.approx(peak(plain, SETTING), rel=1e-9)
    whole = {category for moment in course for category, size in moment.categories.items() if size}
    assert {"weights", "gradients", "optimizer", "activations"} <= whole <= set(CATEGORIES)
    assert min(size for moment in course for size in moment.categories.values()) >= 0
    for moment in plain.moments(micro_batch):
        assert set(moment.categories) <= set(CATEGORIES)


def step_of(fields: dict[str, Any], setting: Setting, depths: tuple[int, int]) -> Step:
    """Traced in this process, whose code a test has changed, at two depths."""
    traced = prime_micro_batch(setting.row_tokens, {value for value in fields.values() if isinstance(value, int)})
    low, high = (trace_depth(config_from(fields | {"num_hidden_layers": layers}), setting, traced) for layers in depths)
    return Step(fields["num_hidden_layers"], low, high)


def test_a_loss_that_keeps_no_logits_changes_the_step_without_a_change_of_the_planner(
    plain: Step, monkeypatch: pytest.MonkeyPatch
):
    def in_parts(model: torch.nn.Module, micro_batch: Any) -> torch.Tensor:
        next_tokens, inputs = micro_batch

        def of_part(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model.lm_head(hidden).float(), targets, reduction="sum")

        with torch.autocast("cpu", torch.bfloat16):  # which Accelerate enters with the whole model alone
            hidden = model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            parts = zip(hidden.split(64), next_tokens.flatten().split(64))
            every = [torch.utils.checkpoint.checkpoint(of_part, *part, use_reentrant=False) for part in parts]
            return torch.stack(every).sum()

    monkeypatch.setattr(loss, "next_token_loss_sum", in_parts)
    step = step_of(LLAMA, SETTING, (2, 3))
    assert peak(step, SETTING) < 0.8 * peak(plain, SETTING)


def test_a_norm_that_keeps_less_changes_the_step_without_a_change_of_the_planner(monkeypatch: pytest.MonkeyPatch):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    short, plain = {**LLAMA, "vocab_size": 101}, replace(SETTING, fused=False)
    before = peak(step_of(short, plain, (2, 3)), plain)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, hidden: hidden * self.weight.to(hidden.dtype))
    assert peak(step_of(short, plain, (2, 3)), plain) < 0.95 * before


def test_operations_of_the_whole_model_follow_from_two_depths(plain: Step):
    """Products take 2 FLOPs for each weight and position, and twice that backward."""
    matrices = 6 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160) + 4001 * 64
    micro_batch = plain.micro_batch(2, 512)
    for phase, times in (("forward", 2), ("backward", 4)):
        phases = PHASES[phase]
        kernels = [each for each in plain.kernels if each.phase in phases and each.kind == "product"]
        counted = sum(each.calls * micro_batch.value(each.flops) for each in kernels)
        assert counted == times * matrices * micro_batch.rows * micro_batch.row_tokens


def test_attention_to_rows_end_to_end_computes_as_much_as_to_padded_ones(plain: Step):
    assert SETTING.layout == "padded"
    flops = []
    for step in (plain, step_of(LLAMA, replace(SETTING, layout="flat"), (2, 3))):
        of_attention = [each for each in step.kernels if each.kind == "attention"]
        flops.append(sum(each.calls * step.micro_batch(2, 512).value(each.flops) for each in of_attention))
    assert flops[0] > 0
    assert flops[1] == pytest.approx(flops[0])


def test_trained_weights_of_the_whole_model_follow_from_two_depths():
    step = step_of(LLAMA, replace(SETTING, adapter="lora", rank=4), (2, 3))
    sides = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160)
    assert sum(count * math.prod(shape) for shape, count in step.trained().items()) == 6 * 4 * sides


def test_a_trace_survives_json():
    step = step_of(LLAMA, replace(SETTING, strategy="fsdp2", world_size=2), (3, 4))
    assert depth_of(json.loads(json.dumps(record_of(step.low)))) == step.low


@given(st.integers(1, 40_000), st.frozensets(st.integers(1, 300_000), max_size=20))
def test_the_traced_micro_batch_is_of_primes_that_divide_nothing_else(row_tokens: int, dimensions: frozenset[int]):
    traced = prime_micro_batch(row_tokens, dimensions)
    for prime in (traced.rows, traced.row_tokens, traced.scored):
        assert prime > 1
        assert all(prime % divisor for divisor in range(2, math.isqrt(prime) + 1))
        assert all(dimension % prime for dimension in dimensions)
    assert len({traced.rows, traced.row_tokens, traced.scored}) == 3
    assert 2 * traced.scored <= traced.rows * traced.row_tokens


@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 4096))
def test_a_size_is_found_again_with_any_other_micro_batch(rows: int, tokens: int, factor: int, n: int, length: int):
    traced = MicroBatch(101, 2039)
    factor *= 1 if factor % 101 and factor % 2039 else 0
    if factor:
        power, coefficient = traced.factored(factor * 101**rows * 2039**tokens)
        assert MicroBatch(n, length).value({power: coefficient}) == pytest.approx(factor * n**rows * length**tokens)


@given(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 6))
def test_a_model_repeats_as_it_was_made_to(lead: list[int], period: list[int], times: int):
    kinds = [*lead, *(period * times)]
    before, length = repetition(kinds)
    assert before + length <= len(lead) + len(period)
    assert all(kinds[place] == kinds[place + length] for place in range(before, len(kinds) - length))


@pytest.mark.parametrize(
    ("layers", "lead", "period", "least", "expected"),
    [
        (32, 0, 1, 2, (2, 3)),
        (32, 0, 1, 3, (3, 4)),
        (26, 0, 2, 2, (4, 6)),  # Gemma 2
        (26, 0, 6, 2, (8, 14)),  # Gemma 3: one of six layers attends to everything
        (61, 3, 1, 2, (5, 6)),  # three dense layers, then mixtures of experts
        (3, 0, 1, 3, (3, 3)),
    ],
)
def test_traced_depths_end_as_the_model_ends(
    layers: int, lead: int, period: int, least: int, expected: tuple[int, int]
):
    anatomy = Anatomy(0, 0, 0, 0, (), layers, lead, period, None)
    assert anatomy.depths(least) == expected
    assert all((layers - depth) % period == 0 for depth in expected)


def test_a_configuration_is_shortened_with_its_lists_and_what_is_nested():
    anatomy = Anatomy(0, 0, 0, 0, (), 4, 0, 2, None)
    config = {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"], "text_config": {"num_hidden_layers": 4}}
    assert anatomy.shortened(config, 2) == {
        "num_hidden_layers": 2,
        "layer_types": ["a", "b"],
        "text_config": {"num_hidden_layers": 2},
    }
