"""The plan follows the kernels: what norms and gated products no longer keep is missing from it."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plan_models import arithmetic, config_named
from tracing import begun, traced_step

from finetune.planner.memory import step_memory
from finetune.trace.setting import Setting
from finetune.units import GIB

LORA = Setting(adapter="lora", row_tokens=8192, layout="flat")
ASKED = {"auto": LORA, "plain": replace(LORA, fused=False)}
MANUAL = (Path(__file__).parent.parent / "docs" / "memory.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def peaks() -> Iterator[dict[str, float]]:
    """Of 8B with LoRA and rows of 8,192 tokens on one GPU, in GiB, by ``model.kernels``."""
    model = config_named("llama-3.1-8b")
    calls: dict[str, Any] = {
        kernels: partial(traced_step, model, setting, row_tokens=8192) for kernels, setting in ASKED.items()
    }
    with begun(calls) as steps:
        anatomy = arithmetic("llama-3.1-8b").anatomy
        yield {name: step_memory(step.result(), ASKED[name], anatomy).peak / GIB for name, step in steps.items()}


def test_8b_with_lora_on_rows_of_8192_tokens_takes_less_than_52_gib(peaks: dict[str, float]):
    assert peaks["auto"] < 52
    assert peaks["plain"] > peaks["auto"] + 15


def test_the_manual_names_these_peaks(peaks: dict[str, float]):
    named = re.search(r"rows of 8,192 tokens is planned\s+to\s+take\s+([\d.]+)\s+GiB\s+instead\s+of\s+([\d.]+)", MANUAL)
    assert named
    assert [float(each) for each in named.groups()] == [round(peaks[each], 1) for each in ("auto", "plain")]
