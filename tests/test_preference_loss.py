"""Losses of pairs are those of their papers, computed here by hand in Python's floats."""

import math
from typing import Any

import pytest
import torch

from finetune.config.dpo_section import Dpo
from finetune.training.preference_loss import Pairs, figures_of, losses_of

CHOSEN, REJECTED = (-4.0, -20.0, -3.5), (-3.0, -26.0, -9.0)
REFERENCE_CHOSEN, REFERENCE_REJECTED = (-5.0, -18.0, -3.5), (-3.0, -21.0, -8.0)
CHOSEN_TOKENS, REJECTED_TOKENS = (4, 11, 2), (2, 13, 5)
LN = math.log


def pairs_of(dtype: torch.dtype = torch.float64) -> Pairs:
    values = (CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED, CHOSEN_TOKENS, REJECTED_TOKENS)
    return Pairs(*(torch.tensor(each, dtype=dtype) for each in values))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_odds(x: float) -> float:
    return LN(math.exp(x) / (1 - math.exp(x)))


BY_HAND: dict[str, Any] = {
    # c, r: log-probabilities; C, R: the reference's; n, m: tokens
    "sigmoid": lambda c, r, C, R, n, m: -LN(sigmoid(0.3 * ((c - C) - (r - R)))),
    "ipo": lambda c, r, C, R, n, m: ((c - C) / n - (r - R) / m - 1 / 0.6) ** 2,
    "hinge": lambda c, r, C, R, n, m: max(0.0, 1 - 0.3 * ((c - C) - (r - R))),
    "robust": lambda c, r, C, R, n, m: (
        (-0.8 * LN(sigmoid(0.3 * ((c - C) - (r - R)))) + 0.2 * LN(sigmoid(-0.3 * ((c - C) - (r - R))))) / 0.6
    ),
    "apo_zero": lambda c, r, C, R, n, m: 1 - sigmoid(0.3 * (c - C)) + sigmoid(0.3 * (r - R)),
    "sppo": lambda c, r, C, R, n, m: (c - C - 1 / 0.6) ** 2 + (r - R + 1 / 0.6) ** 2,
    "simpo": lambda c, r, C, R, n, m: -LN(sigmoid(0.3 * (c / n - r / m) - 0.7)),
    "orpo": lambda c, r, C, R, n, m: -c / n - 0.3 * LN(sigmoid(log_odds(c / n) - log_odds(r / m))),
    "cpo": lambda c, r, C, R, n, m: -LN(sigmoid(0.3 * (c - r))) - c / n,
    "kto": lambda c, r, C, R, n, m: 1 - sigmoid(0.3 * (c - C)) + 1 - sigmoid(0.3 * (R - r)),
}
OF_ONE = {"robust": {"label_smoothing": 0.2}, "simpo": {"margin": 0.7}}
EVERY = list(zip(CHOSEN, REJECTED, REFERENCE_CHOSEN, REFERENCE_REJECTED, CHOSEN_TOKENS, REJECTED_TOKENS))


@pytest.mark.parametrize("loss", BY_HAND)
def test_loss_is_that_of_its_paper(loss: Any):
    found = losses_of(pairs_of(), Dpo(loss=loss, beta=0.3, **OF_ONE.get(loss, {})))
    assert found.tolist() == pytest.approx([BY_HAND[loss](*each) for each in EVERY])


def test_every_loss_is_known_by_hand():
    assert set(BY_HAND) == set(Dpo.model_fields["loss"].annotation.__args__)


def test_example_of_the_module():
    pairs = Pairs(*(torch.tensor([each]) for each in (-4.0, -3.0, -5.0, -3.0, 4.0, 2.0)))
    assert losses_of(pairs, Dpo()).item() == pytest.approx(0.644, abs=5e-4)


def test_means_over_tokens_are_compared_where_they_are_asked_for():
    found = losses_of(pairs_of(), Dpo(beta=0.3, length_normalized=True))
    expected = [-LN(sigmoid(0.3 * ((c - C) / n - (r - R) / m))) for c, r, C, R, n, m in EVERY]
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss", BY_HAND)
def test_supervised_term_is_the_mean_over_the_tokens_of_the_chosen_answer(loss: Any):
    without, beside = (losses_of(pairs_of(), Dpo(loss=loss, sft_weight=weight)) for weight in (0.0, 0.5))
    assert (beside - without).tolist() == pytest.approx([-0.5 * c / n for c, n in zip(CHOSEN, CHOSEN_TOKENS)])


@pytest.mark.parametrize("loss", BY_HAND)
def test_gradients_are_finite_where_answers_are_certain_or_impossible(loss: Any):
    extremes = [
        torch.tensor([0.0, -1e-9, -1e4], requires_grad=True),
        torch.tensor([-1e4, 0.0, 0.0], requires_grad=True),
    ]
    others = [torch.tensor([-1.0, -2.0, -3.0])] * 2 + [torch.tensor([3.0, 1.0, 2.0])] * 2
    found = losses_of(Pairs(*extremes, *others), Dpo(loss=loss)).sum()
    found.backward()
    assert math.isfinite(found.item())
    assert all(each.grad is not None and each.grad.isfinite().all() for each in extremes)


def test_figures_are_rewards_their_margin_and_which_is_higher():
    found = figures_of(pairs_of(), Dpo(beta=0.5))
    assert found["reward_chosen"].total.tolist() == [0.5, -1.0, 0.0]
    assert found["reward_rejected"].total.tolist() == [0.0, -2.5, -0.5]
    assert found["reward_margin"].total.tolist() == [0.5, 1.5, 0.5]
    assert found["accuracy"].total.tolist() == [1.0, 1.0, 1.0]
    assert all(found[name].divisor.tolist() == [1.0, 1.0, 1.0] for name in found if name != "kl")


def test_divergence_from_the_reference_is_a_mean_over_the_tokens_of_both_answers():
    found = figures_of(pairs_of(), Dpo(length_normalized=True))["kl"]
    assert found.total.tolist() == [1.0, -7.0, -1.0]
    assert found.divisor.tolist() == [6, 24, 7]
    assert "kl" not in figures_of(pairs_of(), Dpo(loss="simpo"))
