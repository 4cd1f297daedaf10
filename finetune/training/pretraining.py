"""What is learnt from a corpus, and what of held-out texts is told: nats a token and bits a byte, of each source."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from finetune.data import batches
from finetune.data.batches import IGNORED, on_device, trained_positions
from finetune.data.encoding import Row
from finetune.data.rows import Rows
from finetune.training.documents import document_numbers
from finetune.training.loss import Figure, LossOfScores, Objective, added, is_training, token_losses
from finetune.training.router_balance import RouterBalance


@dataclass(frozen=True)
class MeasuredRow(Row):
    """A held-out text, or a part of one."""

    origin: int = 0
    """Number of its source among ``Measured.sources``."""
    trained_bytes: int = 0
    """Of its trained tokens, in UTF-8; 1 at least, which is divided by."""


class Measured(Rows):
    """Held-out rows that know their source and their bytes: tokenizers differ in tokens, and not in bytes."""

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(rows.folder, rows.chosen)
        self.tokenizer = tokenizer
        known, self.origins = np.unique(rows.column("origin"), return_inverse=True)
        self.sources = names_of([self.summary["sources"][origin] for origin in known])
        """Names of those that have rows here."""

    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        tokens = [token for first, end in row.spans for token in row.tokens[first:end].tolist()]
        text: str = self.tokenizer.decode(  # type: ignore[assignment]  # of one row
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return MeasuredRow(**vars(row), origin=int(self.origins[index]), trained_bytes=max(1, len(text.encode())))


def names_of(paths: list[str]) -> list[str]:
    """Short names of sources, each its own: the file's, or more of its path where two have the same."""
    for parts in range(1, max((len(Path(path).parts) for path in paths), default=0) + 1):
        names = ["/".join(Path(path).parts[-parts:]) for path in paths]
        if len(set(names)) == len(paths):
            return names
    return [f"{path} ({number})" for number, path in enumerate(paths, start=1)]


@dataclass(frozen=True)
class CorpusBatch:
    """A micro-batch of texts."""

    next_tokens: torch.Tensor
    inputs: dict[str, Any]
    origin_BT: torch.Tensor
    """Number of the source that a position is of, of the shape of ``next_tokens``; 0 where it is not known."""
    bytes_S: torch.Tensor
    """Bytes of the trained tokens of each source."""

    def shared(
        self, take: Callable[..., torch.Tensor], next_tokens: torch.Tensor, inputs: dict[str, Any], *, counts: bool
    ) -> Self:
        """What one of the processes that compute these texts together has of them (see ``distributed.context``).

        Args:
            counts: their bytes are counted here.
        """
        return replace(
            self,
            next_tokens=next_tokens,
            inputs=inputs,
            origin_BT=take(self.origin_BT),
            bytes_S=(self.bytes_S if counts else torch.zeros_like(self.bytes_S)).to(next_tokens.device),
        )


def collate(places: Sequence[Sequence[Row]], device: torch.device, *, flat: bool, sources: int) -> CorpusBatch:
    """One micro-batch on its device; see ``data.batches.collate``.

    Args:
        sources: of which held-out texts are.
    """
    next_tokens, inputs = batches.collate(places, device, flat=flat)
    every = [document for documents in places for document in (documents or [batches.NOTHING])]
    measured = [(each.origin, each.trained_bytes) if isinstance(each, MeasuredRow) else (0, 0) for each in every]
    origins, sizes = torch.tensor(measured).T
    numbers = document_numbers(every, next_tokens.shape, flat=flat)
    bytes_S = torch.zeros(sources).index_add(0, origins, sizes.float())
    return CorpusBatch(next_tokens, inputs, on_device(origins[numbers], device), on_device(bytes_S, device))


