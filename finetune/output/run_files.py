"""What a run leaves in its output folder: run.yaml, metrics.jsonl and final/.

final/ takes its name last. Where it stands, all else that belongs to the run has been written.
"""

import errno
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.cache import flush, flush_all
from finetune.config.sections import Recipe
from finetune.errors import RunStopped
from finetune.models import adapter, loading, weights
from finetune.output.run_reading import line_of, read_metrics, read_run
from finetune.yaml_text import as_yaml

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "triton",
    "liger-kernel",
    "deepspeed",
    "tokenizers",
    "safetensors",
    "numpy",
)


def complete_metrics(folder: Path, step: int, metrics: Sequence[dict[str, Any]]) -> int:
    """Have each step up to this one stand in metrics.jsonl once, and none after it.

    Args:
        metrics: what the file may lack: whole lines, or figures of a line. Where both tell a figure, the file is right.

    Returns:
        Lines that could not be read; they are dropped.
    """
    lines, unread = read_metrics(folder)
    lines |= {line["step"]: line | lines.get(line["step"], {}) for line in metrics}
    kept = "".join(line_of(lines[known]) + "\n" for known in sorted(lines) if known <= step)
    _replace_text(folder / "metrics.jsonl", kept)
    return unread


def go_back_to(folder: Path, step: int, metrics: Sequence[dict[str, Any]], *, reads_on: bool) -> list[str]:
    """Bring the records of a run to where it stood after a step.

    Args:
        metrics: lines that may not have been written yet when the step's checkpoint was.
        reads_on: whether the run has steps left. It reads its data again, and tells again what it rejects.

    Returns:
        A line about each record that was damaged.
    """
    if reads_on:
        (folder / "rejected.jsonl").unlink(missing_ok=True)
    unread = complete_metrics(folder, step, metrics)
    lines = "1 line" if unread == 1 else f"{unread} lines"
    told = [f"{folder / 'metrics.jsonl'}: {lines} could not be read and were dropped"] if unread else []
    if (folder / "run.yaml").exists() and not read_run(folder):
        told.append(f"{folder / 'run.yaml'} could not be read and is rewritten")
    return told


def identity_of_run(folder: Path) -> dict[str, Any]:
    """The id of the run in a folder, and the launcher that it was started by; empty where there is none."""
    run = read_run(folder)
    return {key: run[key] for key in ("id", "launcher") if key in run}


def finished_run(folder: Path) -> dict[str, Any]:
    """The record of the run in this folder, if its own result is in final/; else empty."""
    result = read_run(folder / "final")
    return result if "id" in result and result["id"] == identity_of_run(folder).get("id") else {}


def finished_steps(folder: Path) -> int:
    """Optimizer steps that the run in this folder has made, if its own result is in final/; else 0."""
    return steps_of(finished_run(folder))


def steps_of(result: dict[str, Any]) -> int:
    """Optimizer steps that a finished run has made, by its record; 0 for none."""
    return int(result.get("stopped", {}).get("after_step") or result.get("steps", 0))


def write_run(folder: Path, run: dict[str, Any]) -> None:
    """Write run.yaml: the old one or the new one is there at any instant, never half of one."""
    _replace_text(folder / "run.yaml", as_yaml(run))


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    flush(temporary)
    temporary.replace(path)


class Journal:
    """A file of lines that grows with the run. While it cannot be written its lines wait, and the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []
        self._told = False

    def append(self, lines: Iterable[str]) -> list[str]:
        """Add lines, after those that wait. No file is made without one.

        Returns:
            A sentence, when the file cannot be written and could be before.
        """
        self._waiting += lines
        if not self._waiting:
            return []
        try:
            _append("".join(line + "\n" for line in self._waiting).encode(), self.path)
        except OSError as error:
            why = error.strerror or error
            reason = f"{self.path} cannot be written ({why}); its lines are kept in memory, and training continues"
            sentences, self._told = [] if self._told else [reason], True
            return sentences
        self._waiting, self._told = [], False
        return []

    def close(self) -> list[str]:
        """Try once more to add the lines that wait; returns a sentence if they are lost."""
        self.append([])
        return [f"{self.path} is missing its last {len(self._waiting)} lines, which could not be written"] * bool(
            self._waiting
        )


def _append(content: bytes, path: Path) -> None:
    """Add all of it to a file, or nothing."""
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


@functools.cache  # what runs is what was imported
def environment() -> dict[str, Any]:
    """Versions, hardware and the state of the code, for run.yaml. Not to be changed."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "hardware": {"gpus": gpus, "cpus": os.cpu_count(), "machine": platform.platform()},
        "git_commit": _git_commit(),
    }


