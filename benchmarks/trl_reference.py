"""The recipe against TRL's SFTTrainer, without and with weights in 4 bits, on one model and the same rows.

  python -m benchmarks.trl_reference --train mine.jsonl --eval held_out.jsonl --steps 50

Four runs in fp32 with the same LoRA adapter. TRL gets the rows as the recipe tokenised, masked and ordered them; both
draw the adapter's first values from the same seed. TRL keeps adapters of quantised weights in bf16, so for 4 bits it
gets the values that those weights stand for, in fp32: a difference from that run is a fault of the recipe, while the
difference between the recipe's own two runs is the cost of 4 bits. The held-out losses are computed here, one row at a
time, from what each run saved. The result is written to benchmarks/results/trl_reference.json; a bound that is broken
ends the script with a sentence. Needs `trl`, `peft` and `bitsandbytes`. Limits: one process, and no warm-up, because
TRL's begins at the rate 0.
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
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from finetune.cli.demo_model import demo_model
from finetune.config import sections
from finetune.data import dataset, sources
from finetune.data.batches import IGNORED
from finetune.data.encoding import Row, Settings
from finetune.data.rows import Rows
from finetune.data.sampler import global_batch
from finetune.data.sources import named_sources
from finetune.errors import InputError, refuse_if_any
from finetune.models import adapter as adapters
from finetune.models import loading as models
from finetune.models import quantization
from finetune.output import run_files
from recipes import sft

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "trl_reference.json"
DATA = ROOT / "recipes" / "data"
SEED = 0
BATCH, MICRO_BATCH = 8, 2
LEARNING_RATE, SCHEDULE, MAX_GRAD_NORM = 5e-4, "cosine", 1.0
RANK, ALPHA = 16, 32.0
NAMES = {
    "recipe": "recipe",
    "trl": "TRL's SFTTrainer",
    "recipe_4_bits": "recipe, 4 bits",
    "trl_4_bits": "TRL's SFTTrainer, 4 bits",
}
BOUNDS = {("trl", "recipe"): 0.005, ("trl_4_bits", "recipe_4_bits"): 0.005, ("recipe_4_bits", "recipe"): None}
"""Largest difference of the first run's held-out loss from the second's, as a share of the second's; None for the cost
of 4 bits, which is the model's and not the recipe's."""


def train_with_recipe(
    folder: Path, *, four_bits: bool, model: str, train: str, max_length: int, steps: int
) -> list[dict[str, float]]:
    """One run of recipes/sft.py. Returns loss, gradient norm, learning rate and seconds of each step."""
    sections: dict[str, Any] = {
        "model": {"path": model},
        "quantization": {"bits": 4 if four_bits else "none"},
        "adapter": {"type": "lora", "rank": RANK, "alpha": ALPHA, "dropout": 0.0, "targets": "all-linear"},
        "data": {"train": train, "max_length": max_length},
        "train": {
            "output_dir": str(folder),
            "steps": steps,
            "global_batch_size": BATCH,
            "micro_batch_size": MICRO_BATCH,
            "learning_rate": LEARNING_RATE,
            "schedule": SCHEDULE,
            "warmup_ratio": 0.0,
            "weight_decay": 0.0,
            "max_grad_norm": MAX_GRAD_NORM,
            "optimizer": "adamw",
            "seed": SEED,
        },
        "log": {"every": 10},
    }
    sft.main(sft.Config.model_validate(sections))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def train_with_trl(
    folder: Path, *, four_bits: bool, model: str, rows: Rows, tokenizer: PreTrainedTokenizerBase, steps: int
) -> list[dict[str, float]]:
    """One run of TRL over the same rows in the same order. Returns the same keys for each step, and saves the adapter.

    A column `labels` is the one that TRL leaves as it is; without `max_length` it cuts nothing.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    order = [i for step in range(1, steps + 1) for i in rows_of_step(step, rows, steps)]
    features = {
        "input_ids": [rows[i].tokens.tolist() for i in order],
        "labels": [labels(rows[i]) for i in order],
    }
    start = load(model, four_bits=False)
    if four_bits:  # a model that was quantised itself would be taken for one that still is
        start.load_state_dict(load(model, four_bits=True).dequantize().state_dict())
    trainer = SFTTrainer(
        model=start,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict(features),
        peft_config=LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,  # type: ignore[arg-type]  # PEFT divides it, and takes any number
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        args=SFTConfig(
            output_dir=str(folder),
            max_length=None,
            packing=False,
            shuffle_dataset=False,
            train_sampling_strategy="sequential",
            num_train_epochs=1,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=BATCH // MICRO_BATCH,
            gradient_checkpointing=False,
            optim="adamw_torch",
            adam_beta1=0.9,
            adam_beta2=0.999,
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
    prepared: Any = trainer.train_dataset
    assert prepared[:] == features, "TRL changed the rows that it was given."
    assert_same_start(trainer.model, model, four_bits=four_bits)
    trainer.train()
    trainer.save_model(str(folder / "final"))
    *logged, summary = trainer.state.log_history
    seconds = summary["train_runtime"] / len(logged)
    return [entry | {"step_seconds": seconds} for entry in logged]


def rows_of_step(step: int, rows: Rows, steps: int) -> list[int]:
    """Indices of the rows that the recipe trains in a step."""
    return global_batch(step, rows=len(rows), rows_in_run=steps * BATCH, global_batch_size=BATCH, seed=SEED)


def labels(row: Row) -> list[int]:
    """A row's tokens where they are trained, and what PyTorch ignores elsewhere."""
    return [token if trained else IGNORED for token, trained in zip(row.tokens.tolist(), row.trained)]


def assert_same_start(theirs: Any, path: str, *, four_bits: bool) -> None:
    """Hold the first values of TRL's adapter against those that the recipe draws."""
    model = load(path, four_bits=four_bits)
    adapters.attach(
        model,
        sections.Adapter(type="lora", rank=RANK, alpha=ALPHA),
        base=path,
        revision=None,
        dtype=torch.float32,
        seed=SEED,
    )
    ours = {adapters.PREFIX + name: value.cpu() for name, value in model.named_parameters() if value.requires_grad}
    drawn = {name: value.cpu() for name, value in theirs.named_parameters() if value.requires_grad}
    assert ours.keys() == drawn.keys(), "TRL trains other parameters than the recipe."
    assert ours, "Nothing is trained."
    assert all(torch.equal(ours[name], drawn[name]) for name in ours), "TRL's adapter starts from other values."


def load(path: str, *, four_bits: bool) -> Any:
    """The model in fp32; in 4 bits, quantised as the recipe does it."""
    if not four_bits:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        quantization_config=quantization.bitsandbytes_config(4, torch.float32),
        device_map={"": device()},
    )
    quantization.settle(model, torch.float32)
    return model


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def held_out_loss(model: Any, rows: Rows) -> float:
    """Loss per trained token in nats, each row computed alone: no padding, no batches, neither trainer's code."""
    model = model.to(device()).eval()
    loss_sum, tokens = 0.0, 0
    for row in rows:
        input_ids = torch.tensor([row.tokens.tolist()], device=device())
        is_trained_T = torch.tensor(row.trained[1:], device=device())
        logits_TV = model(input_ids=input_ids, use_cache=False).logits[0, :-1][is_trained_T]
        loss_sum += F.cross_entropy(logits_TV.float(), input_ids[0, 1:][is_trained_T], reduction="sum").item()
        tokens += int(is_trained_T.sum())
    assert tokens == rows.trained_tokens.sum()
    return loss_sum / tokens


def measure(model: str, train: str, held_out: str, *, max_length: int, steps: int | None) -> dict[str, Any]:
    """Run all four and compare them.

    Args:
        steps: optimizer steps of a run; None for one pass over the rows, without those that fill no step.

    Raises:
        InputError: if a package, the model or a file is missing, or a row cannot be used.
    """
    lacking = [name for name in ("trl", "peft", "bitsandbytes") if importlib.util.find_spec(name) is None]
    refuse_if_any(
        [f"The comparison needs {name}; install it with: pip install {name}." for name in lacking]
        + models.problems(model, None, None)
        + sources.problems(named_sources([train, held_out]))
    )
    from peft import PeftModel

    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    models.quiet()
    tokenizer = models.load_tokenizer(model, revision=None, trust_remote_code=False, chat_template=None)
    rows, held_out_rows = (
        dataset.read_rows(named_sources(file), tokenizer, Settings(max_length)) for file in (train, held_out)
    )
    steps = steps or max(1, len(rows) // BATCH)
    recipe: dict[str, Any] = {"model": model, "train": train, "max_length": max_length, "steps": steps}
    trl: dict[str, Any] = {"model": model, "rows": rows, "tokenizer": tokenizer, "steps": steps}
    trained: dict[str, list[dict[str, float]]] = {}
    runs: dict[str, dict[str, Any]] = {}
    before: dict[bool, float] = {}
    for name in NAMES:
        four_bits = name.endswith("_4_bits")
        if four_bits not in before:
            before[four_bits] = held_out_loss(load(model, four_bits=four_bits), held_out_rows)
        with tempfile.TemporaryDirectory() as work:
            print(f"{NAMES[name]}: training {steps} steps", flush=True)
            if name.startswith("trl"):
                trained[name] = train_with_trl(Path(work), four_bits=four_bits, **trl)
            else:
                trained[name] = train_with_recipe(Path(work), four_bits=four_bits, **recipe)
            adapted = PeftModel.from_pretrained(load(model, four_bits=four_bits), str(Path(work) / "final"))
            runs[name] = {
                "held_out_loss_before": before[four_bits],
                "held_out_loss": held_out_loss(adapted, held_out_rows),
                "training_seconds": sum(metrics["step_seconds"] for metrics in trained[name]),
                "step_losses": [metrics["loss"] for metrics in trained[name]],
            }
    comparisons = []
    for (name, other), bound in BOUNDS.items():
        loss, reference = runs[name]["held_out_loss"], runs[other]["held_out_loss"]
        pairs = list(zip(trained[name], trained[other], strict=True))
        assert all(abs(a["learning_rate"] - b["learning_rate"]) < 1e-9 for a, b in pairs), "Learning rates differ."
        steps_apart = {
            f"largest_step_{key}": max(abs(a[key] - b[key]) for a, b in pairs) for key in ("loss", "grad_norm")
        }
        share = abs(loss - reference) / reference
        comparisons.append({"run": name, "of": other, "held_out_loss": share, "bound": bound, **steps_apart})
    environment = run_files.environment()
    return {
        "environment": {
            "python": environment["python"],
            "packages": environment["packages"]
            | {name: importlib.metadata.version(name) for name in ("trl", "datasets")},
            "hardware": {key: environment["hardware"][key] for key in ("gpus", "cpus")},
        },
        "setup": {
            "model": Path(model).name,
            "precision": "fp32",
            "training": describe(train, rows),
            "held_out": describe(held_out, held_out_rows),
            "max_length": max_length,
            "steps": steps,
            "global_batch_size": BATCH,
            "micro_batch_size": MICRO_BATCH,
            "learning_rate": LEARNING_RATE,
            "schedule": SCHEDULE,
            "max_grad_norm": MAX_GRAD_NORM,
            "rank": RANK,
            "alpha": ALPHA,
            "seed": SEED,
        },
        "runs": runs,
        "comparisons": comparisons,
    }


def describe(file: str, rows: Rows) -> dict[str, Any]:
    """Which rows these were."""
    return {
        "file": Path(file).name,
        "rows": len(rows),
        "tokens": int(rows.lengths.sum()),
        "trained_tokens": int(rows.trained_tokens.sum()),
        "cut": rows.summary["truncated"],
        "fingerprint": rows.fingerprint,
    }


def table(results: dict[str, Any]) -> str:
    """Markdown: the runs, and how far they are from one another."""
    lines = ["| run | held-out loss before | after | seconds |", "|---|---|---|---|"]
    for name, run in results["runs"].items():
        losses = f"{run['held_out_loss_before']:.4f} | {run['held_out_loss']:.4f}"
        lines.append(f"| {NAMES[name]} | {losses} | {run['training_seconds']:.0f} |")
    lines += [
        "",
        "| difference | held-out loss | allowed | loss of any step | gradient norm |",
        "|---|---|---|---|---|",
    ]
    for found in results["comparisons"]:
        shares = f"{found['held_out_loss']:.4%} | " + (f"{found['bound']:.1%}" if found["bound"] else "")
        steps = f"{found['largest_step_loss']:.1e} | {found['largest_step_grad_norm']:.1e}"
        lines.append(f"| {NAMES[found['run']]}, from {NAMES[found['of']]} | {shares} | {steps} |")
    return "\n".join(lines)


def broken_bounds(results: dict[str, Any]) -> list[str]:
    """A sentence for each bound that does not hold."""
    return [
        f"{NAMES[found['run']]}: the held-out loss is {found['held_out_loss']:.2%} away from that of "
        f"{NAMES[found['of']]}, and {found['bound']:.1%} are allowed; compare the step losses in {RESULTS.name}."
        for found in results["comparisons"]
        if found["bound"] and not found["held_out_loss"] <= found["bound"]  # a loss that is not a number breaks it too
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder (default: the one of finetune.cli.demo_model)")
    parser.add_argument("--train", default=str(DATA / "demo_train.jsonl"), metavar="FILE")
    parser.add_argument("--eval", default=str(DATA / "demo_heldout.jsonl"), metavar="FILE")
    parser.add_argument("--max-length", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--steps", type=int, help=f"optimizer steps of {BATCH} rows (default: one pass)")
    args = parser.parse_args()
    try:
        model = args.model or str(demo_model())
        results = measure(model, args.train, args.eval, max_length=args.max_length, steps=args.steps)
    except InputError as error:
        sys.exit("\n".join(f"error: {problem}" for problem in error.problems))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    if broken := broken_bounds(results):
        sys.exit("\n".join(f"error: {sentence}" for sentence in broken))


if __name__ == "__main__":
    main()
