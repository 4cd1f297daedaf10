"""What a run leaves in its output folder: run.yaml, metrics.jsonl and final/."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import adapter

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "tokenizers",
    "safetensors",
    "numpy",
)
RECORDS = ("run.yaml", "metrics.jsonl", "rejected.jsonl")


def problems(folder: Path, overwrite: bool) -> list[str]:
    """Why a run may not write into this folder, as sentences. Creates and removes nothing."""
    if folder.exists() and not folder.is_dir():
        return [f"train.output_dir: {folder} is a file; name a folder."]
    held = [name for name in (*RECORDS, "final") if (folder / name).exists()]
    if held and not overwrite:
        return [
            f"train.output_dir: {folder} holds a run already ({', '.join(held)}); name another folder, or replace that "
            "run with --train.overwrite true."
        ]
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        return [f"train.output_dir: {parent} cannot be written to; name another folder."]
    return []


def prepare_folder(folder: Path) -> None:
    """Create the folder; remove the records of an earlier run there. Its final/ stays until the new one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in RECORDS:
        (folder / name).unlink(missing_ok=True)


def write_run(folder: Path, run: dict[str, Any]) -> None:
    """Write run.yaml: the old one or the new one is there at any instant, never half of one."""
    temporary = folder / "run.yaml.tmp"
    temporary.write_text(yaml.safe_dump(run, sort_keys=False, allow_unicode=True), encoding="utf-8")
    temporary.replace(folder / "run.yaml")


def append_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    """Add one optimizer step to metrics.jsonl."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def append_rejected(folder: Path, lines: Iterable[str]) -> None:
    """Add records that are not trained to rejected.jsonl, each a line of JSON; no file without a line."""
    remaining = iter(lines)
    for first in remaining:
        with (folder / "rejected.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in chain([first], remaining))


def environment() -> dict[str, Any]:
    """Versions, hardware and the state of the code, for run.yaml."""
    installed = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in installed},
        "hardware": {"gpus": gpus, "cpus": os.cpu_count(), "machine": platform.platform()},
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    """Commit of the code that runs, with ``+changes`` where the tree has some; None outside a repository."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    if shutil.which("git") is None:
        return None
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode != 0:
        return None
    changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    return head.stdout.strip() + ("+changes" if changes else "")


def model_card(base: str, run: dict[str, Any], metrics: dict[str, Any]) -> str:
    """The README.md of final/: what it was made from and how."""
    loss = f"- loss of the last step: {metrics['loss']:.4f}\n"
    if "eval_loss" in metrics:
        loss += f"- held-out loss: {run['eval_loss']['before']:.4f} before, {metrics['eval_loss']:.4f} after training\n"
    is_adapter = run["config"]["adapter"]["type"] != "none"
    kind = "library_name: peft\ntags: [sft, lora]" if is_adapter else "library_name: transformers\ntags: [sft]"
    return (
        f"---\nbase_model: {base}\n{kind}\n---\n\n"
        f"# Fine-tuned from {Path(base).name}\n\n"
        f"- optimizer steps: {metrics['step']}\n{loss}"
        f"- strategy: {run['strategy']['name']} on {run['strategy']['processes']} process(es), "
        f"precision {run['strategy']['precision']}\n\n"
        f"## Configuration\n\n```yaml\n{yaml.safe_dump(run['config'], sort_keys=False)}```\n"
    )


def save_final(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    parameters: Iterable[tuple[str, torch.Tensor]],
    working: Iterable[tuple[str, torch.Tensor]],
    *,
    adapter_alone: bool,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    card: str | None,
    record: dict[str, Any],
) -> None:
    """Write final/: the model as transformers loads it, or its adapter as PEFT does; complete or absent.

    Every process calls it and runs through both iterables, whose gathering is collective; the main process,
    which alone has a ``card``, writes. An adapter is read back and held against the model before it takes its place.

    Args:
        parameters: name and whole value of each trained parameter (its master, where there is one).
        working: the same as the model computes with them.
        adapter_alone: save the adapter, not the model.
        shapes: of each trained parameter.
        dtype: of a saved model's weights, rounded once from the trained ones. An adapter is saved as it was trained.
        card: text of the model card; None on the other processes.
        record: the run's, as in run.yaml: it goes with the result.

    Raises:
        RunStopped: if what was written is not what was trained.
    """
    temporary = folder / "final.tmp"
    state = {}
    for name, value in parameters:
        if card is not None:
            state[name] = value.to(device="cpu", dtype=value.dtype if adapter_alone else dtype, copy=True)
    if card is not None:
        shutil.rmtree(temporary, ignore_errors=True)
        if adapter_alone:
            adapter.save(temporary, model, state)
        else:
            model.config.dtype = dtype
            model.save_pretrained(temporary, state_dict=state)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        write_run(temporary, record)
    if adapter_alone and card is not None:
        adapter.verify(temporary, model, shapes, working)
    elif adapter_alone:
        for _ in working:
            pass
    if card is not None:
        replace(temporary, folder / "final")


def replace(temporary: Path, final: Path) -> None:
    """Put a complete folder in the place of an earlier one, which is there until then."""
    old = final.with_name(final.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)
