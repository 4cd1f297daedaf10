"""recipes/dpo.py against TRL's DPOTrainer, on one model and the same tokens.

  python -m benchmarks.dpo_reference --train pairs.jsonl --steps 20

Two runs in fp32 with the same LoRA adapter, loss and schedule, without dropout. TRL gets the pairs as the recipe
tokenised and ordered them; both draw the adapter's first values from the same seed. The result, with the loss, the
reward margin and the gradient norm of each step of both, is written to benchmarks/results/dpo_reference.json; a loss
that is further than 1e-4 away in any step ends the script with a sentence. Losses that begin above 1 (ipo at 25, sppo
at 50, both squares) are judged as shares of what they begin at. Needs `trl`. Limits: one process, and no
warm-up, because TRL's begins at the rate 0.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from benchmarks.trl_reference import assert_same_start
from finetune.cli.demo_model import demo_model
from finetune.data import dataset, sources
from finetune.data.encoding import Row, Settings
from finetune.data.rows import Rows
from finetune.data.sampler import global_batch
from finetune.data.sources import named_sources
from finetune.errors import InputError, refuse_if_any
from finetune.models import loading as models
from finetune.output import run_files
from recipes import dpo

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "dpo_reference.json"
DATA = ROOT / "recipes" / "data"
SEED, RANK, ALPHA = 0, 16, 32.0
BATCH, MICRO_BATCH = 8, 2
LEARNING_RATE, SCHEDULE, MAX_GRAD_NORM, BETA = 1e-4, "cosine", 1.0, 0.1
BOUND = 1e-4
"""Largest difference of a step's loss, where losses begin at 1 at most; else as a share of the first loss."""
LOSSES = {"sigmoid": "sigmoid", "ipo": "ipo", "apo_zero": "apo_zero", "sppo": "sppo_hard", "hinge": "hinge"}
"""Of the recipe, and how TRL calls them."""
FIGURES = {"loss": "loss", "reward_margin": "rewards/margins", "grad_norm": "grad_norm"}


def train_with_recipe(
    folder: Path, *, loss: str, model: str, train: str, max_length: int, steps: int
) -> list[dict[str, float]]:
    """One run of recipes/dpo.py; its figures of each step."""
    sections: dict[str, Any] = {
        "model": {"path": model},
        "adapter": {"type": "lora", "rank": RANK, "alpha": ALPHA},
        "data": {"train": train, "max_length": max_length},
        "train": {
            "output_dir": str(folder),
            "steps": steps,
            "global_batch_size": BATCH,
            "micro_batch_size": MICRO_BATCH,
            "learning_rate": LEARNING_RATE,
            "schedule": SCHEDULE,
            "warmup_ratio": 0.0,
            "max_grad_norm": MAX_GRAD_NORM,
            "seed": SEED,
        },
        "log": {"every": 10},
        "dpo": {"loss": loss, "beta": BETA},
    }
    dpo.main(dpo.Config.model_validate(sections))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: json.loads(line)[name] for name in FIGURES} for line in lines]


