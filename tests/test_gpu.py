"""On a GPU: bf16 and fp16 follow fp32, and peak memory and MFU are reported."""

from pathlib import Path

import pytest
import scenarios
import torch

from recipes import sft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_fp32_and_reports_the_gpu(
    precision: str, model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = {}
    for each in ("no", precision):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", each)
        sft.main(scenarios.configuration(model_folder, conversations, tmp_path / each))
        found[each] = scenarios.read_metrics(tmp_path / each)
    for key in ("loss", "grad_norm"):
        pairs = zip(found[precision], found["no"])
        assert max(abs(a[key] - b[key]) for a, b in pairs if a[key] is not None) < 2e-2
    assert found[precision][-1]["peak_memory_gib"] > 0
