"""Whether recipes/dpo.py learns real preferences: its accuracy on pairs that it has not seen, with a test of it.

  python -m benchmarks.preference_run --pairs pairs.jsonl

trains an adapter in fp32 on three fifths of the pairs, once through, and writes to
benchmarks/results/preference_run.json the accuracy on the others, how likely guesses would be as good, and what the
run cost. Further flags go to the recipe.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from finetune.cli.demo_model import demo_model
from finetune.config.command_line import parse
from finetune.models.spec import ModelSpec
from finetune.output.run_files import environment
from finetune.run.inputs import load_rows, load_tokenizer
from recipes import dpo

RESULTS = Path(__file__).parent / "results" / "preference_run.json"
FLAGS = {
    "adapter.type": "lora",
    "adapter.rank": "16",
    "data.eval": "0.4",
    "data.max_length": "192",
    "train.epochs": "1",
    "train.global_batch_size": "8",
    "train.micro_batch_size": "1",
    "train.learning_rate": "2e-4",
    "dpo.reference": "cached",
    "eval.prompts": "0",
}
SIGNIFICANT = 0.05
"""Largest p-value that is taken for more than luck."""


def chance_of(right: int, pairs: int) -> float:
    """How likely at least so many of the pairs are right if each is guessed: the exact binomial test, one-sided.

    5 of 5 are guessed in one of 32 times: 0.031.
    """
    return sum(math.comb(pairs, k) for k in range(right, pairs + 1)) / 2**pairs


def measured(pairs: Path, model: str, extra: list[str]) -> dict[str, Any]:
    """Train, and look at the held-out pairs."""
    with tempfile.TemporaryDirectory() as folder:
        named = [text for key, value in FLAGS.items() for text in (f"--{key}", value)]
        own = ["--model.path", model, "--data.train", str(pairs), "--train.output_dir", folder]
        cfg = parse(dpo.Config, [*own, *named, *extra, "--train.overwrite", "true"])
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # on every machine, whatever its CPU computes in
        began = time.perf_counter()
        dpo.main(cfg)
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    train, held_out = pairs_of(cfg)
    right = round(lines[-1]["eval_accuracy"] * held_out)
    return {
        "environment": environment(),
        "threads": torch.get_num_threads(),
        "file": hashlib.sha256(pairs.read_bytes()).hexdigest(),
        "model": Path(model).name,
        "flags": FLAGS,
        "further_flags": extra,
        "steps": len(lines),
        "tokens": sum(line["total_tokens"] for line in lines),
        "seconds": seconds,
        "train_pairs": train,
        "eval_pairs": held_out,
        "eval_loss": lines[-1]["eval_loss"],
        "eval_margin": lines[-1]["eval_reward_margin"],
        "eval_right": right,
        "chance": chance_of(right, held_out),
    }


def pairs_of(cfg: dpo.Config) -> tuple[int, int]:
    """Training pairs, and held-out ones."""
    spec = ModelSpec.read(cfg.model, cfg.quantization, packing=False, dtype=torch.float32)
    rows, held_out = load_rows(cfg.data, load_tokenizer(cfg.model, cfg.data), spec, paired=True)
    assert rows is not None
    assert held_out is not None
    return len(rows) // 2, len(held_out) // 2


def table(found: dict[str, Any]) -> str:
    """Markdown: what was found, and what it cost."""
    right, pairs = found["eval_right"], found["eval_pairs"]
    row = [
        *(found["train_pairs"], found["steps"], f"{found['tokens']:,}"),
        f"{right} of {pairs} ({right / pairs:.0%})",
        f"{found['chance']:.3f}",
        f"{found['seconds'] / 60:.0f} minutes",
    ]
    return "\n".join(
        [
            "| pairs trained | steps | tokens | held-out pairs right | p | took |",
            "|---|---|---|---|---|---|",
            f"| {' | '.join(map(str, row))} |",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, help="a file of pairs, as recipes/dpo.py reads it")
    parser.add_argument("--model", help="a folder, or an id on the hub; SmolLM2-135M-Instruct if left out")
    options, extra = parser.parse_known_args()
    found = measured(options.pairs, options.model or str(demo_model()), extra)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")  # also what has shown nothing
    print(table(found))
    if found["chance"] > SIGNIFICANT:
        sys.exit(f"error: That may be luck: the bound is {SIGNIFICANT}.")


if __name__ == "__main__":
    main()
