"""What a step's figures are made of."""

import pytest
import torch
from accelerate import Accelerator

from finetune.models.flops import TrainingFlops
from finetune.training.loss import Figure
from finetune.training.meter import Meter


def test_utilisation_counts_the_tokens_of_rows_and_trained_ones_and_throughput_all_positions():
    meter = Meter(
        Accelerator(cpu=True),
        shares=[0],
        flops=TrainingFlops(1e6, 1e5),
        peak_flops=1e9,
        max_bad_steps=5,
        last_checkpoint=str,
    )
    (metrics,) = meter.update(
        step=1,
        rows=lambda: ["a:1"],
        losses=torch.tensor([6.0, 2.0]),
        figures={
            "margin": Figure(torch.tensor(3.0), torch.tensor(2.0)),
            "kl": Figure(torch.tensor(1.0), torch.tensor(10.0)),
        },
        divide_by=2,
        tokens=4,
        row_tokens=30,
        total_tokens=50,
        grad_norm=1.5,
        learning_rate=1e-3,
        skipped=False,
    )
    assert (metrics["loss"], metrics["margin"], metrics["kl"]) == (4.0, 1.5, pytest.approx(0.1))
    assert metrics["tokens_per_second"] == pytest.approx(50 / metrics["step_seconds"])
    assert metrics["mfu"] == pytest.approx((30 * 1e6 + 4 * 1e5) / metrics["step_seconds"] / 1e9)
