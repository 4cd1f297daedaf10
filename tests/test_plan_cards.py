"""What a card decides of a plan: the kernels of its attention, its speed, its links, and the host beside it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from full_trace import full_trace

from finetune.cli.planning.asked import asked
from finetune.cli.planning.reasons import reasons
from finetune.cli.planning.written import Options
from finetune.config.refusals import packing_problems
from finetune.data.batches import Batches
from finetune.data.streaming import Stream
from finetune.errors import InputError
from finetune.hardware.cards import known_gpus, parse_gpus, precision_problem
from finetune.hardware.rates import rates_of
from finetune.models.loading import config_from
from finetune.planner.choose import Plan
from finetune.planner.judged_rows import judged
from finetune.planner.memory import host_bytes, step_memory
from finetune.planner.model import Model
from finetune.planner.question import question_about
from finetune.planner.speed import StepTime, pass_of, step_time
from finetune.trace.depth import trace_depth
from finetune.trace.kernel_workspace import inside
from finetune.trace.layers import Anatomy
from finetune.trace.powers import CONSTANT, MicroBatch, prime_micro_batch
from finetune.trace.setting import Setting
from finetune.trace.shallow import Kernel, Step
from finetune.trace.tracer import Tracer, key_setting

HEADS, TOKENS = 4, 512
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 4096,
}
UNGROUPED = LLAMA | {"num_key_value_heads": HEADS}
ANATOMY = Anatomy(0, 0, 0, 0, (), 2, 0, 1, None)
SETTING = Setting(row_tokens=TOKENS)
OF_SCORES = 4 * HEADS * TOKENS**2
"""Bytes of a layer's scores in fp32."""


def saved(fields: dict[str, Any], setting: Setting) -> int:
    """Bytes that two layers keep for the backward pass."""
    return full_trace(fields, setting).saved.bytes


def step_of(setting: Setting, fields: dict[str, Any] = LLAMA) -> Step:
    """Of all layers."""
    traced = prime_micro_batch(setting.row_tokens, {value for value in fields.values() if isinstance(value, int)})
    depth = trace_depth(config_from(fields), key_setting(setting), traced)
    return Step(depth.layers, depth, depth)


def predicted(step: Step, setting: Setting, gpus: str) -> StepTime:
    machines = parse_gpus(gpus)
    asked = replace(setting, world_size=machines.world_size)
    return step_time(step, asked, machines, ANATOMY, mean_document_tokens=setting.row_tokens)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_grouped_queries_keep_their_scores_where_there_is_no_flash_attention(precision: str):
    """As PyTorch computes them: of every head, in fp32."""
    setting = replace(SETTING, precision=precision)
    more = saved(LLAMA, replace(setting, flash=False)) - saved(LLAMA, setting)
    assert 2 * OF_SCORES < more < 2.2 * OF_SCORES


def test_grouped_queries_keep_their_scores_in_fp32_on_every_card():
    without = full_trace(LLAMA, replace(SETTING, precision="no"), as_on_gpu=False).saved.bytes
    assert saved(LLAMA, replace(SETTING, precision="no")) > without + 2 * OF_SCORES


def test_queries_that_are_not_grouped_keep_no_scores_on_any_card():
    assert saved(UNGROUPED, replace(SETTING, flash=False)) == saved(UNGROUPED, SETTING)


def test_kept_scores_grow_with_the_square_of_a_row():
    step = step_of(replace(SETTING, flash=False))
    short, long = (
        step_memory(step, replace(SETTING, row_tokens=tokens), ANATOMY).parts["activations"] for tokens in (2048, 4096)
    )
    assert long - short > 3 * 2 * 4 * HEADS * 2048**2


def test_scores_that_are_computed_and_masked_are_no_useful_work():
    with_flash, without = (
        predicted(step_of(replace(SETTING, flash=flash)), replace(SETTING, precision="fp16"), "1xV100")
        for flash in (True, False)
    )
    assert without.model_flops == pytest.approx(with_flash.model_flops, rel=0.02)
    assert without.step_seconds > with_flash.step_seconds


@pytest.mark.parametrize(("gpus", "flash"), [("1xT4", False), ("1xV100", False), ("1xA100", True), ("1x80GB", True)])
def test_a_question_knows_whether_its_card_has_flash_attention(
    gpus: str, flash: bool, tmp_path: Path, model_file: Path
):
    read = asked([], Options(model=str(model_file), gpus=gpus, method="full"))
    with read.question.model.tracer:
        assert read.question.base.flash == flash


