"""The load-balancing loss of mixtures of experts, of each document by itself.

transformers' loss is E * sum_e f_e * P_e, where E is the number of experts, f_e the number of times that a token chose
expert e, over the tokens, and P_e the mean of the probabilities that the routers gave it (arXiv:2101.03961, equations 4
to 6; tokens of all layers count alike). A product of means is no sum over micro-batches, so frameworks that compute it
for each of them train something else with each split into processes and micro-batches. Here it is computed for each
document (as the sequence-wise loss of DeepSeek-V3, arXiv:2412.19437, equations 17 to 20), which is what transformers
computes with one row; documents count by their trained tokens, as in the cross-entropy. It is then the same under every
split, packed or padded. The f_e of the whole batch would have to be known before the first backward pass.

Example: two experts, and a document of 4 tokens that choose one each, 3 times the first: f is (0.75, 0.25). With mean
probabilities of (0.6, 0.4) the loss is 2 * (0.75 * 0.6 + 0.25 * 0.4) = 1.1; of balanced experts it is 1.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from finetune.data.batches import IGNORED
from finetune.models.routers import own_coefficient, top_k_of
from finetune.training.loss import Figure, LossSum, Objective, OfRouters, added

FIGURE = "router_aux_loss"
"""In metrics.jsonl: the mean over documents by their trained tokens, without its coefficient."""


@dataclass(frozen=True)
class Documents:
    """Of a micro-batch, as far as this process computes it."""

    number_N: torch.Tensor
    """Document of each position, int64; as many as there are documents for padding."""
    tokens_D: torch.Tensor
    """Of each document, int64."""
    group: Any = None
    """Of the processes that compute the documents together; None for this one alone."""

    @classmethod
    def of(cls, next_tokens_BT: torch.Tensor, inputs: dict[str, Any]) -> "Documents":
        """As ``data.batches.collate`` or ``distributed.context`` made the micro-batch."""
        device, (lines, positions) = next_tokens_BT.device, next_tokens_BT.shape
        if share := inputs.get("context_share"):
            bounds, places_N, group = share.whole.on_device, share.own.to(device), share.group
        elif "cu_seq_lens_q" in inputs:
            bounds, places_N, group = inputs["cu_seq_lens_q"], torch.arange(positions, device=device), None
        else:
            tokens_D: torch.Tensor = next_tokens_BT.line_tokens  # type: ignore[attr-defined]  # by collate
            place_BT = torch.arange(positions, device=device).expand(lines, positions)
            number_D1 = torch.arange(lines, device=device)[:, None]
            return cls(number_D1.where(place_BT < tokens_D[:, None], lines).flatten(), tokens_D)
        return cls(torch.searchsorted(bounds[1:].long(), places_N, right=True), bounds.diff().long(), group)

    def sums(self, values_N: torch.Tensor) -> torch.Tensor:
        """Of each document, over its positions here; of shape (documents, ...)."""
        zeros = values_N.new_zeros(len(self.tokens_D) + 1, *values_N.shape[1:])
        return zeros.index_add(0, self.number_N, values_N)[:-1]

    @torch.no_grad()
    def counts(self, values_N: torch.Tensor) -> torch.Tensor:
        """As ``sums``, over all positions of the documents. Collective over those that compute them together."""
        found = self.sums(values_N)
        if self.group is not None:
            dist.all_reduce(found, group=self.group)
        return found


def balance_losses(router_logits: Sequence[torch.Tensor], documents: Documents, top_k: int) -> torch.Tensor:
    """Of each document its load-balancing loss, of shape (documents,); where several processes compute the documents
    together, the part of this one.

    Args:
        router_logits: of each layer, (positions, experts).
        top_k: experts that a token chooses.
    """
    chosen_NE, probabilities_DE = torch.zeros(()), torch.zeros(())
    for logits_NE in router_logits:
        own_NE = logits_NE.float().softmax(-1)
        chosen_NK = own_NE.detach().topk(top_k, dim=-1).indices
        chosen_NE = chosen_NE + torch.zeros_like(own_NE).scatter_(1, chosen_NK, 1.0).detach()
        probabilities_DE = probabilities_DE + documents.sums(own_NE)
    counts_DE, rows_D = documents.counts(chosen_NE), len(router_logits) * documents.tokens_D.float()
    return counts_DE.shape[1] * (counts_DE * probabilities_DE).sum(1) / rows_D.square()


def problems(coefficient: float | None, figures: Collection[str]) -> list[str]:
    """Why a recipe's own loss does not do what ``train.router_aux_loss_coef`` asks for, as a sentence.

    Args:
        figures: of the loss of a micro-batch in training.
    """
    if not coefficient or FIGURE in figures:
        return []
    return [
        f"train.router_aux_loss_coef is {coefficient:g}, but the loss of this recipe does not add it; give "
        "next_token_loss_sum a RouterBalance, as recipes/sft.py does, or set it to 0."
    ]


class RouterBalance:
    """Of one run; nothing where the coefficient is 0.

    Args:
        coefficient: of the mean over documents, which is added to the cross-entropy of a token.
        top_k: experts that a token chooses.
    """

    def __init__(self, coefficient: float, top_k: int) -> None:
        self.coefficient, self.top_k = coefficient, top_k
        self._figure: Figure | None = None

    @classmethod
    def of(cls, asked: float | None, model: Any) -> "RouterBalance":
        """As ``train.router_aux_loss_coef`` asks for it, of a model whose weights may be on the meta device."""
        coefficient = own_coefficient(model) if asked is None else asked
        return cls(coefficient, top_k_of(model) or 0)

    def of_micro_batch(self, next_tokens_BT: torch.Tensor, inputs: dict[str, Any]) -> OfRouters | None:
        """What is added to the loss of a micro-batch, for ``next_token_loss_sum``."""
        if not self.coefficient:
            return None
        documents = Documents.of(next_tokens_BT, inputs)
        trained_D = documents.counts((next_tokens_BT.flatten() != IGNORED).float())

        def of_routers(router_logits: Sequence[torch.Tensor]) -> torch.Tensor:
            total = (trained_D * balance_losses(router_logits, documents, self.top_k)).sum()
            figure = Figure(total.detach(), (next_tokens_BT != IGNORED).sum())
            self._figure = added(figure, self._figure)
            return self.coefficient * total

        return of_routers

    def objective(self, loss_sum: LossSum) -> Objective:
        """Of a recipe whose ``loss_sum`` adds this; evaluations have no figures of it."""
        return Objective(loss_sum, figures=self.take_figures if self.coefficient else dict, figure_names=())

    def take_figures(self) -> dict[str, Figure]:
        """Of what was trained since this was last called."""
        taken, self._figure = self._figure, None
        return {} if taken is None else {FIGURE: taken}