def train_with_trl(
    folder: Path, *, loss: str, model: str, rows: Rows, tokenizer: PreTrainedTokenizerBase, steps: int
) -> list[dict[str, float]]:
    """One run of TRL over the same tokens in the same order; the same figures of each step."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback
    from trl import DPOConfig, DPOTrainer

    order = [i for step in range(1, steps + 1) for i in pairs_of_step(step, rows, steps)]
    every = [(rows[2 * i], rows[2 * i + 1]) for i in order]
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict(dict.fromkeys(("prompt", "chosen", "rejected"), ["x"] * len(every))),
        peft_config=LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,  # type: ignore[arg-type]  # PEFT divides it, and takes any number
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        args=DPOConfig(
            output_dir=str(folder),
            loss_type=[LOSSES[loss]],
            beta=BETA,
            max_length=None,
            train_sampling_strategy="sequential",
            num_train_epochs=1,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=BATCH // MICRO_BATCH,
            gradient_checkpointing=False,
            optim="adamw_torch",
            weight_decay=0.0,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type=SCHEDULE,
            warmup_steps=0,
            max_grad_norm=MAX_GRAD_NORM,
            bf16=False,
            seed=SEED,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train_dataset = Dataset.from_dict(
        {
            "prompt_ids": [prompt(chosen) for chosen, _ in every],
            "chosen_ids": [answer(chosen) for chosen, _ in every],
            "rejected_ids": [answer(rejected) for _, rejected in every],
        }
    )
    assert all(prompt(chosen) == prompt(rejected) for chosen, rejected in every), "A pair has two prompts."
    assert_same_start(trainer.model, model, four_bits=False)
    trainer.train()
    logged = trainer.state.log_history[:-1]
    return [{name: float(entry[theirs]) for name, theirs in FIGURES.items()} for entry in logged]


def pairs_of_step(step: int, rows: Rows, steps: int) -> list[int]:
    """Numbers of the pairs that the recipe trains in a step."""
    pairs = len(rows) // 2
    return global_batch(step, rows=pairs, rows_in_run=steps * BATCH, global_batch_size=BATCH, seed=SEED)


def prompt(row: Row) -> list[int]:
    found: list[int] = row.tokens[: row.spans[0][0]].tolist()
    return found


def answer(row: Row) -> list[int]:
    """Its trained tokens; what the template writes behind them is not looked at by any of them."""
    ((first, end),) = row.spans
    found: list[int] = row.tokens[first:end].tolist()
    return found


def measure(model: str, train: str, *, losses: list[str], max_length: int, steps: int) -> dict[str, Any]:
    """Train with both under each loss, and compare.

    Raises:
        InputError: if a package, the model or the file is missing, or a row cannot be used.
    """
    lacking = [] if importlib.util.find_spec("trl") else ["The comparison needs trl; install it with: pip install trl."]
    refuse_if_any(lacking + models.problems(model, None, None) + sources.problems(named_sources(train)))
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    models.quiet()
    tokenizer = models.load_tokenizer(model, revision=None, trust_remote_code=False, chat_template=None)
    rows = dataset.read_rows(named_sources(train), tokenizer, Settings(max_length, paired=True))
    found: dict[str, Any] = {}
    for loss in losses:
        with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
            print(f"{loss}: training {steps} steps with each", flush=True)
            recipe = train_with_recipe(
                Path(ours), loss=loss, model=model, train=train, max_length=max_length, steps=steps
            )
            trl = train_with_trl(Path(theirs), loss=loss, model=model, rows=rows, tokenizer=tokenizer, steps=steps)
        assert len(recipe) == len(trl) == steps
        apart = {name: max(abs(a[name] - b[name]) for a, b in zip(recipe, trl)) for name in FIGURES}
        found[loss] = {"largest_difference": apart, "recipe": recipe, "trl": trl}
    known = run_files.environment()
    versions = {name: importlib.metadata.version(name) for name in ("trl", "datasets")}
    return {
        "environment": {
            "python": known["python"],
            "packages": known["packages"] | versions,
            "hardware": {key: known["hardware"][key] for key in ("gpus", "cpus")},
        },
        "setup": {
            "model": Path(model).name,
            "precision": "fp32",
            "train": Path(train).name,
            "pairs": len(rows) // 2,
            "max_length": max_length,
            "steps": steps,
            "global_batch_size": BATCH,
            "learning_rate": LEARNING_RATE,
            "beta": BETA,
            "rank": RANK,
        },
        "losses": found,
    }


def furthest(found: dict[str, Any]) -> float:
    """The difference that ``BOUND`` is for."""
    return float(found["largest_difference"]["loss"] / max(1.0, found["recipe"][0]["loss"]))


def table(results: dict[str, Any]) -> str:
    """Markdown: how far the steps of both are from one another at most."""
    lines = ["| `dpo.loss` | first loss | last loss | loss of any step | reward margin | gradient norm |"]
    lines.append("|---|---|---|---|---|---|")
    for loss, found in results["losses"].items():
        first, last = found["recipe"][0]["loss"], found["recipe"][-1]["loss"]
        apart = " | ".join(f"{found['largest_difference'][name]:.1e}" for name in FIGURES)
        lines.append(f"| `{loss}` | {first:.4f} | {last:.4f} | {apart} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: the one of finetune.cli.demo_model)")
    parser.add_argument("--train", default=str(DATA / "demo_pairs.jsonl"), metavar="FILE")
    parser.add_argument("--losses", default=list(LOSSES), nargs="+", choices=list(LOSSES))
    parser.add_argument("--max-length", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=20, help=f"optimizer steps of {BATCH} pairs")
    args = parser.parse_args()
    try:
        results = measure(
            args.model or str(demo_model()),
            args.train,
            losses=args.losses,
            max_length=args.max_length,
            steps=args.steps,
        )
    except InputError as error:
        sys.exit("\n".join(f"error: {problem}" for problem in error.problems))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    broken = {loss: furthest(each) for loss, each in results["losses"].items()}
    if broken := {loss: apart for loss, apart in broken.items() if not apart <= BOUND}:  # no number breaks it too
        told = (f"error: {loss}: a loss is {apart:.1e} of its scale away from TRL's." for loss, apart in broken.items())
        sys.exit("\n".join(told))


if __name__ == "__main__":
    main()
