"""Speed and memory of the recipe's own step beside its peers', on the same weights, documents and tokens.

  python -m benchmarks.step                                            # what runs here: SmolLM2-135M, LoRA and full
  python -m benchmarks.step --models Llama-3.1-8B --methods lora qlora --max_length 4096 --packing
  python -m benchmarks.step --report                                   # table and chart of what is recorded

Peers: the recipe, with rows padded, and with plain kernels; where they are asked for by name, with ``model.fp8``, with
all layers recomputed, and with activations in host memory; transformers' ``Trainer``; TRL's ``SFTTrainer`` as it comes.
Those that are installed run, each in a process of its own. They get the rows as the recipe tokenised, masked and
ordered them, and each leaves one line of JSON in benchmarks/results/step.jsonl at once. Tokens are those of documents:
no peer is credited for padding. A peer's model is in bf16, as both trainers load it; the recipe keeps fp32 masters
unless ``--weights bf16``.
Limits: one process and one GPU; models have random weights, so losses mean nothing.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan_cases import MODELS, TOKENS_OF_TEMPLATE, WORDS, write_model
from benchmarks.step_report import PEERS, RESULTS, recorded, report, sentence
from finetune.units import GIB

ROOT = Path(__file__).parent.parent
CHART = ROOT / "benchmarks" / "results" / "step.svg"
LENGTHS = (103, 129, 140, 150, 157, 164, 171, 178, 185, 193, 200, 211, 221, 231, 243, 252, 268, 284, 308, 346, 570)
"""Tokens of documents, from the shortest to the longest in twentieths: those of 1,500 training rows of GSM8K with the
tokenizer of SmolLM2."""
TRAINED = 0.58
"""Share of their tokens that are trained."""
CONFIGURED: dict[str, dict[str, dict[str, Any]]] = {
    "recipe": {},
    "fp8": {"model": {"fp8": True}},
    "recomputed": {"train": {"activation_checkpointing": "full"}},
    "offloaded": {"train": {"activation_checkpointing": "offload"}},
    "padded": {"model": {"attention": "sdpa"}},
    "plain": {"model": {"kernels": "plain"}},
}
"""What the recipe's own peers have in their sections."""
ASKED_FOR = ("fp8", "recomputed", "offloaded")
"""Peers that run where they are asked for by name."""
NEEDS = {"trl": ["trl"]}
METHODS = ("full", "lora", "qlora")
RANK = 16
OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_8bit"}
"""By the recipe's names; and transformers'."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or report; the exit code says whether every run gave figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2-135M"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["lora", "full"])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=default_peers())
    parser.add_argument("--max_length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16, help="of an optimizer step")
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="of which the first two do not count")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--weights", choices=("fp32_master", "bf16"), default="fp32_master", help="of the recipe")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--patience", type=int, default=480, help="seconds for each run")
    parser.add_argument("--keep_models", type=Path, metavar="FOLDER", help="for further calls, which draw none anew")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="show what is recorded, and measure nothing")
    parser.add_argument("--chart", type=Path, default=CHART)
    asked = parser.parse_args(arguments)
    if asked.report:
        report(recorded(asked.results), asked.chart)
        return 0
    if lacking := [name for peer in asked.peers for name in missing(peer)]:
        print(f"The peers that were asked for need {' and '.join(lacking)}; install it, or leave them out.")
        return 2
    failed = 0
    for model in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            documents = asked.rows * asked.steps * (8 if asked.packing else 1)
            prepare(Path(folder), model, documents, asked.keep_models or Path(folder))
            for method in asked.methods:
                for peer in asked.peers:
                    keys = ("max_length", "rows", "micro_batch", "steps", "packing", "weights", "optimizer")
                    case = {"peer": peer, "model": model, "method": method} | {key: vars(asked)[key] for key in keys}
                    found = measured(case, Path(folder), asked.patience)
                    failed += "error" in found
                    with asked.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(case | found) + "\n")
                    print(sentence(case, found), flush=True)
    return 1 if failed else 0


def default_peers() -> list[str]:
    """Those that are installed, and run on every device."""
    return [peer for peer in PEERS if peer not in ASKED_FOR and not missing(peer)]


def missing(peer: str) -> list[str]:
    return [name for name in NEEDS.get(peer, []) if importlib.util.find_spec(name) is None]


def prepare(folder: Path, model: str, documents: int, models: Path) -> None:
    """What all peers read: a model with random weights, drawn in a process of its own, and the rows.

    Args:
        models: where the model is put, complete, unless it is there.
    """
    write_documents(folder / "rows.jsonl", documents)
    path = models.absolute() / model
    if not path.exists():
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=models) as name:
            made = write_model(Path(name) / model, model).absolute()
            subprocess.run([sys.executable, "-m", "benchmarks.plan_runs", "draw", str(made)], cwd=ROOT, check=True)
            made.rename(path)
    (folder / "model").symlink_to(path)


def measured(case: dict[str, Any], folder: Path, patience: int) -> dict[str, Any]:
    """One run, in a process of its own; why there is none under ``error``."""
    told = json.dumps(case | {"folder": str(folder)})
    command = [sys.executable, "-m", "benchmarks.step", "work"]
    try:
        ended = subprocess.run(
            command, input=told, capture_output=True, text=True, cwd=ROOT, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {patience} seconds"}
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or ["it said nothing"]
        return {"error": f"ended with {ended.returncode}: {said[-1]}"}
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


# -- in the process of a run -----------------------------------------------------------------------------------------


def work() -> None:
    """Read a case from standard input, run it, print its figures as the last line."""
    import torch

    case = json.loads(sys.stdin.read())
    folder = Path(case["folder"])
    seconds, tokens, trained, flops = (by_recipe if case["peer"] in CONFIGURED else by_trainer)(case, folder)
    counted = slice(2, None) if len(seconds) > 2 else slice(None)
    spent = sum(seconds[counted])
    on_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names = ["torch", "transformers", "accelerate", "peft", *NEEDS.get(case["peer"], [])]
    answer = {
        "tokens_per_second": sum(tokens[counted]) / spent,
        "step_seconds": statistics.median(seconds[counted]),
        "tflops_per_second": flops(sum(tokens[counted]), sum(trained[counted])) / spent / 1e12,
        "peak_gib": peak / GIB,
        "tokens": tokens,
        "device": torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads",
        "versions": {name: importlib.metadata.version(name) for name in names},
    }
    print("\n" + json.dumps(answer))


Figures = tuple[list[float], list[int], list[int], Callable[[float, float], float]]
"""Seconds, tokens and trained tokens of each step, and the model FLOPs of so many of both."""


def by_recipe(case: dict[str, Any], folder: Path) -> Figures:
    """The recipe's ``main``, as a user calls it."""
    from recipes import sft

    output = folder / "run"
    sft.main(sft.Config.model_validate(configuration(case, folder, output)))
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    batches, flops = batches_and_flops(case, folder)
    planned = [batches.step(step) for step in range(1, case["steps"] + 1)]
    return [s["step_seconds"] for s in steps], [b.tokens for b in planned], [b.trained_tokens for b in planned], flops


