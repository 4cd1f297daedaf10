"""Predicted time: traced operations against PyTorch's count, what is sent against the ZeRO paper, and what must be true
of any prediction."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_models import arithmetic
from thinning import thinned
from torch.utils.flop_counter import FlopCounterMode
from tracing import begun, traced_step
from transformers import AutoModelForCausalLM

from finetune.hardware.cards import known_gpus, parse_gpus
from finetune.hardware.rates import rates_of
from finetune.models.loading import config_from
from finetune.planner.communication import transfers
from finetune.planner.speed import PHASES, StepTime, step_time
from finetune.trace.dry_run import stepped
from finetune.trace.powers import MicroBatch
from finetune.trace.setting import Setting
from finetune.trace.shallow import Depth, Kernel, Step
from finetune.trace.tracer import key_setting

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
MIXTURE = SMALL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
PUBLISHED = json.loads((Path(__file__).parent / "model_configs.json").read_text())["llama-3.1-8b"]
LLAMA_8B, PARAMETERS = PUBLISHED["config"], PUBLISHED["parameters"]
ANATOMY = arithmetic("llama-3.1-8b").anatomy
HEAD = LLAMA_8B["hidden_size"] * LLAMA_8B["vocab_size"]
DOWN = LLAMA_8B["hidden_size"] * LLAMA_8B["intermediate_size"]
TRACED = MicroBatch(7, 29)
GPUS = {1: "1xH100", 2: "2xH100", 8: "8xH100", 16: "2x8xH100"}
"""By their number."""
SINGLE = Setting(accumulation=2)
CHECKPOINTED = replace(SINGLE, activation_checkpointing=True)
LORA = replace(SINGLE, adapter="lora")
SHARDED = Setting("fsdp2", 8, accumulation=2)
STRATEGIES = [
    *(
        Setting(strategy, 8, accumulation=2)
        for strategy in ("ddp", "fsdp2", "fsdp2_offload", "zero1", "zero2", "zero3")
    ),
    *(Setting(strategy, 2, accumulation=2) for strategy in ("fsdp2", "zero2")),
    Setting("hsdp", 16, accumulation=2),
]
KEPT = [SINGLE, LORA, SHARDED]
"""Settings that are traced with activation checkpointing too."""
ASKED = [
    *(replace(setting, activation_checkpointing=True) for setting in KEPT),
    *(replace(LORA, bits=bits) for bits in (None, 4, 8)),
    *STRATEGIES,
    Setting("ddp", 8),  # of one micro-batch
    Setting("ddp", 8, accumulation=3),
    SINGLE,
]


@pytest.fixture(scope="module", autouse=True)
def traces() -> "Iterator[dict[Setting, Future[Step]]]":
    """Steps of Llama 3.1 8B by their keys."""
    with begun({key_setting(setting): partial(traced_step, LLAMA_8B, setting) for setting in ASKED}) as found:
        yield found


@pytest.fixture(scope="module")
def step(traces: "dict[Setting, Future[Step]]") -> Any:
    return lambda setting: traces[key_setting(setting)].result()


@pytest.fixture(scope="module")
def predicted(step: Any) -> Any:
    def predict(setting: Setting, gpus: str | None = None, tokens: float | None = None) -> StepTime:
        machines = parse_gpus(gpus or GPUS[setting.world_size])
        return step_time(step(setting), setting, machines, ANATOMY, mean_document_tokens=tokens or setting.row_tokens)

    return predict


def counted(fields: dict[str, Any], setting: Setting) -> tuple[int, list[Kernel]]:
    """PyTorch's count of a real run's products but for those of groups, which it does not know; and what is traced of
    the last step."""

    # which PyTorch does not know either
    def in_place(added: Any, left: Any, right: Any, **_: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        ledger = stepped(config_from(fields), setting, real=True, counts_work=True)
    assert ledger.calls is not None
    known = sum(flops for name, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(name))
    return known, [each for each in ledger.calls.kernels(TRACED) if each.kind == "product"]


@pytest.mark.parametrize(
    ("fields", "adapter", "checkpointed"),
    thinned(
        [
            (SMALL, "none", False),
            (SMALL, "lora", True),
            (SMALL, "dora", False),
            (MIXTURE, "none", True),
            (MIXTURE, "lora", False),
        ],
        [
            (SMALL, "none", True),
            (SMALL, "lora", False),
            (SMALL, "dora", True),
            (MIXTURE, "none", False),
            (MIXTURE, "lora", True),
        ],
    ),
)
def test_matrix_products_are_those_that_pytorch_counts(fields: dict[str, Any], adapter: str, checkpointed: bool):
    """Of the second micro-batch: of two runs, one has one more."""
    sizes = {"micro_batch_size": TRACED.rows, "row_tokens": TRACED.row_tokens}
    setting = Setting(adapter=adapter, rank=4, activation_checkpointing=checkpointed, precision="no", **sizes)
    (fewer, kernels), (more, _) = (counted(fields, replace(setting, accumulation=times)) for times in (1, 2))
    every = [each for each in kernels if each.name != "aten::_grouped_mm"]
    assert sum(each.calls * TRACED.value(each.flops) for each in every) == more - fewer > 0


def test_a_token_meets_the_experts_that_are_chosen_for_it():
    setting = Setting(precision="no", micro_batch_size=TRACED.rows, row_tokens=TRACED.row_tokens)
    _, kernels = counted(MIXTURE, setting)
    experts = [each for each in kernels if each.name == "aten::_grouped_mm"]
    of_token = 2 * 3 * 2 * 3 * 64 * 160  # FLOPs of two experts with three matrices, in three layers
    for phase, times in (("forward", 1), ("backward", 2)):
        flops = sum(each.calls * TRACED.value(each.flops) for each in experts if each.phase == phase)
        assert flops == times * of_token * TRACED.rows * TRACED.row_tokens


def test_a_step_of_bf16_weights_reads_and_writes_each_of_them_and_its_moments_once():
    setting = Setting(weights="bf16", precision="no", micro_batch_size=TRACED.rows, row_tokens=TRACED.row_tokens)
    ledger = stepped(config_from(SMALL), setting, real=True, counts_work=True)
    assert ledger.calls is not None
    updates = [each for each in ledger.calls.kernels(TRACED) if each.name == "finetune::adamw_rounded"]
    assert {each.phase for each in updates} == {"step"}
    model = AutoModelForCausalLM.from_config(config_from(SMALL))
    assert sum(each.calls for each in updates) == len(list(model.parameters()))
    moved = sum(each.calls * TRACED.value(each.bytes) for each in updates)
    assert moved == 2 * 7 * sum(each.numel() for each in model.parameters())


def test_without_the_kernel_the_step_of_bf16_weights_is_planned_as_the_operations_that_it_consists_of():
    setting = Setting(weights="bf16", precision="no", micro_batch_size=TRACED.rows, row_tokens=TRACED.row_tokens)
    bytes_moved = {}
    for one_kernel in (True, False):
        asked = replace(setting, one_kernel=one_kernel)
        ledger = stepped(config_from(SMALL), asked, real=True, counts_work=True)
        assert ledger.calls is not None
        updates = [each for each in ledger.calls.kernels(TRACED) if each.phase == "step"]
        assert ("finetune::adamw_rounded" in {each.name for each in updates}) == one_kernel
        bytes_moved[one_kernel] = sum(each.calls * TRACED.value(each.bytes) for each in updates)
    assert bytes_moved[False] > 5 * bytes_moved[True]


def products(step: Step, *passes: str) -> float:
    """FLOPs of the matrix products of one micro-batch of a row of 1024 positions."""
    phases = [phase for name in passes for phase in PHASES[name]]
    every = [each for each in step.kernels if each.kind == "product" and each.phase in phases]
    return sum(each.calls * step.micro_batch(1, 1024).value(each.flops) for each in every) / step.micro_batches


def test_products_of_the_whole_model_take_two_operations_a_weight_and_position(step: Any):
    linear = 2 * 1024 * (PARAMETERS - HEAD)  # the embedding is looked up; of norms 4,096 elements each
    assert products(step(SINGLE), "forward") == pytest.approx(linear, rel=1e-4)
    assert products(step(SINGLE), "backward") == pytest.approx(2 * linear, rel=1e-4)
    again = products(step(CHECKPOINTED), "backward") - products(step(SINGLE), "backward")
    # but for the head, and for each layer's last product, whose result nobody needs again
    assert again == pytest.approx(linear - 2 * 1024 * (HEAD + 32 * DOWN), rel=1e-4)


def test_quantised_weights_are_multiplied_as_others_are(step: Any):
    exact = products(step(LORA), "forward", "backward")
    for bits in (4, 8):
        assert products(step(replace(LORA, bits=bits)), "forward", "backward") == pytest.approx(exact, rel=1e-3)


def sent_elements(step: Step, setting: Setting) -> dict[str, float]:
    """Elements that a process sends in a step, by what; weights travel in 2 bytes and gradients in 4."""
    machines = parse_gpus(GPUS[setting.world_size])
    sent = transfers(step, setting, machines, rates_of(machines.gpu))
    return {each.what: each.bytes / (2 if "gather" in each.what else 4) for each in sent if each.is_collective}


@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize(
    "setting", [each for each in STRATEGIES if each.strategy not in ("hsdp", "fsdp2_offload")], ids=str
)
def test_a_process_sends_what_the_zero_paper_says(setting: Setting, micro_batches: int, step: Any):
    """Rajbhandari et al., arXiv:1910.02054, section 7: 2 elements a weight, 3 where weights are sharded too.

    DeepSpeed 0.19.8 reduces by all-reduce in stages 1 and 2 (``use_multi_rank_bucket_allreduce``), which takes one
    more. Weights that stay gathered until the backward pass are not gathered again: those of the head.
    """
    each_micro_batch, once, stay = {
        "ddp": (0, 2, 0),
        "zero1": (0, 3, 0),
        "zero2": (2, 1, 0),
        "zero3": (3, 0, HEAD),
        "fsdp2": (3, 0, HEAD),
    }[setting.strategy]
    setting = replace(setting, accumulation=micro_batches)
    sent = sum(sent_elements(step(setting), setting).values())
    elements = each_micro_batch * micro_batches * PARAMETERS + once * PARAMETERS - micro_batches * stay
    within = 0.005 if setting.strategy == "zero3" else 1e-4  # of 5 layers at the end, in whole weights
    assert sent == pytest.approx(elements * (setting.world_size - 1) / setting.world_size, rel=within)


def test_replicas_reduce_their_shards_only(step: Any):
    setting = replace(STRATEGIES[-1], accumulation=1)
    sent = sent_elements(step(setting), setting)
    assert sent["all-reduce in the backward pass"] == pytest.approx(PARAMETERS / 8, rel=1e-4)
    assert sent["reduce-scatter in the backward pass"] == pytest.approx(PARAMETERS * 7 / 8, rel=1e-4)


def test_two_replicas_of_two_shards_gather_weights_inside_a_machine_and_reduce_between_machines(step: Any):
    """As many share weights as reduce gradients: the sizes of their groups do not tell them apart."""
    traced = step(STRATEGIES[-1])

    def in_pairs(depth: Depth) -> Depth:
        return replace(depth, sent=[replace(each, members=2) for each in depth.sent if each.members < 16])

    of_four = replace(traced, low=in_pairs(traced.low), high=in_pairs(traced.high))
    machines = parse_gpus("2x2xH100")
    network = replace(machines.gpu.network, gb_per_second=machines.gpu.network.gb_per_second / 100)
    slow = replace(machines, gpu=replace(machines.gpu, network=network))
    usual, over_slow = (
        {each.what: each.seconds for each in transfers(of_four, Setting("hsdp", 4), known, rates_of(known.gpu))}
        for known in (machines, slow)
    )
    reduced = {"all-reduce in the backward pass"}
    assert {name for name in usual if over_slow[name] > 10 * usual[name]} == reduced
    inside = {name for name in usual if over_slow[name] == usual[name]}
    assert inside >= {f"{name} in the backward pass" for name in ("all-gather", "reduce-scatter")}


def test_one_gpu_sends_nothing(step: Any):
    assert sent_elements(step(SINGLE), SINGLE) == {}


@st.composite
def cases(draw: st.DrawFn) -> Setting:
    return replace(
        draw(st.sampled_from([*ASKED, Setting("zero3_offload", 8)])),
        micro_batch_size=draw(st.integers(1, 16)),
        row_tokens=draw(st.integers(1024, 32768)),
        accumulation=draw(st.integers(1, 8)),
    )


def of(setting: Setting) -> Setting:
    """That which is traced."""
    return (
        replace(setting, strategy=setting.strategy.removesuffix("_offload")) if "zero" in setting.strategy else setting
    )


@settings(deadline=None)
@given(setting=cases())
def test_parts_are_not_negative_add_up_and_stay_below_the_peak(setting: Setting, step: Any):
    machines = parse_gpus(GPUS[setting.world_size])
    found = step_time(step(of(setting)), setting, machines, ANATOMY, mean_document_tokens=1024)
    assert all(part >= 0 for part in astuple(found.parts))
    assert found.parts.optimizer > 0
    assert found.step_seconds == pytest.approx(sum(astuple(found.parts)))
    assert found.tokens_per_second == pytest.approx(found.tokens / found.step_seconds)
    assert found.seconds_for(10 * found.tokens) == pytest.approx(10 * found.step_seconds)
    assert 0 < found.mfu < 1
    waited = found.parts.communication + found.parts.offload
    assert waited <= sum(each.seconds for each in found.transfers) * (1 + 1e-9)


@settings(deadline=None)
@given(setting=cases(), times=st.integers(2, 4))
def test_more_of_anything_takes_longer_and_a_larger_micro_batch_is_never_slower_a_token(
    setting: Setting, times: int, step: Any
):
    def time(changed: Setting, tokens: float = 1024) -> StepTime:
        machines = parse_gpus(GPUS[setting.world_size])
        return step_time(step(of(changed)), changed, machines, ANATOMY, mean_document_tokens=tokens)

    once = time(setting)
    longer = time(replace(setting, micro_batch_size=times * setting.micro_batch_size))
    assert time(replace(setting, accumulation=times * setting.accumulation)).step_seconds > once.step_seconds
    assert longer.step_seconds >= once.step_seconds * (1 - 1e-9)
    assert longer.tokens_per_second >= once.tokens_per_second * (1 - 1e-9)
    assert time(setting, tokens=512).step_seconds <= once.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("micro_batch_size", [1, 8])
@pytest.mark.parametrize("setting", KEPT, ids=str)
def test_checkpointing_is_never_faster(setting: Setting, micro_batch_size: int, predicted: Any):
    kept = replace(setting, micro_batch_size=micro_batch_size)
    again = replace(kept, activation_checkpointing=True)
    assert predicted(again).step_seconds > predicted(kept).step_seconds
    assert predicted(again).model_flops == pytest.approx(predicted(kept).model_flops)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_more_gpus_are_faster_together_and_slower_links_never_wait_less(strategy: str, predicted: Any):
    two, eight = (Setting(strategy, gpus, micro_batch_size=2, row_tokens=4096, accumulation=2) for gpus in (2, 8))
    assert predicted(two).tokens_per_second < predicted(eight).tokens_per_second
    slow, fast = predicted(eight, "8xH100 PCIe"), predicted(eight)
    assert slow.parts.communication >= fast.parts.communication


def test_every_known_card_is_predicted_and_an_unknown_one_at_the_speed_of_a_named_one(predicted: Any):
    for gpu in known_gpus():
        assert predicted(replace(SINGLE, precision="fp16"), gpu.name).stand_in is None
    unknown, known = predicted(SINGLE, "80GB"), predicted(SINGLE, "H100")
    assert unknown.stand_in == "H100"
    assert unknown.step_seconds == known.step_seconds
