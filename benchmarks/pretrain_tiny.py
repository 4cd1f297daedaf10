"""How well the smallest ready configuration of recipes/pretrain.py learns a text, beside counts of its tokens.

  python -m benchmarks.pretrain_tiny --train shakespeare.txt

trains recipes/configs/pretrain_tiny.yaml, and writes to benchmarks/results/pretrain_tiny.json its held-out loss and
those of a unigram and a bigram model of the same training rows.
"""

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.config.command_line import parse
from finetune.config.token_budget import in_rows
from finetune.data.batches import Batches
from finetune.data.encoding import Row
from finetune.models.spec import ModelSpec
from finetune.output.run_files import environment
from finetune.run.corpus import corpus_of
from finetune.run.inputs import load_tokenizer
from recipes import pretrain

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "recipes" / "configs" / "pretrain_tiny.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "pretrain_tiny.json"


def counted_loss(train: Iterable[Row], held_out: Iterable[Row], *, vocabulary: int, before: int) -> float:
    """Nats a trained token of a model that has counted which token follows which ones, each count one too many.

    Args:
        before: tokens that it looks at: 0 for a unigram, 1 for a bigram model.
    """
    counts = np.ones([vocabulary] * (before + 1))
    for row in train:
        np.add.at(counts, _followed(row, before), 1)
    losses = -np.log(counts / counts.sum(-1, keepdims=True))
    found = [losses[_followed(row, before)] for row in held_out]
    return float(np.concatenate(found).mean())


def _followed(row: Row, before: int) -> tuple[np.ndarray, ...]:
    """Trained tokens, each behind what stands before it."""
    return tuple(row.tokens[1 - back : len(row.tokens) - back] for back in range(before, -1, -1))


def measured(text: Path, extra: list[str]) -> dict[str, Any]:
    """Train, and count."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--config", str(CONFIG), "--data.train", str(text), "--train.output_dir", folder]
        cfg = parse(pretrain.Config, [*flags, *extra, "--train.overwrite", "true"])
        began = time.perf_counter()
        pretrain.main(cfg)
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    train, held_out = rows_of(cfg)
    counted = {"vocabulary": 257}
    return {
        "environment": environment(),
        "text": {"bytes": text.stat().st_size, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()},
        "configuration": hashlib.sha256(CONFIG.read_bytes()).hexdigest(),
        "steps": len(lines),
        "tokens": sum(line["total_tokens"] for line in lines),
        "seconds": seconds,
        "loss": lines[-1]["eval_loss"],
        "bits_per_byte": lines[-1]["eval_bits_per_byte"],
        "unigram": counted_loss(train, held_out, before=0, **counted),
        "bigram": counted_loss(train, held_out, before=1, **counted),
    }


def rows_of(cfg: pretrain.Config) -> tuple[Iterable[Row], Iterable[Row]]:
    """Training rows and held-out ones, as the recipe has them."""
    cfg = in_rows(cfg)
    tokenizer = load_tokenizer(cfg.model, cfg.data)
    spec = ModelSpec.read(cfg.model, cfg.quantization, packing=False, dtype=torch.float32)
    batches, held_out = corpus_of(cfg, tokenizer, spec)
    assert isinstance(batches, Batches)
    assert held_out is not None
    return batches.rows, held_out


def table(found: dict[str, Any]) -> str:
    """Markdown: held-out losses."""
    lines = ["| model | held-out loss, nats a byte | bits a byte |", "|---|---|---|"]
    for name in ("unigram", "bigram"):
        lines.append(f"| {name} counts | {found[name]:.3f} | {found[name] / np.log(2):.3f} |")
    trained = f"after {found['steps']} steps, {found['tokens'] / 1e6:.1f} million tokens"
    lines.append(f"| `pretrain_tiny`, {trained} | {found['loss']:.3f} | {found['bits_per_byte']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="a plain text")
    options, extra = parser.parse_known_args()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # else it is bf16 on CPUs that compute in it, with another loss
    found = measured(options.train, extra)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