def configuration(case: dict[str, Any], folder: Path, output: Path) -> dict[str, Any]:
    adapted, own = case["method"] != "full", CONFIGURED.get(case["peer"], {})
    return {
        "model": {"path": str(folder / "model"), **own.get("model", {})},
        "adapter": {"type": "lora", "rank": RANK} if adapted else {},
        "quantization": {"bits": 4 if case["method"] == "qlora" else "none"},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": case["max_length"],
            "packing": case["packing"],
        },
        "train": {
            "output_dir": str(output),
            "overwrite": True,
            "steps": case["steps"],
            "global_batch_size": case["rows"],
            "micro_batch_size": case["micro_batch"],
            "weights": case["weights"],
            "optimizer": case["optimizer"],
            "plan_check": "off",
            **own.get("train", {}),
        },
        "checkpoint": {"every": 0, "at_end": False},
    }


def batches_and_flops(case: dict[str, Any], folder: Path) -> tuple[Any, Callable[[float, float], float]]:
    """The recipe's batches, and what their tokens are worth."""
    import torch

    from finetune.models import loading
    from finetune.models.flops import training_flops
    from finetune.models.spec import ModelSpec
    from finetune.run.inputs import batches_of, load_rows, load_tokenizer
    from recipes import sft

    cfg = sft.Config.model_validate(configuration(case, folder, folder / "run"))
    spec = ModelSpec.read(cfg.model, cfg.quantization, packing=cfg.data.packing, dtype=torch.bfloat16)
    tokenizer = load_tokenizer(cfg.model, cfg.data)
    rows, _ = load_rows(cfg.data, tokenizer, spec)
    batches = batches_of(cfg.data, cfg.train, tokenizer, spec, rows)
    skeleton = spec.skeleton
    for parameter in skeleton.parameters():
        parameter.requires_grad_(case["method"] == "full")  # what an adapter adds is left out, for every peer
    return batches, training_flops(**loading.shape(skeleton), mean_row_length=batches.attended_tokens).of


