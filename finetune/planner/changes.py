"""Changes that make a run smaller, each to one field of a setting, and what is given up by them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from finetune.config.compatibility import bf16_weights_problems
from finetune.config.strategy_names import SIZES, STRATEGIES, TOGETHER, sharded_as
from finetune.trace.placement import SPLITS, placement_of, world_sizes_problem
from finetune.trace.setting import APART, Setting

LEAST_ROW_TOKENS = 128
LONG_ROW_TOKENS = 16384
"""From where what is for long rows is compared without being named: several GPUs for each row, and activations in host
memory. Of shorter rows a GPU has room for several, or for all of a layer's activations, and these ways take longer
to compare than all others."""
KEYS: dict[str, tuple[str, Callable[[Setting], str]]] = {
    "reference": ("dpo.reference", lambda setting: setting.reference),
    "micro_batch_size": ("train.micro_batch_size", lambda setting: str(setting.micro_batch_size)),
    "activation_checkpointing": (
        "train.activation_checkpointing",
        lambda setting: setting.recomputes,
    ),
    "pipeline_schedule": ("train.pipeline_schedule", lambda setting: setting.pipeline_schedule),
    "offloads_activations": ("train.activation_checkpointing", lambda setting: setting.recomputes),
    "parts": ("train.pipeline_parts", lambda setting: str(setting.parts)),
    "optimizer": ("train.optimizer", lambda setting: setting.optimizer),
    "weights": ("train.weights", lambda setting: setting.weights),
    "adapter": ("adapter.type", lambda setting: setting.adapter),
    "bits": ("quantization.bits", lambda setting: str(setting.bits or "none")),
    "row_tokens": ("data.max_length", lambda setting: str(setting.row_tokens)),
}
"""Fields of a setting that are keys of the recipe, and their values there; the mildest change first."""
PLAIN_1F1B: dict[str, Any] = {"parts": 1, "pipeline_schedule": "1f1b"}
"""The order of a pipeline that keeps the fewest activations; also that of settings without stages."""
GIVEN_UP = {
    "train.weights": "bf16 weights have no fp32 master copy: their updates are rounded stochastically.",
    "train.optimizer": "8-bit AdamW keeps its moments in 8 bits, block-wise.",
}
"""What less exact updates mean."""


def smaller_micro_batches(setting: Setting) -> list[Setting]:
    """All that divide the rows of a process."""
    rows = setting.micro_batch_size * setting.accumulation
    smaller = [n for n in range(1, setting.micro_batch_size) if rows % n == 0]
    return [replace(setting, micro_batch_size=n, accumulation=rows // n) for n in smaller]


def with_cached_reference(setting: Setting) -> list[Setting]:
    """Without a copy of the weights."""
    return [replace(setting, reference="cached")] if setting.reference == "model" else []


def with_checkpointing(setting: Setting) -> list[Setting]:
    return (
        []
        if setting.recomputes in ("full", "offload")
        else [replace(setting, activation_checkpointing=True, recomputed_layers=None)]
    )


def with_offloaded_activations(setting: Setting) -> list[Setting]:
    """Of long rows, what recomputed layers keep in host memory."""
    if setting.recomputes != "full" or setting.own_row_tokens < LONG_ROW_TOKENS:
        return []
    return [replace(setting, offloads_activations=True)]


def in_plain_order(setting: Setting) -> list[Setting]:
    """Of the stages of a pipeline, which then keep fewer activations: without what is deferred, and with one part."""
    found = [replace(setting, pipeline_schedule="1f1b")] if setting.order.zero_bubble else []
    return found + ([replace(setting, **PLAIN_1F1B)] if setting.parts > 1 else [])


def with_8_bit_state(setting: Setting) -> list[Setting]:
    return [replace(setting, optimizer="adamw_8bit")] if setting.optimizer == "adamw" else []


def with_bf16_weights(setting: Setting) -> list[Setting]:
    """Where launch and optimizer allow it."""
    if setting.weights == "bf16" or bf16_weights_problems(setting.cell, weights="bf16", precision=setting.precision):
        return []
    return [replace(setting, weights="bf16")]


def sharded(setting: Setting) -> list[Setting]:
    """Under every strategy that splits more over the same GPUs, or that offloads no longer; none offloads. Of a
    pipeline also with more stages, of experts with more GPUs that share them, of stages and split layers also with
    shards of them."""
    here, parts = setting.placement, setting.model_parts
    found = []
    if setting.stages > 1:
        numbers = range(setting.stages + 1, setting.world_size + 1)
        deeper = [_with_stages(setting, each) for each in numbers if setting.accumulation * each % setting.stages == 0]
        found = [each for each in deeper if not world_sizes_problem(each.strategy, each.world_size, each.sizes)]
    if setting.experts > 1:
        found = [replace(setting, experts=each) for each in SPLITS if each > setting.experts]
    if shards := sharded_as(setting.strategy):
        found.append(replace(setting, strategy=shards, pipeline_schedule="1f1b"))
    together = setting.world_size // setting.data_processes
    if setting.accumulation % together:  # too few rows for as many processes as there are GPUs
        return found
    apart = replace(setting, **APART, **PLAIN_1F1B, accumulation=setting.accumulation // together)
    for strategy in (each for each in STRATEGIES if each not in SIZES):
        there = placement_of(strategy, setting.world_size)
        more = (there.weight_shards, there.gradient_shards, there.optimizer_shards)
        less = tuple(parts * each for each in (here.weight_shards, here.gradient_shards, here.optimizer_shards))
        if there.optimizer_on == "gpu" and (more > less or (more == less and here.optimizer_on != "gpu")):
            found.append(replace(apart, strategy=strategy))
    return found


def _with_stages(setting: Setting, stages: int) -> Setting:
    """With the rows of a step."""
    return replace(setting, stages=stages, accumulation=setting.accumulation * stages // setting.stages)


def spread(setting: Setting) -> list[Setting]:
    """With each row computed by 2, 4 or 8 of the GPUs that compute different ones, where the rows of a step are enough
    for all; also of those that hold shards of split layers."""
    if setting.size > 1 and setting.strategy != TOGETHER["cp_tp"]:
        return []
    strategy = "cp" if setting.size == 1 else "cp_tp"
    sizes = [number for number in SPLITS if setting.data_processes % number == 0]
    return [
        replace(setting, strategy=strategy, context=number, accumulation=setting.accumulation * number)
        for number in sizes
    ]


def with_adapter(setting: Setting) -> list[Setting]:
    return [replace(setting, adapter="lora")] if setting.adapter == "none" else []


def in_4_bits(setting: Setting) -> list[Setting]:
    return [replace(setting, bits=4)] if setting.adapter != "none" and setting.bits != 4 else []


def with_shorter_rows(setting: Setting) -> list[Setting]:
    """Half as long."""
    tokens = setting.row_tokens // 2
    return [replace(setting, row_tokens=tokens)] if tokens >= LEAST_ROW_TOKENS else []


def differing(setting: Setting, other: Setting, fields: Sequence[str] = tuple(KEYS)) -> dict[str, str]:
    """Keys of the recipe with their values in a setting, of the fields in which it differs from another."""
    mine, theirs = asdict(setting), asdict(other)
    return {KEYS[field][0]: KEYS[field][1](setting) for field in fields if mine[field] != theirs[field]}


def reduction(setting: Setting, other: Setting) -> dict[str, str]:
    """Weights and optimizer, by which updates are more or less exact, where they differ."""
    return differing(setting, other, ("weights", "optimizer"))


def given_up(setting: Setting, asked: Setting) -> tuple[str, ...]:
    """What its less exact updates mean, in sentences."""
    return tuple(GIVEN_UP[key] for key in reduction(setting, asked))
