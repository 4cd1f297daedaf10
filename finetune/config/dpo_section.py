"""The keys of ``recipes/dpo.py`` alone."""

from typing import Annotated, Literal

from pydantic import Field

from finetune.config.key_types import NUMBER, NonNegativeFloat, PositiveFloat
from finetune.config.sections import Section

WITHOUT_REFERENCE = ("simpo", "orpo", "cpo")
"""Losses that look at the trained model alone."""


class Dpo(Section):
    loss: Literal["sigmoid", "ipo", "hinge", "robust", "apo_zero", "sppo", "simpo", "orpo", "cpo", "kto"] = "sigmoid"
    """sigmoid: DPO (arXiv:2305.18290). ipo: a margin to reach, and not to exceed (arXiv:2310.12036). hinge
    (arXiv:2305.10425). robust: as sigmoid, where a share label_smoothing of the pairs is the wrong way round
    (arXiv:2403.00409). apo_zero: raises chosen answers and lowers rejected ones (arXiv:2408.06266). sppo
    (arXiv:2405.00675). Without a reference model: simpo, by the mean of the tokens (arXiv:2405.14734); orpo, by odds,
    beside the loss of supervised fine-tuning (arXiv:2403.07691); cpo, beside it too (arXiv:2401.08417). Of answers that
    are judged one by one, and not in pairs: kto (arXiv:2402.01306)."""
    beta: PositiveFloat | Literal["auto"] = "auto"
    """How much a nat of difference counts: small values let the model go far from the reference. In orpo the weight of
    the odds. auto: 2 for simpo, which compares means over tokens, else 0.1."""
    margin: NonNegativeFloat = 0.5
    """By which simpo wants a chosen answer to be more likely than the rejected one, after beta."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), NUMBER] = 0.0
    """Share of the pairs that robust takes for labelled the wrong way round."""
    desirable_weight: PositiveFloat = 1.0
    """Weight that kto gives good answers. Its authors choose the weights so that those of all good answers add up to 1
    to 4/3 of those of all bad ones (arXiv:2402.01306, section 4.3)."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight that kto gives bad answers."""
    length_normalized: bool = False
    """Compare means over the tokens of the answers instead of sums, so that long ones count no more than short ones.
    ipo and the losses without a reference have their own."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of the loss of supervised fine-tuning on the chosen answers, a mean over their tokens, which is added."""
    reference: Literal["auto", "adapter_off", "cached", "model"] = "auto"
    """Whose log-probabilities the trained model is compared with: those of the model that training begins with.
    adapter_off: it computes them, with its adapter off, in every step. cached: they are computed once, before training.
    Neither holds a second copy of the weights. model: they are computed in every step, by the trained weights as they
    were when training began, of which each process keeps a copy of its part. auto: adapter_off where there is a new
    adapter that began by default, but not under ZeRO-3, which fetches weights ahead in one order only; else cached."""

    @property
    def strength(self) -> float:
        """``beta``, as a number."""
        return (2.0 if self.loss == "simpo" else 0.1) if self.beta == "auto" else self.beta

    @property
    def compares_with(self) -> str:
        """``reference``, or none for a loss that has none."""
        return "none" if self.loss in WITHOUT_REFERENCE else self.reference


def reference_taken(reference: str, *, adapted: bool, in_order: bool) -> str:
    """``compares_with``, with what its auto means.

    Args:
        adapted: an adapter is trained that is nothing at first.
        in_order: the strategy fetches weights ahead, in one order only.
    """
    if reference != "auto":
        return reference
    return "adapter_off" if adapted and not in_order else "cached"
