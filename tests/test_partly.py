"""The step in which some layers are recomputed follows from the steps in which none and all are."""

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from full_trace import full_trace
from tracing import begun, traced_step

from finetune.trace.partly import partly_recomputed
from finetune.trace.setting import Setting
from finetune.trace.shallow import Step

LAYERS = 10
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 509,
    "max_position_embeddings": 1024,
}
SETTINGS = {
    "full": Setting(row_tokens=512, micro_batch_size=2),
    "lora": Setting(row_tokens=512, micro_batch_size=2, adapter="lora", layout="flat"),
    "qlora": Setting(bits=4, row_tokens=512, micro_batch_size=5, adapter="lora", layout="flat"),
    "fsdp2": Setting("fsdp2", 4, row_tokens=128, accumulation=2),
    "zero3": Setting("zero3", 4, row_tokens=256, adapter="lora"),
}
RECOMPUTED = (1, 6, 9)
THINNED = {("full", 6), ("qlora", 1), ("fsdp2", 9)}
"""What is traced in `make test`; `make prove` traces each setting with each number of layers."""


@pytest.fixture(scope="module", autouse=True)
def traces() -> "Iterator[dict[Any, Future[Any]]]":
    calls: dict[Any, Any] = {}
    for name, setting in SETTINGS.items():
        for recomputes in (False, True):
            pure = replace(setting, activation_checkpointing=recomputes)
            calls[name, recomputes] = partial(traced_step, LLAMA, pure, row_tokens=512)
    with begun(calls) as found:
        yield found


def peak(step: Step, setting: Setting) -> float:
    micro_batch = step.micro_batch(setting.micro_batch_size, setting.row_tokens)
    return max(moment.bytes for moment in step.moments(micro_batch, accumulation=setting.accumulation))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        pytest.param(*point, marks=[] if point in THINNED else pytest.mark.prove)
        for point in itertools.product(SETTINGS, RECOMPUTED)
    ],
)
def test_the_peak_is_that_of_a_trace_of_all_layers(name: str, layers: int, traces: "dict[Any, Future[Any]]"):
    mixed = replace(SETTINGS[name], activation_checkpointing=True, recomputed_layers=layers)
    with begun({"whole": partial(full_trace, LLAMA, mixed)}) as found:
        kept, again = (traces[name, recomputes].result() for recomputes in (False, True))
        assert kept.low.layers < kept.high.layers < LAYERS
        partly = peak(partly_recomputed(kept, again, layers=layers), SETTINGS[name])
        assert partly == pytest.approx(found["whole"].result().peak.bytes, rel=1e-3)


def test_fewer_recomputed_layers_take_more_memory_and_fewer_operations(traces: "dict[Any, Future[Any]]"):
    kept, again = (traces["lora", recomputes].result() for recomputes in (False, True))
    steps = [kept, *(partly_recomputed(kept, again, layers=layers) for layers in range(1, LAYERS)), again]
    micro_batch = kept.micro_batch(2, 512)
    flops = [sum(each.calls * micro_batch.value(each.flops) for each in step.kernels) for step in steps]
    peaks = [peak(step, SETTINGS["lora"]) for step in steps]
    assert flops == sorted(flops)
    assert peaks == sorted(peaks, reverse=True)
    assert flops[5] == pytest.approx((flops[0] + flops[-1]) / 2)
