"""Losses of answers of which one is preferred, or each is judged: functions of how likely a model makes them.

With c and r the log-probabilities of the chosen and the rejected answer, a reference model's beside them, and
h = (c - c_ref) - (r - r_ref), DPO's loss is -log sigmoid(beta h). Answers of 4 and 2 tokens with c = -4, r = -3,
c_ref = -5, r_ref = -3 and beta 0.1 have h = 1 and the loss 0.644; where h is 0, as at the beginning, it is log 2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from finetune.config.dpo_section import WITHOUT_REFERENCE, Dpo
from finetune.training.loss import Figure


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities of answers, sums over their tokens in nats; each of shape (pairs,)."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    reference_chosen: torch.Tensor
    reference_rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    """Trained tokens of the answers; 0, and log-probabilities of 0, where only the other is there."""
    rejected_tokens: torch.Tensor
    reference_point: torch.Tensor | float = 0.0
    """What the model adds to the reference's log-probability for answers to other prompts; for kto."""

    @property
    def chosen_gain(self) -> torch.Tensor:
        """What the model adds to the reference's."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_gain(self) -> torch.Tensor:
        return self.rejected - self.reference_rejected

    @property
    def gap(self) -> torch.Tensor:
        """How much more the model prefers the chosen answer than the reference does."""
        return self.chosen_gain - self.rejected_gain

    @property
    def is_chosen(self) -> torch.Tensor:
        """1 where there is a chosen answer, else 0."""
        return (self.chosen_tokens > 0).float()

    @property
    def is_rejected(self) -> torch.Tensor:
        return (self.rejected_tokens > 0).float()

    @property
    def a_token(self) -> "Pairs":
        """The same as means over the tokens of the answers."""
        chosen_tokens, rejected_tokens = self.chosen_tokens.clamp(min=1), self.rejected_tokens.clamp(min=1)
        return replace(
            self,
            chosen=self.chosen / chosen_tokens,
            rejected=self.rejected / rejected_tokens,
            reference_chosen=self.reference_chosen / chosen_tokens,
            reference_rejected=self.reference_rejected / rejected_tokens,
        )


def losses_of(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """The loss of each pair, of shape (pairs,)."""
    losses = _LOSSES[section.loss](_compared(pairs, section), section)
    if section.loss in ("orpo", "cpo"):
        losses = losses - pairs.a_token.chosen  # as supervised fine-tuning; for cpo too a mean over tokens, as in TRL
    return losses - section.sft_weight * pairs.a_token.chosen


def _compared(pairs: Pairs, section: Dpo) -> Pairs:
    return pairs.a_token if section.length_normalized or section.loss in _OF_MEANS else pairs


def _sigmoid(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """Rafailov et al., arXiv:2305.18290, equation 7."""
    return -F.logsigmoid(section.strength * pairs.gap)


def _ipo(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """Azar et al., arXiv:2310.12036, equation 17; of means over tokens, as its authors compute it."""
    return (pairs.gap - 1 / (2 * section.strength)) ** 2


def _hinge(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """Zhao et al., arXiv:2305.10425, equation 7, of the gap to the reference."""
    return F.relu(1 - section.strength * pairs.gap)


def _robust(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """Chowdhury et al., arXiv:2403.00409, equation 12: unbiased where that share of the labels is wrong."""
    share = section.label_smoothing
    right, wrong = -F.logsigmoid(section.strength * pairs.gap), -F.logsigmoid(-section.strength * pairs.gap)
    return ((1 - share) * right - share * wrong) / (1 - 2 * share)


def _apo_zero(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """D'Oosterlinck et al., arXiv:2408.06266, section 4."""
    chosen, rejected = (torch.sigmoid(section.strength * gain) for gain in (pairs.chosen_gain, pairs.rejected_gain))
    return 1 - chosen + rejected