def test_packing_is_refused_as_by_the_recipe_where_there_is_no_flash_attention(model_file: Path):
    with pytest.raises(InputError) as refused:
        asked(["--data.packing", "true"], Options(model=str(model_file), gpus="1xT4"))
    assert packing_problems((7, 5)) == refused.value.problems
    assert packing_problems((8, 0)) == packing_problems(None) == []


def test_bf16_is_refused_where_nothing_multiplies_in_it(model_file: Path):
    with pytest.raises(InputError) as refused:
        asked([], Options(model=str(model_file), gpus="1xT4", mixed_precision="bf16"))
    assert refused.value.problems == [precision_problem(parse_gpus("T4").gpu, "bf16")]


@pytest.mark.parametrize(
    ("card", "efficiency"),
    [
        ("A100", (0.8, 0.8)),
        ("H100", (0.65, 0.65)),
        ("H200", (0.65, 0.65)),
        ("RTX 4090", (0.9, 1.0)),
        ("L4", (0.7, 0.8)),
    ],
)
def test_each_family_of_cards_reaches_its_own_share_of_the_data_sheet(card: str, efficiency: tuple[float, float]):
    least, most = efficiency
    assert least <= rates_of(parse_gpus(card).gpu).matrix_efficiency <= most


@pytest.mark.parametrize("width", [1024, 8192])
def test_short_rows_are_slower_per_token(width: int):
    """Of wide layers too, whose products the host launches in time."""
    product = Kernel("forward", "product", "aten::mm", 2, {(1, 1, 0): 2.0 * width**2}, {(1, 1, 0): 4.0 * width}, 1.0)
    gpu = parse_gpus("H100").gpu
    per_token = {}
    for tokens in (512, 2048):
        seconds = pass_of([product], MicroBatch(1, tokens), gpu, rates_of(gpu), 1.0).seconds
        per_token[tokens] = seconds / tokens
    assert per_token[512] > 1.02 * per_token[2048]


def test_cards_that_cannot_reach_each_other_send_through_the_host():
    def sends(card: str) -> str:
        return parse_gpus(card).gpu.node_link.name

    geforce = [gpu.name for gpu in known_gpus() if gpu.name.startswith("RTX") and gpu.name[4].isdigit()]
    apart = [name for name in geforce if "Ada" not in name]
    assert len(apart) >= 15
    assert {sends(name) for name in (*apart, "L4", "A10G", "T4")} == {"host_memory"}
    assert {sends(name) for name in ("A10", "L40S", "RTX 6000 Ada", "RTX A6000", "A100 PCIe")} == {"pcie4"}


def test_sharding_over_geforce_cards_waits_for_the_host_memory_between_them():
    setting = Setting(strategy="fsdp2", world_size=2)
    step = step_of(setting)
    geforce, workstation = (predicted(step, setting, f"2x{card}") for card in ("4090", "RTX 6000 Ada"))
    (gather, *_), (same, *_) = geforce.transfers, workstation.transfers
    more = gather.bytes / 3e9 - gather.bytes / 22e9
    assert gather.seconds - same.seconds == pytest.approx(more)


@pytest.mark.parametrize("vocabulary", [101, 106])
def test_all_gradients_are_reduced_once_whatever_their_number(vocabulary: int):
    """With 106 tokens all gradients together happen to be a multiple of the rows that are traced."""
    setting = Setting(strategy="ddp", world_size=2, row_tokens=64)
    step = step_of(setting, LLAMA | {"vocab_size": vocabulary})
    weights = sum(count * math.prod(shape) for shape, count in step.trained().items())
    assert (weights % 7 == 0) == (vocabulary == 106)
    reduced = [each for each in predicted(step, setting, "2xH100").transfers if each.what.startswith("all-reduce")]
    assert [each.bytes for each in reduced] == [4 * weights]


@pytest.mark.parametrize("strategy", ["fsdp2_offload", "zero3_offload"])
def test_an_optimizer_on_the_host_takes_one_thread_of_each_process(strategy: str, tmp_path: Path):
    """Masters and both moments are read and written, gradients read, in fp32: 28 bytes of a weight, at 11 GB/s."""
    setting = Setting(strategy=strategy, world_size=2, row_tokens=64)
    with Tracer(LLAMA, row_tokens=64, folder=tmp_path) as tracer:
        step = tracer.step(setting)
    weights = sum(count * math.prod(shape) for shape, count in step.trained().items())
    times = [predicted(step, setting, gpus).parts.optimizer for gpus in ("2xH100", "2x1xH100")]
    assert times[0] == times[1]  # no process takes another's time
    assert 28 * weights / 2 / 11e9 < times[0] < 3 * 28 * weights / 2 / 11e9


