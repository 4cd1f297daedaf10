"""The learning rate against transformers' schedulers, and its shape."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from finetune.config.refusals import schedule_problems
from finetune.config.sections import Train
from finetune.optim.schedule import describe_warmup, learning_rate

THEIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "constant": ("constant", {}, {}),
    "linear": ("linear", {}, {}),
    "cosine": ("cosine", {}, {}),
    "cosine with a lowest rate": ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"min_learning_rate_ratio": 0.1}),
    "wsd": (
        "warmup_stable_decay",
        {"num_stable_steps": 12, "num_decay_steps": 8, "decay_type": "1-sqrt", "min_lr_ratio": 0.2},
        {"decay_ratio": 0.4, "min_learning_rate_ratio": 0.2},
    ),
}


def section(**values: Any) -> Train:
    return Train(output_dir="", **values)


@pytest.mark.parametrize("name", THEIRS)
def test_without_warmup_every_step_has_the_rate_of_transformers_scheduler(name: str):
    theirs, their_settings, settings = THEIRS[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(
        theirs, optimizer, num_warmup_steps=0, num_training_steps=20, scheduler_specific_kwargs=their_settings
    )
    train = section(learning_rate=3e-4, schedule=name.split()[0], warmup_ratio=0, **settings)
    for step in range(1, 21):
        assert learning_rate(step, 20, train) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        scheduler.step()


@given(
    total=st.integers(1, 500),
    warmup=st.floats(0, 0.99),
    decay=st.floats(0.01, 1),
    lowest=st.floats(0, 0.99),
    schedule=st.sampled_from(("constant", "linear", "cosine", "wsd")),
)
def test_rate_is_positive_rises_through_the_warmup_and_never_exceeds_the_peak(
    total: int, warmup: float, decay: float, lowest: float, schedule: Any
):
    train = section(
        learning_rate=1.0, schedule=schedule, warmup_ratio=warmup, decay_ratio=decay, min_learning_rate_ratio=lowest
    )
    rates = [learning_rate(step, total, train) for step in range(1, total + 1)]
    assert all(0 < rate <= 1 for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    after_warmup = rates[math.ceil(warmup * total) :]  # of which a short run has none
    assert all(rate >= lowest * (schedule != "constant") for rate in after_warmup)


def test_wsd_stays_at_its_peak_until_it_decays():
    train = section(learning_rate=1.0, schedule="wsd", warmup_ratio=0.2, decay_ratio=0.3)
    rates = [learning_rate(step, 10, train) for step in range(1, 11)]
    assert rates == pytest.approx([1 / 3, 2 / 3, *[1] * 6, 1 - (1 / 3) ** 0.5, 1 - (2 / 3) ** 0.5])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"warmup_steps": 20}, "the learning rate rises to 9.52e-01 until the run ends"),
        ({"warmup_steps": 19}, None),
        ({"warmup_ratio": 0.9, "schedule": "wsd"}, None),
        ({"warmup_steps": 15, "schedule": "wsd", "decay_ratio": 0.5}, "the learning rate decays over 5 steps, not 10"),
    ],
    ids=str,
)
def test_a_warmup_that_leaves_too_few_steps_is_told(values: dict[str, Any], said: str | None):
    lines = describe_warmup(section(learning_rate=1.0, **values), 20)
    assert len(lines) == (said is not None)
    assert all(str(said) in line for line in lines)


@pytest.mark.parametrize("step", [0, 21])
def test_step_outside_the_run_is_refused(step: int):
    with pytest.raises(ValueError, match="outside"):
        learning_rate(step, 20, section(warmup_ratio=0))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"decay_ratio": 0.1}, "train.decay_ratio belongs to the schedule wsd, and train.schedule is cosine"),
        ({"schedule": "constant", "min_learning_rate_ratio": 0.1}, "the schedule constant does not decay"),
        ({"schedule": "wsd", "decay_ratio": 0.8, "warmup_ratio": 0.3}, "more than the whole run"),
        ({"schedule": "wsd", "min_learning_rate_ratio": 0.1, "decay_ratio": 0.9, "warmup_ratio": 0.1}, None),
        ({"min_learning_rate_ratio": 0.1}, None),
    ],
)
def test_keys_that_contradict_one_another_are_refused(values: dict[str, Any], said: str | None):
    problems = schedule_problems(section(**values))
    assert len(problems) == (said is not None)
    assert all(str(said) in problem for problem in problems)
