"""The plan of activations in host memory: what stays on the GPU, what travels, and when it is proposed."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from plan_models import arithmetic
from test_plan_choose import GIB, question
from tracing import begun, traced_step

from finetune.hardware.cards import Machines, parse_gpus
from finetune.planner.candidates import candidates, fastest
from finetune.planner.changes import LONG_ROW_TOKENS
from finetune.planner.choose import plan
from finetune.planner.memory import offloaded_bytes
from finetune.planner.nearest import nearest_that_fits
from finetune.planner.question import METHODS, question_about
from finetune.trace.setting import Setting
from finetune.trace.shallow import HOST_COPY, Step

LAYERS, WIDTH, TOKENS = 6, 64, 2048
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 509,
    "max_position_embeddings": 4096,
}
LLAMA_8B = arithmetic("llama-3.1-8b", vocab_size=1000)  # whose scores take little
LORA = METHODS["lora"]
FULL = Setting(adapter="lora", activation_checkpointing=True, row_tokens=131072, layout="flat")
OFFLOAD = replace(FULL, offloads_activations=True)


def asked(tokens: int, gpus: str = "1x28GB", **others: Any) -> Any:
    base = Setting(adapter="lora", row_tokens=tokens, layout="flat")
    known: dict[str, Any] = {"model": LLAMA_8B, "base": base, "mean_document_tokens": tokens, "methods": (LORA,)}
    return question(gpus, **{"batch": 4} | known | others)


def slowed(machines: Machines, gb_per_second: float) -> Machines:
    link = replace(machines.gpu.host_link, gb_per_second=gb_per_second)
    return replace(machines, gpu=replace(machines.gpu, host_link=link))


@pytest.fixture(scope="module")
def steps() -> "Iterator[dict[Setting, Future[Step]]]":
    short = (replace(each, row_tokens=TOKENS) for each in (FULL, OFFLOAD))
    with begun({each: partial(traced_step, SMALL, each, row_tokens=TOKENS) for each in short}) as found:
        yield found


def test_a_trace_holds_no_inputs_of_layers_on_the_gpu_and_attention_is_computed_once(
    steps: "dict[Setting, Future[Step]]",
) -> None:
    full, offload = (found.result() for found in steps.values())
    micro_batch = full.micro_batch(1, TOKENS)
    at_the_loss = [
        max(whole.get("activations", 0.0) for place, (_, whole) in step.highest(micro_batch).items() if "loss" in place)
        for step in (full, offload)
    ]
    input_bytes, of_softmax = 2 * WIDTH * TOKENS, 4 * 4 * TOKENS
    # of the last layer its input is there in both, and what attention returned
    assert at_the_loss[0] - at_the_loss[1] == pytest.approx((LAYERS - 2) * input_bytes - of_softmax, rel=0.01)
    attention = [sum(each.calls for each in step.kernels if each.kind == "attention") for step in (full, offload)]
    assert attention[0] - attention[1] == pytest.approx(LAYERS * full.micro_batches)
    copies = {
        phase: [each for each in offload.sent if (each.name, each.phase) == (HOST_COPY, phase)] for phase in PHASES
    }
    moved = {phase: sum(each.calls * micro_batch.value(each.bytes) for each in copies[phase]) for phase in PHASES}
    assert moved["forward"] / offload.micro_batches == pytest.approx(LAYERS * (2 * input_bytes + of_softmax), rel=0.001)
    assert moved["backward"] / moved["forward"] == pytest.approx((LAYERS - 1) / LAYERS)
    assert not [each for each in full.sent if each.name == HOST_COPY]


PHASES = ("forward", "backward")


def test_one_process_under_fsdp2_gathers_no_more_than_each_of_two_does() -> None:
    """Between the micro-batches of a step it would hold the gradients of the whole model in fp32."""
    gathered = []
    for processes in (1, 2):
        setting = Setting(strategy="fsdp2_offload", world_size=processes, activation_checkpointing=True)
        step = traced_step(SMALL, setting, row_tokens=TOKENS)
        assert step.micro_batches == 2
        moments = step.moments(step.micro_batch(1, TOKENS))
        gathered.append(max(moment.categories.get("gathered", 0.0) for moment in moments))
    assert gathered[0] <= gathered[1]


def test_host_memory_is_counted_as_it_is_pinned_in_powers_of_two_for_each_process_and_micro_batch_on_its_way() -> None:
    step, anatomy = LLAMA_8B.tracer.step(OFFLOAD), LLAMA_8B.anatomy
    assert offloaded_bytes(step, anatomy, OFFLOAD) == 2 * 32 * GIB  # each of 131,072 tokens of 8 KiB
    longer = replace(OFFLOAD, row_tokens=131073)
    assert offloaded_bytes(step, anatomy, longer) == 2 * 2 * 32 * GIB
    pipeline = replace(OFFLOAD, strategy="pp", world_size=4, stages=4, accumulation=8)
    of_stages = (4 + 3 + 2 + 1) / 4 * 8 / 32  # micro-batches ahead, on average, and layers
    found = offloaded_bytes(LLAMA_8B.tracer.step(pipeline), anatomy, pipeline)
    assert found == pytest.approx(2 * 32 * GIB * of_stages, rel=0.1)  # the last one has fewer layers
    of_machine = LLAMA_8B.host_bytes(replace(OFFLOAD, strategy="ddp", world_size=8), processes_of_machine=8)
    assert of_machine == 8 * 2 * 32 * GIB
    assert LLAMA_8B.host_bytes(FULL, processes_of_machine=1) < 16 * GIB


def test_copies_cost_time_where_pcie_is_slower_than_the_layers() -> None:
    machines, known = parse_gpus("1xH100"), {"mean_document_tokens": OFFLOAD.row_tokens}
    own = LLAMA_8B.time(OFFLOAD, machines, **known)
    kinds = {each.what: each for each in own.transfers}
    assert kinds.keys() == {"activations to the host", "activations from the host"}
    for each in kinds.values():
        assert each.bytes == 2 * 32 * GIB
        assert each.seconds == pytest.approx(each.bytes / (machines.gpu.host_link.gb_per_second * 1e9))
    computed = own.step_seconds - own.parts.offload
    assert own.parts.offload < 0.02 * computed
    slow = LLAMA_8B.time(OFFLOAD, slowed(machines, 1.0), **known)
    assert slow.parts.offload > 0.9 * (2 * 2 * 32 * GIB / 1e9 - computed)
    stages = replace(OFFLOAD, strategy="pp", world_size=4, stages=4, accumulation=8)
    of_four = slowed(parse_gpus("4xH100"), 0.1)
    assert LLAMA_8B.time(stages, of_four, **known).parts.offload > LLAMA_8B.time(FULL, machines, **known).step_seconds


def test_long_rows_that_fit_in_no_other_way_are_offloaded_and_no_others() -> None:
    found = fastest(asked(32768), asked(32768).base)
    assert (found.setting.recomputes, found.verdict) == ("offload", "fits")
    assert found.offloads
    assert fastest(asked(32768, checkpointing=(True,)), asked(32768).base).verdict != "fits"  # as it was asked for
    assert fastest(asked(32768, "1xH100"), asked(32768).base).setting.recomputes in ("none", *map(str, range(1, 32)))
    short = LONG_ROW_TOKENS - 1
    assert fastest(asked(short, "1x18GB"), asked(short).base).setting.recomputes != "offload"


def test_what_stays_on_the_gpus_is_preferred_and_host_memory_is_asked_for() -> None:
    answer = plan(asked(32768, strategies=("single",), host_bytes=12 * GIB))
    assert answer.best is None  # 8 GiB of activations would do, but 15 GiB of weights are loaded
    rows, _ = candidates(asked(32768, strategies=("single",), host_bytes=64 * GIB))
    assert [row.host.bytes > 15 * GIB for row in rows] == [True]


def test_less_exact_updates_that_leave_activations_on_the_gpus_are_tried_beside_those_that_do_not() -> None:
    known: dict[str, Any] = {"methods": (METHODS["full"],), "strategies": ("cp",), "host_bytes": 256 * GIB}
    base = Setting(world_size=8, row_tokens=131072, layout="flat")
    rows, _ = candidates(asked(131072, "8x20GB", base=base, batch=8, **known))
    fitting = {(row.setting.optimizer, row.setting.weights, row.offloads) for row in rows if row.verdict == "fits"}
    assert ("adamw_8bit", "fp32_master", True) in fitting
    assert ("adamw_8bit", "bf16", False) in fitting


def test_the_nearest_that_fits_may_be_offloaded() -> None:
    start = replace(FULL, row_tokens=32768)
    found = nearest_that_fits(question_about(LLAMA_8B, start, parse_gpus("1x28GB"), mean_document_tokens=32768), start)
    assert found is not None
    assert found.text == "set train.activation_checkpointing to offload"


def test_what_a_setting_says_of_itself() -> None:
    assert (FULL.recomputes, OFFLOAD.recomputes, replace(OFFLOAD, activation_checkpointing=False).recomputes) == (
        *("full", "offload", "none"),
    )
    assert OFFLOAD.activations == "activations recomputed, or in host memory"