@pytest.mark.parametrize(("strategy", "is_told"), [("single", False), ("fsdp2_offload", True)])
def test_who_offloads_is_told_of_the_threads_of_the_host(strategy: str, is_told: bool, tmp_path: Path):
    with Tracer(LLAMA, row_tokens=TOKENS, folder=tmp_path) as tracer:
        setting = replace(SETTING, strategy=strategy)
        question = question_about(Model(LLAMA, tracer), setting, parse_gpus("1xH100"), mean_document_tokens=TOKENS)
        row = judged(question, setting)
        assert any("OMP_NUM_THREADS=N" in sentence for sentence in reasons(Plan(question, (row,), (), None))) == is_told


def test_what_is_offloaded_comes_to_lie_beside_the_weights_that_are_read():
    """Every process quantises all weights, and keeps them until its shards are made."""
    setting = Setting(strategy="fsdp2_offload", world_size=2, adapter="lora", bits=4, rank=2)
    step, parameters, linear = step_of(setting), 10**6, 9 * 10**5
    anatomy = Anatomy(parameters, parameters, linear, 10**5, (), 2, 0, 1, None)
    quantised = 2 * (parameters - linear) + linear / 2
    needed = host_bytes(step, anatomy, setting, processes_of_machine=2)
    assert needed == math.ceil(2 * quantised + 2 * step.on_host("weights"))
    assert step.on_host() > step.on_host("weights") > 0


def test_weights_that_are_stored_as_they_are_computed_with_are_in_host_memory_once_for_all_processes():
    """They are mapped from their files. Those of experts are put together, by each process."""
    dense = Anatomy(10**6, 10**6, 9 * 10**5, 10**5, (), 8, 0, 1, None, costs=(1.0,) * 9)
    mixture = replace(dense, active_parameters=10**5)
    split = Setting(strategy="tp", world_size=8, tensor=8)
    step = step_of(split)

    def needed(stored: str | None, setting: Setting = split, anatomy: Anatomy = dense) -> float:
        return host_bytes(step, anatomy, setting, processes_of_machine=8, stored=stored)

    assert needed("bfloat16") == 2 * 10**6
    assert needed("float32") == needed(None) == 8 * 2 * 10**6
    assert needed("float32", replace(split, precision="no")) == 4 * 10**6
    assert needed("bfloat16", replace(split, precision="no", weights="bf16")) == 2 * 10**6
    assert needed("bfloat16", anatomy=mixture) == 8 * 2 * 10**6
    assert needed("bfloat16", replace(split, strategy="pp", tensor=1, stages=8)) == 2 * 10**6  # of eight stages
    assert needed("bfloat16", replace(split, strategy="pp", tensor=1, stages=8, world_size=64)) == 2 * 10**6 / 8
    assert needed("bfloat16", replace(split, strategy="tp_pp", tensor=8, stages=4, world_size=32)) == 2 * 10**6 / 4
    assert needed("bfloat16", replace(split, strategy="pp", tensor=1, stages=8, world_size=16)) == 2 * 10**6 / 2
    assert needed("float32", replace(split, strategy="pp", tensor=1, stages=8)) == 8 * 2 * 10**6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_zero_3_looks_for_infinite_gradients_in_a_copy_of_all_in_fp16(precision: str, tmp_path: Path):
    setting = Setting(strategy="zero3", world_size=2, row_tokens=64, precision=precision)
    with Tracer(LLAMA, row_tokens=64, folder=tmp_path) as tracer:
        step = tracer.step(setting)
    shard = sum(count * math.prod(shape) for shape, count in step.trained().items()) // 2
    sought = {
        (each.width, each.bytes[CONSTANT]) for each in step.kernels if each.name == "aten::isinf" and each.width == 4
    }
    assert sought == ({(4, (4 + 1) * shard)} if precision == "fp16" else set())
    gradients = torch.empty(1000)
    assert inside("aten::isinf", (gradients,), gradients.isinf()) == 4000


def test_attention_meets_the_document_of_a_token_and_not_the_mean_one():
    lengths = np.array([100, 900])
    documents = SimpleNamespace(
        rows=SimpleNamespace(lengths=lengths), first_window=[SimpleNamespace(tokens=range(n)) for n in lengths]
    )
    for kind in (Batches, Stream):
        assert kind.mean_document_tokens.fget(documents) == 500
        assert kind.attended_tokens.fget(documents) == (100**2 + 900**2) / 1000


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return file
