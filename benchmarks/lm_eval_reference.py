"""`finetune evaluate` against EleutherAI's lm-evaluation-harness, row by row.

  python -m benchmarks.lm_eval_reference --lm-eval path/to/lm_eval --questions gsm8k_test.jsonl

Both score the same models in fp32 on the same rows. `answers` and `choices` are asked of a model that has trained the
demo, `numbers` (word problems) of the model before training. lm-eval's tasks are defined here and run by its own
command, without a hub. The result is written to benchmarks/results/lm_eval_reference.json. The script ends with a
sentence if a row has two scores, an answer differs, or a log-probability is further away than the bound. lm-eval (`pip
install lm-eval`) may be installed in an environment of its own.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import commands
from finetune.cli.demo_model import demo_model
from finetune.output.run_files import environment

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "lm_eval_reference.json"
DEMO = ROOT / "recipes" / "configs" / "demo.yaml"
DATA = ROOT / "recipes" / "data"
HELD_OUT = DATA / "demo_heldout.jsonl"
BOUND = 1e-3
"""Largest difference of a choice's log-probability, in nats."""
NUMBER = r"(-?[0-9][0-9,.]*)"
PACKAGES = ("torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class Task:
    """What both programs are asked."""

    scores: dict[str, str]
    """Of `finetune evaluate`, with lm-eval's name of each."""
    definition: dict[str, Any]
    """For lm-eval, but for its name and its data."""
    plain: bool = False
    """Texts are asked as they stand, without the chat template."""
    most_tokens: int = 60
    trained: bool = True
    """Asked of the model that has trained the demo."""


def generated(most_tokens: int, **exact_match: Any) -> dict[str, Any]:
    """An answer of the assistant, compared with that of the row."""
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{messages[0].content}}",
        "doc_to_target": "{{messages[1].content}}",
        "generation_kwargs": {"until": ["<|im_end|>"], "do_sample": False, "max_gen_toks": most_tokens},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, **exact_match}],
    }


CHOSEN = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{prompt}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
LAST_NUMBER = [{"function": "regex", "group_select": -1, "regex_pattern": NUMBER}, {"function": "take_first"}]
AS_GSM8K = [",", r"\$", r"(?s).*#### ", r"\.$"]
"""What lm-eval's own task gsm8k ignores of an answer, and of the expected one."""
TASKS = {
    "answers": Task({"exact_match": "exact_match"}, generated(60)),
    "choices": Task({"choice": "acc", "choice_norm": "acc_norm"}, CHOSEN, plain=True),
    "numbers": Task(
        {f"regex_last:{NUMBER}": "exact_match"},
        generated(160, regexes_to_ignore=AS_GSM8K) | {"filter_list": [{"name": "last-number", "filter": LAST_NUMBER}]},
        most_tokens=160,
        trained=False,
    ),
}


def measure(lm_eval: str, model: str, questions: Path, *, limit: int) -> dict[str, Any]:
    """The scores of both programs, and how far they are apart.

    Args:
        lm_eval: its command.
        model: folder of the model before training.
        questions: rows whose answers end in a number.
        limit: rows of each task, at most.
    """
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        before = in_fp32(model, work / "before")
        trained = train(before, work)
        data = {"answers": HELD_OUT, "choices": write_choices(work / "choices.jsonl"), "numbers": questions.resolve()}
        found: dict[str, Any] = {}
        for name, task in TASKS.items():
            folder = work / name
            folder.mkdir()
            asked = trained if task.trained else before
            ours = scored_here(task, asked, data[name], folder, limit)
            theirs, versions = scored_by_lm_eval(lm_eval, task, asked, data[name], folder, limit)
            found |= {
                score: {"task": name} | compared(ours, theirs, score, task.scores[score]) for score in task.scores
            }
    known = environment()
    return {
        "date": date.today().isoformat(),
        "hardware": {key: known["hardware"][key] for key in ("gpus", "cpus")},
        "packages": {name: known["packages"][name] for name in PACKAGES},
        "lm_eval": versions,
        "setup": {"model": Path(model).name, "precision": "fp32", "questions": questions.name},
        "scores": found,
    }


def finetune(*words: str | Path) -> None:
    """One command, as a user gives it."""
    if code := commands.main([str(word) for word in words]):
        sys.exit(code)


def in_fp32(model: str, folder: Path) -> Path:
    """A copy of the model in fp32, which both programs compute in the dtype that it has."""
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def train(model: Path, work: Path) -> Path:
    """The model after the demo's run, merged."""
    run, merged = work / "run", work / "merged"
    data: list[str | Path] = ["--data.train", DATA / "demo_train.jsonl", "--data.eval", HELD_OUT]
    shorter = ["--eval.exact_match", "false", "--eval.prompts", "0", "--mixed-precision", "no"]
    finetune("train", DEMO, "--model.path", model, "--train.output_dir", run, *data, *shorter)
    finetune("merge", run, "--output", merged, "--dtype", "fp32")
    return merged


