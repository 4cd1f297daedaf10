"""Predicted time against PyTorch's count of operations, the volumes of the ZeRO paper, and what must be true of any
prediction."""

from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config import sections
from finetune.config.compatibility import ADAPTERS, BITS, OPTIMIZERS, Cell, refusal
from finetune.config.compatibility import STRATEGIES as EVERY_STRATEGY
from finetune.errors import InputError
from finetune.hardware.cards import known_gpus, parse_gpus
from finetune.models import adapter as adapters
from finetune.models import loading as models
from finetune.planner.communication import transfers
from finetune.planner.rates import RATES
from finetune.planner.shape import ModelShape, shape_of
from finetune.planner.speed import StepTime, step_time
from finetune.planner.work import work_of
from finetune.trace.placement import placement_of, world_sizes_problem
from finetune.trace.setting import Setting

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
LLAMA_8B = shape_of(
    SMALL
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
)
MIXTURE = shape_of(
    SMALL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
)


def predicted(setting: Setting, gpus: str = "1xH100", shape: ModelShape = LLAMA_8B, tokens: float = 1024) -> StepTime:
    machines = parse_gpus(gpus)
    of_all = replace(setting, world_size=machines.world_size)
    return step_time(shape, of_all, machines, mean_document_tokens=tokens)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("kind", "within"), [("none", 0.0), ("lora", 0.03), ("dora", 0.03)])
def test_matrix_products_are_those_that_pytorch_counts(kind: str, within: float, checkpointed: bool):
    """Within 3 % for an adapter: its first layer, a third of this model, passes no gradient on."""
    config, tokens = LlamaConfig(**SMALL, attn_implementation="eager"), 48
    model = LlamaForCausalLM(config)
    if kind != "none":
        adapters.attach(
            model,
            sections.Adapter(type=kind, rank=4),
            base="small",
            revision=None,
            dtype=torch.float32,
            seed=0,
        )
    if checkpointed:
        models.recompute_activations(model)
    model.train()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).logits.sum().backward()
    counted = sum(v for k, v in counter.get_flop_counts()["Global"].items() if "bmm" not in str(k))  # no attention
    setting = Setting(adapter=kind, rank=4, activation_checkpointing=checkpointed, row_tokens=tokens)
    work = work_of(shape_of(SMALL), setting, placement_of("single", 1), mean_document_tokens=tokens)
    assert work.forward.matrix_flops + work.backward.matrix_flops == pytest.approx(counted, rel=within)


def sent_elements(strategy: str, gpus: str, **of_setting: int) -> dict[str, float]:
    """Elements that a process sends in a step, by what; weights travel in 2 bytes and gradients in 4."""
    machines = parse_gpus(gpus)
    setting = Setting(strategy=strategy, world_size=machines.world_size, **of_setting)
    placement = placement_of(strategy, machines.world_size)
    work = work_of(LLAMA_8B, setting, placement, mean_document_tokens=1024)
    sent = transfers(LLAMA_8B.layers, setting, placement, machines, work, RATES)
    return {each.what: each.bytes / (2 if "weights" in each.what else 4) for each in sent if each.is_collective}


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("gpus", [2, 8])
@pytest.mark.parametrize(
    ("strategy", "each_micro_batch", "once"),
    [("ddp", 0, 2), ("zero1", 0, 2), ("zero2", 1, 1), ("zero3", 3, 0), ("fsdp2", 3, 0)],
)
def test_a_process_sends_what_the_zero_paper_says(
    strategy: str, each_micro_batch: int, once: int, gpus: int, micro_batches: int
):
    """Rajbhandari et al., arXiv:1910.02054, section 7: 2 elements a weight, 3 where weights are sharded too."""
    sent = sum(sent_elements(strategy, f"{gpus}xH100", accumulation=micro_batches).values())
    weights = LLAMA_8B.parameters * (gpus - 1) / gpus
    assert sent == pytest.approx((each_micro_batch * micro_batches + once) * weights)


def test_replicas_reduce_their_shards_only():
    sent = sent_elements("hsdp", "2x8xH100")
    assert sent["all-reduce of gradients between replicas"] == pytest.approx(LLAMA_8B.parameters / 8)
    assert sent["reduce-scatter of gradients"] == pytest.approx(LLAMA_8B.parameters * 7 / 8)


def test_one_gpu_sends_nothing():
    assert sent_elements("single", "1xH100") == sent_elements("fsdp2", "1xH100") == {}


@st.composite
def cases(draw):
    gpus = draw(st.sampled_from(["1xH100", "1xRTX 4090", "4xA100-40GB", "8xH200", "2x8xH100", "3x4x80GB", "4x1xL40S"]))
    world_size = parse_gpus(gpus).world_size
    strategy = draw(st.sampled_from([name for name in EVERY_STRATEGY if not world_sizes_problem(name, world_size)]))
    adapter, bits = draw(st.sampled_from(ADAPTERS)), draw(st.sampled_from(BITS))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    if refusal(Cell(strategy, bits, adapter, optimizer)):
        adapter, bits, optimizer = "none", None, "adamw"
    setting = Setting(
        strategy=strategy,
        bits=bits,
        adapter=adapter,
        rank=draw(st.integers(1, 256)),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        optimizer=optimizer,
        weights=draw(st.sampled_from(["fp32_master", "bf16"])),
        precision=draw(st.sampled_from(["bf16", "fp16", "no"])),
        activation_checkpointing=draw(st.booleans()),
        micro_batch_size=draw(st.integers(1, 16)),
        row_tokens=draw(st.integers(1024, 32768)),
        accumulation=draw(st.integers(1, 8)),
    )
    return setting, gpus


