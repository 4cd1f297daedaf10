"""The closed form of a step's memory against the dry run of the recipe's own step, over settings that vary at once."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import pytest
from tracing import begun

from finetune.distributed.setup import REDUCE_BUCKET_ELEMENTS
from finetune.optim import optimizer
from finetune.planner import build, linear, operations, optimizer_state, zero
from finetune.planner.decoder import Decoder
from finetune.planner.peak_memory import CUBLAS_BYTES, step_memory
from finetune.planner.shape import shape_of
from finetune.planner.sharded_units import ShardedUnit
from finetune.planner.tape import Tensor
from finetune.trace.dry_run import dry_run
from finetune.trace.findings import Trace
from finetune.trace.setting import Setting

MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "full, bf16": {"weights": "bf16"},
    "full, fp32": {"precision": "no"},
    "lora": {"adapter": "lora"},
    "lora, bf16": {"adapter": "lora", "weights": "bf16"},
    "lora, dropout": {"adapter": "lora", "dropout": 0.1},
    "lora, two targets": {"adapter": "lora", "targets": ("q_proj", "v_proj")},
    "lora, whole embedding": {"adapter": "lora", "modules_to_save": ("embed_tokens", "lm_head")},
    "qlora": {"adapter": "lora", "bits": 4},
    "8-bit": {"adapter": "lora", "bits": 8},
    "dora": {"adapter": "dora"},
    "dora, 4-bit": {"adapter": "dora", "bits": 4},
}
AXES: dict[str, list[Any]] = {
    "mode": list(MODES),
    "strategy": ["single", "single", "ddp", "fsdp2", "hsdp", "fsdp2_offload"],
    "processes": [2, 3, 4, 8],
    "layers": [1, 2, 3, 4, 5, 6],
    "hidden": [96, 128, 192, 256],
    "wider": [1.5, 2.7, 3.5],
    "heads": [2, 4, 8],
    "head_dim": [16, 24, 32],
    "vocabulary": [203, 509, 1000, 4001],
    "row_tokens": [64, 150, 301, 600],
    "rows": [1, 2, 3],
    "rank": [2, 8, 16, 33],
    "accumulation": [1, 2],
    "checkpointed": [False, True],
    "tied": [False, True],
    "family": ["llama", "qwen2", "qwen3", "phi3", "olmo2", "gemma"],
}
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
    family, strategy, heads = values["family"], values["strategy"], values["heads"]
    changes = MODES[values["mode"]]
    if changes.get("bits") == 8 and strategy in ("fsdp2", "fsdp2_offload", "hsdp"):
        strategy = "ddp"  # bitsandbytes' 8-bit layers cannot be sharded
    processes = {"single": 1, "hsdp": 2 * max(2, values["processes"] // 2)}.get(strategy, values["processes"])
    if family == "phi3" and "targets" in changes:
        changes = changes | {"targets": ("qkv_proj", "down_proj")}
    fields = {
        "model_type": family,
        "hidden_size": -(-values["hidden"] // heads) * heads,
        "intermediate_size": int(values["hidden"] * values["wider"]),
        "num_hidden_layers": values["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": values["head_dim"],
        "vocab_size": values["vocabulary"],
        "max_position_embeddings": 1024,
        "tie_word_embeddings": values["tied"],
    }
    if family in ("phi3", "qwen2"):  # which know no head size
        fields["hidden_size"] = heads * fields.pop("head_dim")
    if family == "phi3":
        fields["pad_token_id"] = 0
    setting = Setting(
        strategy=strategy,
        world_size=processes,
        rank=values["rank"],
        micro_batch_size=values["rows"],
        row_tokens=values["row_tokens"],
        accumulation=values["accumulation"],
        activation_checkpointing=values["checkpointed"],
        **changes,
    )
    return fields, setting


def predicted(point: Point) -> int:
    fields, setting = point
    return step_memory(shape_of(fields), setting, on_gpu=False).peak


@cache
def _traced(number: int) -> int:
    fields, setting = SQUARE[number]
    return dry_run(fields, setting, kernels=False).peak.bytes


def ratio(number: int) -> float:
    """Of the predicted peak to the traced one."""
    return predicted(SQUARE[number]) / _traced(number)


SQUARE = latin_square(12, seed=17)


def test_square_covers_every_value_of_every_axis():
    assert {setting.strategy for _, setting in SQUARE} == set(AXES["strategy"])
    assert {fields["model_type"] for fields, _ in SQUARE} == set(AXES["family"])
    assert {setting.world_size for _, setting in SQUARE} >= {1, 2, 4, 8}
    assert len({(s.adapter, s.bits, s.weights, s.dropout, s.targets, s.modules_to_save) for _, s in SQUARE}) >= 10


@pytest.mark.parametrize("number", range(len(SQUARE)))
def test_closed_form_is_within_a_hundredth_of_the_dry_run(number: int):
    assert ratio(number) == pytest.approx(1, abs=0.01)


def _without_log_softmax(decoder: Decoder, ops: operations.Operations, handed: list[Tensor]) -> Tensor:
    x = ops.cast(handed.pop(), 4)
    back = ops.like(x)
    return ops.made(ops.new(1, 4), [x], lambda arrived: [back()])


def _without_cached_casts(ops: operations.Operations, x: Tensor) -> Tensor:
    return ops.cast(x, ops.numerics.compute) if ops.numerics.autocast and x.node is None else x


def _without_prefetch(unit: ShardedUnit) -> None:
    unit.waits, unit.held, unit.fetched = False, None, None


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "log-softmax is not kept": lambda patch: patch.setattr(Decoder, "_lose", _without_log_softmax),
    "weights are not cast": lambda patch: patch.setattr(operations.Operations, "cast_operand", _without_cached_casts),
    "gradients are not reduced": lambda patch: patch.setattr(ShardedUnit, "after_backward", _without_prefetch),
    "the next layer is not fetched": lambda patch: patch.setattr(ShardedUnit, "fetch", lambda unit: None),
    "inputs of 8-bit layers go with their gradients": lambda patch: patch.setattr(
        linear, "_multiply_quantised", lambda ops, x, matrix: linear.multiply(ops, x, matrix.weight, matrix.outputs)
    ),
    "constants weigh nothing": lambda patch: patch.setattr(build.Builder, "_constants", lambda self, weight: []),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_bound_is_broken_when_one_term_is_left_out(
    mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    mutation(monkeypatch)
    assert max(abs(ratio(number) - 1) for number in range(len(SQUARE))) > 0.01


def test_kernels_of_a_gpu_take_no_less_than_those_that_stand_in_for_them():
    """But for dropout's masks, which are bytes there and as wide as the activations here, and for sums of gradients,
    which are made in place there."""
    for fields, setting in SQUARE:
        shape = shape_of(fields)
        there = step_memory(shape, replace(setting, dropout=0.0)).peak - CUBLAS_BYTES
        here = step_memory(shape, replace(setting, dropout=0.0), on_gpu=False).peak
        largest_sum = 4 * max(setting.tokens * max(shape.hidden, shape.intermediate), shape.embedding_parameters)
        assert there >= here - largest_sum


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("key_value_heads", [2, 16])
def test_workspace_of_attention_is_the_one_that_the_dry_run_adds(packing: bool, key_value_heads: int):
    """In a model whose peak is in the attention of a checkpointed layer."""
    fields = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": key_value_heads,
        "head_dim": 64,
        "vocab_size": 101,
        "max_position_embeddings": 1024,
    }
    setting = Setting(
        weights="bf16", activation_checkpointing=True, row_tokens=300, micro_batch_size=2, packing=packing
    )
    there = step_memory(shape_of(fields), setting)
    traced = dry_run(fields, setting)
    assert traced.peak.categories["kernels"] == there.parts["workspace"] - CUBLAS_BYTES > 0
    assert there.peak - CUBLAS_BYTES == pytest.approx(traced.peak.bytes, rel=0.01)


WIDE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
    "max_position_embeddings": 2048,
}


ENGINES = {
    f"{strategy}, {mode}": Setting(
        strategy=strategy,
        world_size=2,
        row_tokens=1500,
        accumulation=2,
        activation_checkpointing=checkpointed,
        **MODES[mode],
    )
    for strategy, mode, checkpointed in [
        ("zero1", "full", True),
        ("zero1", "full, bf16", False),
        ("zero2", "full", False),
        ("zero2", "lora", True),
        ("zero3", "full", True),
        ("zero3", "lora", False),
    ]
}
"""With rows so long that activations weigh as much as the bucket, which is there from the first gradient on."""


@pytest.fixture(scope="module", autouse=True)
def engines() -> "Iterator[dict[str, Future[Trace]]]":
    asked = {name: {"model": WIDE, "setting": setting, "kernels": False} for name, setting in ENGINES.items()}
    with begun(asked) as traces:
        yield traces


@pytest.mark.parametrize("name", ENGINES)
def test_whole_step_of_an_engine_is_within_a_hundredth_of_its_dry_run(name: str, engines: "dict[str, Future[Trace]]"):
    assert predicted((WIDE, ENGINES[name])) == pytest.approx(engines[name].result().peak.bytes, rel=0.01)


def test_constants_of_the_formulas_are_those_of_the_code():
    assert zero.BUCKET_ELEMENTS == REDUCE_BUCKET_ELEMENTS
    assert optimizer_state.CHUNK_ELEMENTS == optimizer.CHUNK_ELEMENTS
    assert {name: optimizer.MOMENTS[name] for name in optimizer.EIGHT_BIT} == optimizer_state.EIGHT_BIT_MOMENTS


def test_most_points_are_a_thousandth_off_at_most():
    assert median(abs(ratio(number) - 1) for number in range(len(SQUARE))) < 0.001