def _version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the code that runs, with ``+changes`` where the tree has some; None outside of its repository."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    if shutil.which("git") is None:
        return None
    known = subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if known.returncode or head.returncode:  # it may be another project's, in which this one is installed
        return None
    changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    return head.stdout.strip() + ("+changes" if changes else "")


def model_card(base: str, run: dict[str, Any], metrics: dict[str, Any]) -> str:
    """The README.md of final/: what it was made from and how."""
    of_last = "not finite" if metrics["loss"] is None else f"{metrics['loss']:.4f}"
    loss = f"- loss of the last step: {of_last}\n"
    if metrics.get("eval_loss") is not None and "eval_loss" in run:
        loss += f"- held-out loss: {run['eval_loss']['before']:.4f} before, {metrics['eval_loss']:.4f} after training\n"
    if "exact_match" in run:
        loss += f"- {describe_exact_match(run['exact_match'])}\n"
    loss += "".join(f"- {line}\n" for line in describe_tasks(run.get("tasks", {})))
    if decay := run["config"]["train"].get("ema_decay"):  # older runs have no such key
        loss += f"- weights: exponential moving average, decay {decay:g}\n"
    is_random = run["config"]["model"].get("random_weights", False)  # older runs have no such key
    is_adapter = run["config"]["adapter"]["type"] != "none"
    own = [name for name in run["config"] if name not in Recipe.model_fields] or ["sft"]  # a recipe's own section
    tags = ", ".join([*own, "lora"] if is_adapter else own)
    library = "peft" if is_adapter else "transformers"
    start = run["config"]["adapter"].get("init", "default")  # older runs have no such key
    twice = (
        f"- adapter: it began as {start}, and is an ordinary LoRA adapter of the base, of twice the configured rank\n"
        if start in ("pissa", "olora")
        else ""
    )
    return (
        f"---\nbase_model: {base}\nlibrary_name: {library}\ntags: [{tags}]\n---\n\n"
        f"# {'Trained from random weights of the shape of' if is_random else 'Fine-tuned from'} {Path(base).name}\n\n"
        f"- optimizer steps: {metrics['step']}\n{twice}{loss}"
        f"- strategy: {run['strategy']['name']} on {run['strategy']['processes']} process(es), "
        f"precision {run['strategy']['precision']}\n\n{_answers(run.get('answers', []))}"
        f"{_with_new_tokens(run['config']['model'], run['new_tokens']) if is_adapter and 'new_tokens' in run else ''}"
        f"## Configuration\n\n```yaml\n{yaml.safe_dump(run['config'], sort_keys=False)}```\n"
    )