@settings(deadline=None)
@given(cases())
def test_parts_are_not_negative_add_up_and_stay_below_the_peak(case):
    found = predicted(*case)
    assert all(part >= 0 for part in astuple(found.parts))
    assert found.step_seconds == pytest.approx(sum(astuple(found.parts)))
    assert found.tokens_per_second == pytest.approx(found.tokens / found.step_seconds)
    assert found.seconds_for(10 * found.tokens) == pytest.approx(10 * found.step_seconds)
    assert 0 < found.mfu < 1
    waited = found.parts.communication + found.parts.offload
    assert waited <= sum(each.seconds for each in found.transfers) * (1 + 1e-9)


@settings(deadline=None)
@given(cases(), st.integers(2, 4))
def test_more_of_anything_takes_longer_and_a_larger_micro_batch_is_never_slower_a_token(case, times):
    setting, gpus = case
    once = predicted(setting, gpus)
    longer = predicted(replace(setting, micro_batch_size=times * setting.micro_batch_size), gpus)
    more = predicted(replace(setting, accumulation=times * setting.accumulation), gpus)
    assert more.step_seconds > once.step_seconds
    assert longer.step_seconds >= once.step_seconds * (1 - 1e-9)
    assert longer.tokens_per_second >= once.tokens_per_second * (1 - 1e-9)
    shorter = predicted(setting, gpus, tokens=512)
    assert shorter.step_seconds <= once.step_seconds * (1 + 1e-9)


@settings(deadline=None)
@given(cases())
def test_checkpointing_is_never_faster(case):
    setting, gpus = case
    kept, again = (predicted(replace(setting, activation_checkpointing=on), gpus) for on in (False, True))
    assert again.step_seconds >= kept.step_seconds * (1 - 1e-9)
    assert again.model_flops == kept.model_flops


@pytest.mark.parametrize("strategy", [name for name in EVERY_STRATEGY if name not in ("single", "hsdp")])
def test_more_gpus_are_faster_together_and_never_faster_each_than_without_waiting(strategy: str):
    setting = Setting(strategy=strategy, micro_batch_size=2, row_tokens=4096)
    speeds = [predicted(setting, f"{gpus}xH100").tokens_per_second for gpus in (2, 4, 8)]
    assert speeds == sorted(speeds)
    slow, fast = predicted(setting, "8xH100 PCIe"), predicted(setting, "8xH100")
    assert slow.parts.communication >= fast.parts.communication


def test_every_known_card_is_predicted_and_an_unknown_one_at_the_speed_of_a_named_one():
    for gpu in known_gpus():
        assert predicted(Setting(precision="fp16"), gpu.name).stand_in is None
    unknown, known = predicted(Setting(), "80GB"), predicted(Setting(), "H100")
    assert unknown.stand_in == "H100"
    assert unknown.step_seconds == known.step_seconds


def test_a_token_meets_only_the_experts_that_are_chosen_for_it():
    both = replace(MIXTURE, experts_per_token=8)
    one, every = (
        work_of(shape, Setting(), placement_of("single", 1), mean_document_tokens=1024).forward.matrix_flops
        for shape in (MIXTURE, both)
    )
    experts = sum(linear.matrix_parameters for linear in MIXTURE.linears if linear.copies == 8)
    assert every - one == pytest.approx(2 * MIXTURE.layers * experts * 6 / 8 * 2048)


def test_a_window_limits_what_a_token_attends_to():
    windowed = replace(LLAMA_8B, sliding_window=1024, windowed_layers=LLAMA_8B.layers)
    work = [
        work_of(shape, Setting(row_tokens=8192), placement_of("single", 1), mean_document_tokens=8192)
        for shape in (windowed, LLAMA_8B)
    ]
    pairs = [sum(min(i + 1, most) for i in range(8192)) for most in (1024, 8192)]
    ratio = work[0].forward.attention_flops / work[1].forward.attention_flops
    assert ratio == pytest.approx(pairs[0] / pairs[1], rel=1e-3)


def test_contradictions_are_refused_in_sentences_all_at_once():
    with pytest.raises(InputError) as refused:
        step_time(LLAMA_8B, Setting(world_size=4), parse_gpus("8xT4"), mean_document_tokens=4096)
    assert refused.value.problems == [
        "The setting has 4 processes and 8xT4 has 8 GPUs; give one process to each.",
        "Documents of 4096 tokens do not fit into rows of 2048; give a mean between 1 and 2048.",
        "T4 does not support bf16; launch with --mixed_precision fp16.",
    ]