def write_choices(path: Path) -> Path:
    """Each request of the demo with its answer among those to the three requests after it, at a place that changes."""
    rows = [row["messages"] for row in read(HELD_OUT)]
    lines = []
    for number, (request, _) in enumerate(rows):
        answers = list(dict.fromkeys(rows[(number + after) % len(rows)][1]["content"] for after in range(4)))
        place = number % len(answers)
        choices = [*answers[1 : place + 1], answers[0], *answers[place + 1 :]]
        lines.append({"prompt": f"Request: {request['content']}\nJSON:", "choices": choices, "answer": place})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scored_here(task: Task, model: Path, data: Path, folder: Path, limit: int) -> list[dict[str, Any]]:
    """What `finetune evaluate` writes of each row."""
    output = folder / "evaluated.jsonl"
    words = ["--limit", str(limit), "--max-new-tokens", str(task.most_tokens), *(["--plain"] if task.plain else [])]
    for score in task.scores:
        words += ["--score", score]
    finetune("evaluate", model, "--data", data, "--output", output, *words)
    return [row["evaluation"][0] for row in read(output)]


def scored_by_lm_eval(
    lm_eval: str, task: Task, model: Path, data: Path, folder: Path, limit: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What lm-eval logs of each row, in the order of the rows, and the versions that it names."""
    name = f"finetune_{folder.name}"  # no task of lm-eval's own
    where = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / "task.yaml").write_text(yaml.safe_dump({"task": name, **where, **task.definition}), encoding="utf-8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = [lm_eval, "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--tasks", name]
    command += ["--include_path", str(folder), "--device", device, "--batch_size", "8", "--limit", str(limit)]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    command += [] if task.plain else ["--apply_chat_template"]
    own = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    [logged] = (folder / "out").rglob("samples_*.jsonl")
    [summary] = (folder / "out").rglob("results_*.json")
    versions = json.loads(summary.read_text(encoding="utf-8"))
    rows = sorted(read(logged), key=lambda row: int(row["doc_id"]))
    return rows, {package: versions[f"{package}_version"] for package in ("lm_eval", "transformers")}


def compared(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], score: str, metric: str
) -> dict[str, int | float]:
    """One score of both programs: its mean, the rows where it differs, and what it was taken from."""
    pairs = [(row["scores"][score], float(other[metric])) for row, other in zip(ours, theirs, strict=True)]
    found: dict[str, int | float] = {
        "rows": len(pairs),
        "ours": sum(own for own, _ in pairs) / len(pairs),
        "lm_eval": sum(other for _, other in pairs) / len(pairs),
        "rows_scored_differently": sum(own != other for own, other in pairs),
    }
    if "answer" in ours[0]:
        texts = [(row["answer"], other["resps"][0][0].strip()) for row, other in zip(ours, theirs)]
        return found | {"answers_that_differ": sum(own != other for own, other in texts)}
    apart = [
        abs(own - float(other))
        for row, logged in zip(ours, theirs)
        for own, (other, _) in zip(row["log_probabilities"], logged["filtered_resps"], strict=True)
    ]
    return found | {"choices": len(apart), "largest_difference_nats": max(apart)}


def broken_bounds(results: dict[str, Any]) -> Iterator[str]:
    """Sentences on what differs."""
    for score, found in results["scores"].items():
        if found["rows_scored_differently"]:
            yield f"{score}: {found['rows_scored_differently']} rows have another score in lm-eval."
        if found.get("answers_that_differ"):
            yield f"{score}: {found['answers_that_differ']} answers are not those of lm-eval."
        if found.get("largest_difference_nats", 0) > BOUND:
            yield f"{score}: log-probabilities differ by {found['largest_difference_nats']:.1e} nats."


def table(results: dict[str, Any]) -> str:
    """Markdown: each score of both programs, and what differs."""
    lines = [
        "| score | rows | `finetune evaluate` | lm-eval | rows scored differently | compared too |",
        "|---" * 6 + "|",
    ]
    for score, found in results["scores"].items():
        if "choices" in found:
            beside = f"{found['choices']} log-probabilities: within {found['largest_difference_nats']:.0e} nats"
        else:
            beside = f"{found['rows']} answers: {found['answers_that_differ'] or 'none'} differ"
        values = f"{found['ours']:.1%} | {found['lm_eval']:.1%} | {found['rows_scored_differently'] or 'none'}"
        lines.append(f"| `{score}` | {found['rows']} | {values} | {beside} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", default="lm_eval", help="its command, in any environment")
    parser.add_argument("--model", help="folder of a model (default: the one of finetune.cli.demo_model)")
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        required=True,
        help="rows with messages whose answers end in a number, such as GSM8K's",
    )
    parser.add_argument("--limit", type=int, default=100, help="rows of each task, at most (default: 100)")
    args = parser.parse_args()
    if shutil.which(args.lm_eval) is None:  # before minutes of training
        parser.error(
            f"--lm-eval: there is no command {args.lm_eval}; install lm-eval, or give the path of its command."
        )
    if not args.questions.is_file():
        parser.error(f"--questions: there is no file {args.questions}.")
    results = measure(args.lm_eval, args.model or str(demo_model()), args.questions, limit=args.limit)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    if broken := list(broken_bounds(results)):
        sys.exit("\n".join(f"error: {sentence}" for sentence in broken))


if __name__ == "__main__":
    main()
