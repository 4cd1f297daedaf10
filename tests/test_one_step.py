"""One definition of the step: to change it changes the run, evaluation, memory check, dry run and probe."""

import json
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
from full_trace import full_trace

from finetune.cli.planning.probe import probe
from finetune.trace.setting import Setting
from finetune.training import loss, step
from recipes import sft

SETTING = Setting(row_tokens=64, precision="no")


def run(model: Path, conversations: Path, held_out: Path, output: Path) -> list[dict[str, Any]]:
    config = scenarios.configuration(
        model, conversations, output, data__eval=str(held_out), train__steps=2, train__max_grad_norm=0.0
    )
    sft.main(config)
    return scenarios.read_metrics(output)


def test_another_loss_is_another_loss_everywhere(
    model_folder: Path, conversations: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = json.loads((model_folder / "config.json").read_text())
    expected = run(model_folder, conversations, held_out, tmp_path / "before")
    peak = full_trace(config, SETTING).peak.bytes
    original, positions, seen = loss.token_loss_sum, loss.trained_positions, []

    def watched(next_tokens: torch.Tensor) -> torch.Tensor:
        seen.append(next_tokens.numel())
        return positions(next_tokens)

    def doubled(logits: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        return original(logits.double().exp().log().float(), next_tokens) * 2  # and heavier, by logits in fp64

    monkeypatch.setattr(loss, "token_loss_sum", doubled)
    monkeypatch.setattr(loss, "trained_positions", watched)
    found = run(model_folder, conversations, held_out, tmp_path / "after")
    assert found[0]["loss"] == pytest.approx(2 * expected[0]["loss"], rel=1e-5)
    assert found[0]["grad_norm"] == pytest.approx(2 * expected[0]["grad_norm"], rel=1e-5)
    assert found[1]["eval_loss"] == pytest.approx(2 * expected[1]["eval_loss"], rel=0.05)  # of other weights
    assert seen[0] == max(seen)  # the memory check, with the heaviest micro-batch
    assert full_trace(config, SETTING).peak.bytes > peak + 64 * 512 * 8
    seen.clear()
    probe(config, SETTING)
    assert seen == [64] * 3


def test_another_backward_pass_is_another_one_everywhere(
    model_folder: Path, conversations: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = json.loads((model_folder / "config.json").read_text())
    expected = run(model_folder, conversations, held_out, tmp_path / "before")
    original, factors = step.scaled, []

    def forgetful(summed: torch.Tensor, factor: float) -> torch.Tensor:
        factors.append(factor)
        return original(summed, factor / 8)  # as if the accumulation were divided by twice

    monkeypatch.setattr(step, "scaled", forgetful)
    found = run(model_folder, conversations, held_out, tmp_path / "after")
    assert found[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"] / 8, rel=1e-5)
    for traced, backward_passes in ((full_trace, 1), (probe, 3)):  # the trace's first step has gradients that are zero
        factors.clear()
        traced(config, SETTING)
        assert len(factors) == backward_passes