def _sppo(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """Wu et al., arXiv:2405.00675, equation 4.7, where the chosen answer wins always."""
    half = 1 / (2 * section.strength)
    return (pairs.chosen_gain - half) ** 2 + (pairs.rejected_gain + half) ** 2


def _simpo(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """Meng et al., arXiv:2405.14734, equation 6, of means over tokens."""
    return -F.logsigmoid(section.strength * (pairs.chosen - pairs.rejected) - section.margin)


def _orpo(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """Hong et al., arXiv:2403.07691, equation 7: log-odds of means over tokens. The rest is added by ``losses_of``."""
    return -section.strength * F.logsigmoid(_log_odds(pairs.chosen) - _log_odds(pairs.rejected))


def _log_odds(log_probability: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)), where p is below 1 by a millionth at least: at 1 there is no gradient."""
    below = log_probability.clamp(max=-1e-6)
    return below - torch.log(-torch.expm1(below))


def _cpo(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """Xu et al., arXiv:2401.08417, equation 5. The rest is added by ``losses_of``."""
    return -F.logsigmoid(section.strength * (pairs.chosen - pairs.rejected))


def _kto(pairs: Pairs, section: Dpo) -> torch.Tensor:
    """Ethayarajh et al., arXiv:2402.01306, equation 8: good answers rise above the reference point, bad ones sink.

    A good answer with c - c_ref = 1, reference point 0.5 and beta 0.1 has the loss 1 - sigmoid(0.05) = 0.4875.
    """
    good = torch.sigmoid(section.strength * (pairs.reference_point - pairs.chosen_gain))
    bad = torch.sigmoid(section.strength * (pairs.rejected_gain - pairs.reference_point))
    return section.desirable_weight * good * pairs.is_chosen + section.undesirable_weight * bad * pairs.is_rejected


_LOSSES: dict[str, Callable[[Pairs, Dpo], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "ipo": _ipo,
    "hinge": _hinge,
    "robust": _robust,
    "apo_zero": _apo_zero,
    "sppo": _sppo,
    "simpo": _simpo,
    "orpo": _orpo,
    "cpo": _cpo,
    "kto": _kto,
}
_OF_MEANS = ("ipo", "simpo", "orpo")
NEARLY_NONE = 1e-12
"""Added to a count that may be 0 in a step, whose mean then is 0; lost in rounding beside 1."""


def figures_of(pairs: Pairs, section: Dpo) -> dict[str, Figure]:
    """What people watch, with totals and divisors of shape (pairs,).

    A reward is beta times what the model adds to the reference's log-probability (arXiv:2305.18290, section 4);
    ``accuracy`` is the share of pairs whose chosen answer has the higher one. ``kl`` is the mean over the tokens of all
    answers of what the model adds to the reference's log-probability: if they were samples of the model, an estimate of
    KL(model || reference) (http://joschu.net/blog/kl-approx.html, k1).

    Of answers that are judged alone, rewards are means over those of a kind, 0 where a step has none of it;
    ``accuracy`` is the share that is on its side of the reference point.
    """
    compared = _compared(pairs, section)
    chosen, rejected = section.strength * compared.chosen_gain, section.strength * compared.rejected_gain
    of_pairs = {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "accuracy": (chosen > rejected).float(),
    }
    found = {name: Figure(each, torch.ones_like(each)) for name, each in of_pairs.items()}
    if section.loss == "kto":
        found |= _of_judged(pairs, chosen, rejected, section)
        del found["reward_margin"]
    if section.loss not in WITHOUT_REFERENCE:
        gain, tokens = pairs.chosen_gain + pairs.rejected_gain, pairs.chosen_tokens + pairs.rejected_tokens
        found["kl"] = Figure(gain, tokens)
    return found


def figure_names(section: Dpo) -> list[str]:
    """Of ``figures_of``."""
    return list(figures_of(Pairs(*[torch.zeros(0)] * 6), section))


def _of_judged(pairs: Pairs, chosen: torch.Tensor, rejected: torch.Tensor, section: Dpo) -> dict[str, Figure]:
    """Figures of answers that are judged alone, given their rewards; 0 for that of a pair which is not there."""
    is_chosen, is_rejected = pairs.is_chosen, pairs.is_rejected
    point = section.strength * pairs.reference_point
    right = (chosen > point) * is_chosen + (rejected < point) * is_rejected
    return {
        "reward_chosen": Figure(chosen, is_chosen + NEARLY_NONE),
        "reward_rejected": Figure(rejected, is_rejected + NEARLY_NONE),
        "accuracy": Figure(right, is_chosen + is_rejected),
        "reference_point": Figure(pairs.reference_point + torch.zeros_like(chosen), torch.ones_like(chosen)),
    }