def _with_new_tokens(model: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """A section of the model card: how to load the adapter by hand, onto a base whose vocabulary has to grow."""
    pinned = f", revision={model['revision']!r}" if model["revision"] else ""
    known, end, rows, grows = new["rows_of_base"], new["trained_rows"][-1] + 1, new["rows"], ""
    if rows > known:
        grows = f"model.resize_token_embeddings({rows}, mean_resizing=False)\n"
    if grows and rows > end:
        grows += (
            "head = model.get_output_embeddings().weight.data\n"
            f"head[{end}:] = head[:{known}].mean(0)  # rows of no token, as in training; else they are random\n"
        )
    return (
        f"## Loading\n\nThe chat template added {', '.join(new['tokens'])} to the tokenizer; the adapter has their "
        "embeddings.\n\n```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({model['path']!r}{pinned})\n{grows}"
        'model = PeftModel.from_pretrained(model, "DIR")  # this folder\n```\n\n'
    )


def _answers(answered: Sequence[Mapping[str, str]]) -> str:
    """A section of the model card; whatever the texts say, they stay texts."""
    told = [f"{column}:\n\n{_fenced(each[column])}\n" for each in answered for column in each]
    return "## Answers before and after training\n\n" + "\n".join(told) + "\n" if told else ""


def _fenced(text: str) -> str:
    """A block of code around a text, whose fence is longer than any that the text has."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def describe_exact_match(found: Mapping[str, Any]) -> str:
    """The entry of run.yaml as a line: how many held-out answers are right word for word."""
    rows, before = found["rows"], found["before"]
    was = "not asked" if before is None else f"{round(rows * before):,}"
    return f"exact match on {rows:,} held-out rows: {was} before, {round(rows * found['after']):,} after training"


def describe_tasks(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The scores of eval.tasks in run.yaml as lines."""
    return [
        f"{name} ({task['score']}, {task['rows']:,} rows): "
        + ("" if task["before"] is None else f"{task['before']:.1%} before, ")
        + f"{task['after']:.1%} after training"
        for name, task in found.items()
    ]


def save_final(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    parameters: Iterable[tuple[str, torch.Tensor]],
    working: Iterable[tuple[str, torch.Tensor]],
    *,
    adapter_alone: bool,
    shapes: Mapping[str, tuple[int, ...]],
    beginning: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    dtypes: Mapping[str, torch.dtype],
    card: str | None,
    record: dict[str, Any],
) -> None:
    """Write run.yaml, and final/: the model as transformers loads it, or its adapter as PEFT does; complete or absent.

    Every process calls it and runs through both iterables, whose gathering is collective; the main process,
    which alone has a ``card``, writes. An adapter is read back and held against the model before it takes its place.

    Args:
        parameters: name and whole value of each trained parameter (its master, where there is one), and of all others
            that belong to the model that is saved.
        working: the trained ones as the model computes with them.
        adapter_alone: save the adapter, not the model.
        shapes: of each trained parameter.
        beginning: of an adapter, what ``adapter_start.start`` returned.
        dtype: of a saved model, by its config.json.
        dtypes: of its weights, each rounded once from the trained one. An adapter is saved as it was trained.
        card: text of the model card; None on the other processes.
        record: the run's, as in run.yaml: it goes with the result.

    Raises:
        RunStopped: if what was written is not what was trained, or nothing could be written.
    """
    temporary = folder / "final.tmp"
    state = {}
    for name, value in parameters:
        if card is not None:
            state[name] = value.to(device="cpu", dtype=value.dtype if adapter_alone else dtypes[name], copy=True)
    if card is not None:
        try:
            write_run(folder, record)  # before final/, whose name stands for a run that is finished
            shutil.rmtree(temporary, ignore_errors=True)
            if adapter_alone:
                adapter.save(temporary, model, state, beginning=beginning)
            else:
                state |= {name: each.to("cpu") for name, each in weights.saved_buffers(model).items()}
                model.save_pretrained(temporary, state_dict=state)
                model.config.dtype = dtype  # save_pretrained has written that of the model in memory
                model.config.save_pretrained(temporary)
            loading.save_tokenizer(tokenizer, temporary)
            (temporary / "README.md").write_text(card, encoding="utf-8")
            write_run(temporary, record)
            flush_all(temporary)  # before it takes the name that stands for a finished run
        except (OSError, SafetensorError) as error:
            raise RunStopped(
                f"{folder / 'final'} could not be written ({error}); free some space, and resume from the newest "
                "checkpoint with --checkpoint.resume auto."
            ) from error
    if adapter_alone and card is not None:
        adapter.verify(temporary, model, shapes, working, beginning=beginning)
    elif adapter_alone:
        for _ in working:
            pass
    if card is not None:
        try:
            replace(temporary, folder / "final")
        except OSError as error:
            raise RunStopped(
                f"{temporary} is complete, but could not be renamed to final ({error.strerror or error}); rename it."
            ) from error


def replace(temporary: Path, final: Path) -> None:
    """Put a complete folder in the place of an earlier one, which is there until then."""
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)
