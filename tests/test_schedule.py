"""The learning rate against transformers' schedulers, and its shape."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from finetune.optim.schedule import learning_rate

SCHEDULES = ("constant", "linear", "cosine")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warmup_every_step_has_the_rate_of_transformers_scheduler(schedule: str):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=20)
    for step in range(1, 21):
        ours = learning_rate(step, total_steps=20, peak=3e-4, schedule=schedule, warmup_ratio=0)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        scheduler.step()


@given(
    total=st.integers(1, 500),
    ratio=st.floats(0, 0.99),
    schedule=st.sampled_from(SCHEDULES),
)
def test_rate_is_positive_rises_through_the_warmup_and_never_exceeds_the_peak(total: int, ratio: float, schedule: str):
    rates = [
        learning_rate(step, total_steps=total, peak=1.0, schedule=schedule, warmup_ratio=ratio)
        for step in range(1, total + 1)
    ]
    assert all(0 < rate <= 1 for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


@pytest.mark.parametrize("step", [0, 21])
def test_step_outside_the_run_is_refused(step: int):
    with pytest.raises(ValueError, match="outside"):
        learning_rate(step, total_steps=20, peak=1.0, schedule="cosine", warmup_ratio=0)
