"""What a run leaves in its output folder: run.yaml, metrics.jsonl and final/."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "tokenizers", "safetensors", "numpy")
OURS = ("run.yaml", "metrics.jsonl", "final")


def problems(folder: Path, overwrite: bool) -> list[str]:
    """Why a run may not write into this folder, as sentences. Creates and removes nothing."""
    if folder.exists() and not folder.is_dir():
        return [f"train.output_dir: {folder} is a file; name a folder."]
    held = [name for name in OURS if (folder / name).exists()]
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
    """Create the folder; remove the files of an earlier run there, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in OURS:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write_run(folder: Path, run: dict[str, Any]) -> None:
    """Write run.yaml: the old one or the new one is there at any instant, never half of one."""
    temporary = folder / "run.yaml.tmp"
    temporary.write_text(yaml.safe_dump(run, sort_keys=False, allow_unicode=True), encoding="utf-8")
    temporary.replace(folder / "run.yaml")


def append_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    """Add one optimizer step to metrics.jsonl."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


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
    return (
        f"---\nbase_model: {base}\nlibrary_name: transformers\ntags: [sft]\n---\n\n"
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
    *,
    dtype: torch.dtype,
    card: str | None,
) -> None:
    """Write final/: a model folder that transformers loads, complete or absent.

    Every process calls it and runs through ``parameters``, whose gathering is collective; the main process,
    which alone has a ``card``, writes.

    Args:
        parameters: name and whole value of each parameter.
        dtype: of the saved weights, rounded once from the trained ones.
        card: text of the model card; None on the other processes.
    """
    state = {}
    for name, value in parameters:
        if card is not None:
            state[name] = value.to(device="cpu", dtype=dtype, copy=True)
    if card is None:
        return
    temporary = folder / "final.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model.config.dtype = dtype
    model.save_pretrained(temporary, state_dict=state)
    tokenizer.save_pretrained(temporary)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    temporary.replace(folder / "final")
