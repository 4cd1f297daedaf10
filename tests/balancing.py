"""Training of a mixture of experts with its load-balancing loss, as tests run it in their processes, and with a bug."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import scenarios
import tiny
import torch
from test_families import EXPERTS, SIZES

from finetune.training.router_balance import Documents


def mixture_folder(folder: Path, family: str, **fields: Any) -> Path:
    """Configuration without weights, and the tokenizer."""
    tiny.build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **EXPERTS, **fields}))
    return folder


@contextmanager
def micro_batches_as_documents() -> Iterator[None]:
    """What frameworks compute: a loss of all positions of each micro-batch together."""
    original = Documents.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, next_tokens_BT: torch.Tensor, inputs: dict[str, Any]) -> Documents:
        found = original(cls, next_tokens_BT, inputs)
        return Documents(found.number_N.clamp(max=len(found.tokens_D)) * 0, found.tokens_D.sum()[None])

    with mock.patch.object(Documents, "of", classmethod(of)):
        yield


def train(config: Any, bug: bool = False) -> dict[str, Any]:
    """Run the recipe; returns what this rank saw of the strategy."""
    with micro_batches_as_documents() if bug else nullcontext():
        return scenarios.train(config)
