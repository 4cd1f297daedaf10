"""Noise on the embeddings of training rows (NEFTune, Jain et al., arXiv:2310.05914), the same under every strategy.

A document of L tokens gets uniform noise of up to alpha / sqrt(L * d) on each of the d values of each of its
embeddings. It is drawn for the document by itself, from the seed, the step and the number of its row, so neither the
other rows of a micro-batch nor the process change it. Example: with alpha 5, 100 tokens and 2,048 values it is up to
5 / sqrt(204,800) = 0.011. (Elsewhere L is the length of the longest row of the micro-batch, so that noise depends on
how rows are put together.)
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from finetune.data.batches import NOTHING
from finetune.data.encoding import Row
from finetune.seeds import seed_of

Document = tuple[int, int]
"""Its seed, and its tokens."""


class EmbeddingNoise:
    """Of one run; nothing where ``alpha`` is 0."""

    def __init__(self, model: Any, alpha: float, seed: int, *, fillers: int = 1) -> None:
        """Has the input embeddings of the model add the noise while it trains.

        Args:
            fillers: documents of ``NOTHING`` that stand for a row that is not there; two for a pair.
        """
        self.alpha, self.seed, self.fillers = alpha, seed, fillers
        self.documents: list[Document] = []
        """Of the micro-batch that comes next, in their order; none before the first step, where all is tried out."""
        if alpha:
            model.get_input_embeddings().register_forward_hook(self._add)

    def expect(self, step: int, rows: Sequence[tuple[int, Sequence[Row]]]) -> None:
        """Say which rows come next.

        Args:
            rows: number of each in its step, and its documents.
        """
        self.documents = [
            (seed_of(self.seed, step, place + 1, number), len(document.tokens))  # the number of no row is -1
            for place, documents in rows
            for number, document in enumerate(documents or [NOTHING] * self.fillers)
        ]

    def _add(self, module: torch.nn.Module, _inputs: Any, embeddings_BTD: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embeddings_BTD
        lines, positions, width = embeddings_BTD.shape
        documents = self.documents or [(0, positions)] * lines
        is_flat = lines == 1
        assert sum(tokens for _, tokens in documents) == positions if is_flat else len(documents) == lines
        noise_BTD, start = torch.zeros_like(embeddings_BTD), 0
        for line, (seed, tokens) in enumerate(documents):
            random = torch.Generator(embeddings_BTD.device).manual_seed(seed)
            most = self.alpha / math.sqrt(tokens * width)
            own = torch.empty(tokens, width, device=embeddings_BTD.device).uniform_(-most, most, generator=random)
            noise_BTD[0 if is_flat else line, start : start + tokens] = own
            start += tokens if is_flat else 0
        return embeddings_BTD + noise_BTD