class Pretraining:
    """The loss of next tokens, and figures of held-out texts since they were last taken.

    Args:
        z_loss: weight of the squared logarithm of the softmax's denominator.
        label_smoothing: as ``train.label_smoothing``.
        held_out: what the figures are of.
        balance: of the experts of a mixture; None for none.
    """

    def __init__(
        self,
        z_loss: float,
        held_out: Measured | None,
        *,
        label_smoothing: float = 0.0,
        balance: RouterBalance | None = None,
    ) -> None:
        self.z_loss, self.label_smoothing = z_loss, label_smoothing
        self.balance = balance or RouterBalance(0.0, 0)
        self.sources = held_out.sources if held_out else []
        self._figures: dict[str, Figure] = {}

    @property
    def objective(self) -> Objective:
        """For a session."""
        of_each = [f"{figure}/{name}" for figure in ("loss", "bits_per_byte") for name in self.sources]
        names = ["bits_per_byte", *(of_each if len(self.sources) > 1 else [])]
        return Objective(self.loss_sum, figures=self.take_figures, figure_names=names)

    def collate(self, places: Sequence[Sequence[Row]], device: torch.device, *, flat: bool) -> CorpusBatch:
        """For a session."""
        return collate(places, device, flat=flat, sources=max(1, len(self.sources)))

    def loss_sum(self, model: torch.nn.Module, batch: CorpusBatch) -> torch.Tensor:
        """The loss of a micro-batch, summed over its trained tokens; of held-out texts the cross-entropy alone."""
        positions_N = trained_positions(batch.next_tokens)
        targets_N = batch.next_tokens.flatten()[positions_N]
        if is_training(model):
            losses_of = partial(_loss_sum, z_loss=self.z_loss, label_smoothing=self.label_smoothing)
            of_routers = self.balance.of_micro_batch(batch.next_tokens, batch.inputs)
            wanted = LossOfScores(losses_of, positions_N, targets_N, of_routers=of_routers)
        else:
            origin_N = batch.origin_BT.flatten()[positions_N]
            of_all = partial(self._measured, origin_N=origin_N, is_trained_N=targets_N != IGNORED, batch=batch)
            wanted = LossOfScores(token_losses, positions_N, targets_N, of_all=of_all)
        found: torch.Tensor = model(**batch.inputs, use_cache=False, loss_of_scores=wanted)
        return found

    def _measured(
        self, losses_N: torch.Tensor, origin_N: torch.Tensor, is_trained_N: torch.Tensor, batch: CorpusBatch
    ) -> torch.Tensor:
        zeros_S = torch.zeros_like(batch.bytes_S)
        nats_S = zeros_S.index_add(0, origin_N, losses_N)
        tokens_S = zeros_S.index_add(0, origin_N, is_trained_N.float())
        self._add("bits_per_byte", nats_S.sum() / math.log(2), batch.bytes_S.sum())
        if len(self.sources) > 1:
            for name, nats, tokens, size in zip(self.sources, nats_S, tokens_S, batch.bytes_S, strict=True):
                self._add(f"loss/{name}", nats, tokens)
                self._add(f"bits_per_byte/{name}", nats / math.log(2), size)
        return losses_N.sum()

    def _add(self, name: str, total: torch.Tensor, divisor: torch.Tensor) -> None:
        self._figures[name] = added(Figure(total, divisor), self._figures.get(name))

    def take_figures(self) -> dict[str, Figure]:
        """Of the held-out texts since this was last called, and of what was trained since."""
        taken, self._figures = self._figures, {}
        return taken | self.balance.take_figures()


def _loss_sum(
    logits_BTV: torch.Tensor, next_tokens_BT: torch.Tensor, *, z_loss: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Cross-entropy, and z_loss times log(Z)^2 of each trained token, where Z is the denominator of its softmax."""
    losses_N = token_losses(logits_BTV, next_tokens_BT, label_smoothing=label_smoothing)
    if z_loss:
        log_z_N = logits_BTV.flatten(0, 1).float().logsumexp(-1)
        losses_N = losses_N + z_loss * log_z_N.square() * (next_tokens_BT.flatten() != IGNORED)
    return losses_N.sum()
