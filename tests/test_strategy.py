"""What a run says of its launch."""

import pytest
import torch

from finetune.distributed import strategy

MUCH_FASTER = "--mixed_precision no is several times faster"


@pytest.mark.parametrize(
    ("has_units", "precision", "is_told"), [(False, "bf16", True), (True, "bf16", False), (False, "no", False)]
)
def test_rehearsal_in_bf16_without_units_for_it_says_what_is_faster(
    has_units: bool, precision: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(strategy, "cpu_computes_bf16", lambda: has_units)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    line = strategy.describe(strategy.Strategy.from_environment())
    assert "rehearsal on CPU" in line
    assert (MUCH_FASTER in line) == is_told
