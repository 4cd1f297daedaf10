"""What is learnt from pairs of answers: the objective of a recipe, and the micro-batches that it takes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator

from finetune.config.dpo_section import WITHOUT_REFERENCE, Dpo
from finetune.data import batches
from finetune.data.batches import NOTHING, Inputs, on_device
from finetune.data.encoding import Row
from finetune.data.sampler import EMPTY, micro_batches
from finetune.training.documents import document_numbers, of_documents
from finetune.training.loss import Figure, Objective, added, is_training
from finetune.training.mismatched import mismatched
from finetune.training.preference_loss import Pairs, figure_names, figures_of, losses_of

AsReference = Callable[[torch.nn.Module], AbstractContextManager[object]]
"""Within it a model computes as the one that training begins with."""


@dataclass(frozen=True)
class PairedBatch:
    """A micro-batch of pairs, whose answers are documents of their own: chosen, rejected, chosen, rejected ..."""

    next_tokens: torch.Tensor
    inputs: dict[str, Any]
    document_BT: torch.Tensor
    """Which document a position belongs to, from 0; of the shape of ``next_tokens``."""
    tokens_P2: torch.Tensor
    """Trained tokens of each answer; 0 for one that is not there."""
    reference_P2: torch.Tensor
    """Log-probabilities of the answers by the reference model; 0 where they are not known."""
    is_there_P: torch.Tensor
    """1, or 0 for a pair that fills up the last step of a run."""


def collate(places: Sequence[Sequence[Row]], device: torch.device, *, flat: bool) -> PairedBatch:
    """One micro-batch on its device; see ``data.batches.collate``.

    Args:
        places: the two documents of each pair; none where the run has no more.
    """
    pairs = [list(documents) or [NOTHING] * 2 for documents in places]
    every = [document for documents in pairs for document in documents]
    next_tokens, inputs = batches.collate(pairs, device, flat=flat)
    return PairedBatch(
        next_tokens,
        inputs,
        on_device(document_numbers(every, next_tokens.shape, flat=flat), device),
        on_device(torch.tensor([float(each.trained_tokens) for each in every]).view(-1, 2), device),
        on_device(torch.tensor([each.reference if each.trained_tokens else 0.0 for each in every]).view(-1, 2), device),
        on_device(torch.tensor([float(len(documents) > 0) for documents in places]), device),
    )


class Preferences:
    """A loss of pairs, and its figures since they were last taken."""

    def __init__(
        self,
        section: Dpo,
        as_reference: AsReference | None = None,
        remember: Callable[[torch.nn.Module], object] = lambda model: None,
    ) -> None:
        """
        Args:
            as_reference: within it a model is its own reference; None where references are known, or not needed.
            remember: given the prepared model when training begins.
        """
        self.section, self.as_reference, self.remember = section, as_reference, remember
        self.reference_point: torch.Tensor | float = 0.0
        """For kto: of the optimizer step, or of the held-out rows; 0 before either."""
        self._figures: dict[str, Figure] = {}

    @property
    def objective(self) -> Objective:
        """For a session."""
        return Objective(
            self.loss_sum,
            per_row=True,
            figures=self.take_figures,
            figure_names=figure_names(self.section),
            remembers_beginning=self.section.loss not in WITHOUT_REFERENCE,
            remember=self.remember,
            look_over=self.know_reference_point,
        )

    def know_reference_point(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        inputs: Inputs,
        order: Sequence[int],
        *,
        micro_batch_size: int,
        collate: Callable[..., Any],
        share: dict[str, int],
    ) -> None:
        """Before the rows of a step or the held-out rows are judged; does nothing for other losses. Collective.

        Args:
            order: places of the rows in ``inputs``, as all processes share them.
            share: of the rows, that of this process, as ``rank`` and ``world_size``.
        """
        if self.section.loss != "kto":
            return
        sums = torch.zeros(2, device=accelerator.device)
        for places in micro_batches(order, micro_batch_size=micro_batch_size, **share):
            pairs = [[] if place == EMPTY else [mismatched(inputs, place), NOTHING] for place in places]
            sums += self.added(model, collate(pairs, accelerator.device))
        total, prompts = accelerator.reduce(sums, "sum")
        self.reference_point = (total / prompts).clamp(min=0)

    def loss_sum(self, model: torch.nn.Module, batch: PairedBatch) -> torch.Tensor:
        """The loss of a micro-batch, summed over its pairs."""
        reference_P2 = self._reference_of(model, batch)

        def of_all(answers_P2: torch.Tensor) -> torch.Tensor:
            (chosen, rejected), known, tokens = answers_P2.T, reference_P2.T, batch.tokens_P2.T
            pairs = replace(Pairs(chosen, rejected, *known, *tokens), reference_point=self.reference_point)
            for name, figure in figures_of(pairs, self.section).items():
                own = Figure(*((each.detach() * batch.is_there_P).sum() for each in figure))
                self._figures[name] = added(own, self._figures.get(name))
            return (losses_of(pairs, self.section) * batch.is_there_P).sum()

        return _of_answers(model, batch, of_all)

    def added(self, model: torch.nn.Module, batch: PairedBatch) -> torch.Tensor:
        """What the model adds to the reference's log-probability of the first answer of each pair, and how many pairs:
        two sums over a micro-batch."""
        reference_P2 = self._reference_of(model, batch)
        gains_P = (reference_answers(model, batch) - reference_P2)[:, 0]
        return torch.stack([(gains_P * batch.is_there_P).sum(), batch.is_there_P.sum()])

    def _reference_of(self, model: torch.nn.Module, batch: PairedBatch) -> torch.Tensor:
        """Log-probabilities of the answers by the reference, of shape (pairs, 2)."""
        if self.as_reference is None:
            return batch.reference_P2
        return reference_answers(model, batch, self.as_reference)

    def take_figures(self) -> dict[str, Figure]:
        """Of the pairs since this was last called."""
        taken, self._figures = self._figures, {}
        return taken


@torch.no_grad()
def reference_answers(
    model: torch.nn.Module, batch: PairedBatch, as_reference: AsReference = nullcontext
) -> torch.Tensor:
    """Log-probabilities of the answers, of shape (pairs, 2), by the model as it is, or as it is within a context."""
    trains = is_training(model)
    model.eval()
    try:
        with as_reference(model):
            return _of_answers(model, batch, lambda answers_P2: answers_P2)
    finally:
        model.train(trains)


def _of_answers(
    model: torch.nn.Module, batch: PairedBatch, function: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A function of the log-probabilities of the answers, of shape (pairs, 2)."""
    return of_documents(
        model,
        batch.next_tokens,
        batch.inputs,
        batch.document_BT,
        batch.tokens_P2.numel(),
        lambda answers_D: function(answers_D.view(-1, 2)),
    )