def by_trainer(case: dict[str, Any], folder: Path) -> Figures:
    """transformers' ``Trainer``, or TRL's, over the rows of the recipe's steps in their order."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from finetune.data.batches import IGNORED

    batches, flops = batches_and_flops(case, folder)
    planned = [batches.step(step) for step in range(1, case["steps"] + 1)]
    features: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for batch in planned:
        for place in batch.places:
            documents = batches.documents(place)
            features["input_ids"].append([int(token) for row in documents for token in row.tokens])
            features["labels"].append(
                [int(token) if is_trained else IGNORED for row in documents for token, is_trained in labelled(row)]
            )
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            self.begun = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            seconds.append(time.perf_counter() - self.begun)

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    chosen: dict[str, Any] = {}
    if case["method"] == "qlora":
        from transformers import BitsAndBytesConfig

        chosen["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16, **chosen)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    adapter = LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "theirs"),
        "num_train_epochs": 1,
        "per_device_train_batch_size": case["micro_batch"],
        "gradient_accumulation_steps": case["rows"] // case["micro_batch"],
        "optim": OPTIMIZERS[case["optimizer"]],
        "bf16": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "train_sampling_strategy": "sequential",
    }
    data = Dataset.from_dict(features)
    if case["peer"] == "trl":
        from trl import SFTConfig, SFTTrainer

        settings = SFTConfig(max_length=None, packing=False, shuffle_dataset=False, **arguments)
        peft_config = None if case["method"] == "full" else adapter
        trainer: Any = SFTTrainer(
            model=model, processing_class=tokenizer, train_dataset=data, peft_config=peft_config, args=settings
        )
    else:
        if case["method"] != "full":
            model = get_peft_model(model, adapter)
        collate = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED)
        trainer = Trainer(model, args=TrainingArguments(**arguments), train_dataset=data, data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock())
    trainer.train()
    return seconds, [b.tokens for b in planned], [b.trained_tokens for b in planned], flops


def labelled(row: Any) -> Iterable[tuple[int, bool]]:
    return zip(row.tokens.tolist(), row.trained)


def write_documents(path: Path, count: int) -> None:
    """Conversations of one question and one answer, as long as ``LENGTHS`` says."""
    draw = random.Random(0)

    def text(words: int) -> str:
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(words))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            place = draw.randrange(len(LENGTHS) - 1)
            words = draw.randint(LENGTHS[place], LENGTHS[place + 1]) - TOKENS_OF_TEMPLATE
            answer = max(1, round(TRAINED * words))
            messages = [
                {"role": "user", "content": text(max(1, words - answer))},
                {"role": "assistant", "content": text(answer)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        work()
    else:
        sys.exit(main())
