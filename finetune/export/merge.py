"""An adapter merged into its base: a model that needs no PEFT, checked on real text before it is left.

The merged model is written beside its folder, read back and held against base and adapter as they were trained, and
only then takes its place: the folder is complete or absent. One model is in memory at a time, in the dtype of its
weights. After training on 8-bit weights the difference is more than rounding, because activations were in 8 bits there
as well.
"""

import gc
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from finetune.distributed import prepare_import
from finetune.errors import InputError, RunStopped, refuse_if_any
from finetune.export import adapted_model, adapter_source, comparison
from finetune.export.adapter_source import AdapterSource
from finetune.export.comparison import Difference, Text
from finetune.models import loading as models
from finetune.models import quantization
from finetune.units import GIB

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EQUAL_KL, LARGEST_KL, LARGEST_KL_8_BIT = 1e-6, 0.05, 0.25
"""Nats per token: what is no difference, what rounding may make, and what it may after LLM.int8, which rounds inputs.
On SmolLM2-135M: 1e-11 for a merge in fp32, 8e-5 in bf16, 0.01 to 0.09 after 8 bits."""
DISK_MARGIN = 1.05
"""Tokenizer and configuration lie beside the weights."""


def merge(
    path: Path,
    folder: Path,
    *,
    base_model: str | None = None,
    bits: int | None = None,
    base: str | None = None,
    dtype: str = "bf16",
    text_file: Path | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Merge an adapter and leave a model in ``folder``.

    Args:
        path: output folder of a run, or folder of an adapter.
        base_model: folder or hub id of the base, where it is not the one that the adapter names.
        bits: 4 or 8, that the base was quantised to, where no run.yaml tells.
        base: ``dequantized`` (the weights that an adapter of a quantised base was trained against; the default for
            these) or ``original`` (the weights before quantisation).
        dtype: of the merged model, ``bf16`` or ``fp32``.
        text_file: to compare on, in place of the run's own data.
        say: shows a line about what is being done.

    Returns:
        What was merged and measured, for JSON.

    Raises:
        InputError: for what can be put right, before weights load.
        RunStopped: if the merged model is another one than base and adapter; nothing is left then.
    """
    models.quiet()
    prepare_import()  # transformers imports DeepSpeed, where it is installed, when it saves
    start, out = time.perf_counter(), DTYPES[dtype]
    refuse_if_any(output_problems(folder))
    source = adapter_source.read(path, base_model=base_model, bits=bits)
    onto = base or ("dequantized" if source.bits else "original")
    refuse_if_any(onto_problems(source, onto))
    parameters = models.without_weights(source.config, False).num_parameters()
    refuse_if_any(disk_problems(folder, parameters * out.itemsize))
    tokenizer = load_tokenizer(source)
    text = comparison.choose_text(
        tokenizer,
        text_file=text_file,
        entries=source.sources,
        settings=source.settings,
        vocabulary=source.config.get_text_config().vocab_size,
    )

    say(f"Adapter {source.folder} on {source.base} ({kind(source)}): computing {text.tokens:,} tokens ...")
    before = list(comparison.logits(adapted_model.load_as_trained(source), text))
    gc.collect()  # PEFT's modules know each other
    temporary = temporary_folder(folder)
    temporary.mkdir(parents=True)
    try:
        say(f"Merging onto the {'dequantised' if onto == 'dequantized' else 'original'} weights ...")
        adapted_model.load_merged(source, dequantized=onto == "dequantized", dtype=out).save_pretrained(temporary)
        gc.collect()
        tokenizer.save_pretrained(temporary)
        say("Reading the merged model back ...")
        saved = AutoModelForCausalLM.from_pretrained(temporary, dtype=out, use_safetensors=True)
        difference = comparison.compare(before, comparison.logits(adapted_model.on_device(saved), text))
        result = {
            "folder": str(folder),
            "adapter": str(source.folder),
            "base": source.base,
            "bits": source.bits,
            "onto": onto,
            "dtype": dtype,
            "parameters": saved.num_parameters(),
            "seconds": round(time.perf_counter() - start, 1),
            "text": text.name,
            "difference": asdict(difference),
            "verdict": verdict(difference, source.bits),
            "includes": included(source, onto),
        }
        check(difference, text, source, onto, folder)
        (temporary / "README.md").write_text(model_card(result), encoding="utf-8")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # it is gone, if it has taken its place
    return result


def output_problems(folder: Path) -> list[str]:
    """Why nothing may be written to this folder, as sentences."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return [f"--output {folder} is there already, and is no empty folder; name another one."]
    if temporary_folder(folder).exists():
        return [
            f"{temporary_folder(folder)} is there already, left by a merge that was killed, or of one that is at work; "
            "remove it, or name another --output."
        ]
    parent = _existing_parent(folder)
    if not os.access(parent, os.W_OK):
        return [f"--output: {parent} cannot be written to; name another folder."]
    return []


def temporary_folder(folder: Path) -> Path:
    """Where the model is written before it takes its place."""
    return folder.absolute().with_name(folder.absolute().name + ".tmp")


def disk_problems(folder: Path, weight_bytes: int) -> list[str]:
    """Whether the merged model has room on its disk."""
    needed, free = weight_bytes * DISK_MARGIN, shutil.disk_usage(_existing_parent(folder)).free
    if needed <= free:
        return []
    return [
        f"--output {folder} needs {needed / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free on its disk; make "
        "room, or name a folder on another disk."
    ]


def _existing_parent(folder: Path) -> Path:
    return next(parent for parent in folder.absolute().parents if parent.exists())


def onto_problems(source: AdapterSource, onto: str) -> list[str]:
    """Why the adapter cannot be merged onto these weights, as sentences."""
    if onto == "dequantized" and not source.bits:
        return [
            "--base dequantized: nothing says that this adapter was trained on quantised weights; leave --base out, "
            "or add --bits 4 (or 8) if it was, and its run.yaml is lost."
        ]
    if onto == "original" and quantization.stored_bits(source.config):
        return [
            f"--base original: {source.base} is published in {source.bits} bits, without its original weights; leave "
            f"--base out, or name the 16-bit model with --base-model and add --bits {source.bits}."
        ]
    return []


def load_tokenizer(source: AdapterSource) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved with the adapter, else the base's.

    Raises:
        InputError: if there is none.
    """
    own = (source.folder / "tokenizer_config.json").is_file()
    path, revision = (str(source.folder), None) if own else (source.base, source.revision)
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"No tokenizer could be loaded from {path} ({str(error).splitlines()[0]}); put its files into the "
            f"adapter's folder, {source.folder}."
        ) from error


def kind(source: AdapterSource) -> str:
    """What the adapter was trained on, in words."""
    return f"quantised to {source.bits} bits" if source.bits else "not quantised"


def largest_kl(bits: int | None) -> float:
    """Nats per token that rounding may make, after training on weights of so many bits."""
    return LARGEST_KL_8_BIT if bits == 8 else LARGEST_KL


def verdict(difference: Difference, bits: int | None) -> str:
    """What a difference means: ``equal``, ``rounded`` or ``different``."""
    if difference.mean_kl <= EQUAL_KL:
        return "equal"
    return "rounded" if difference.mean_kl <= largest_kl(bits) else "different"


def included(source: AdapterSource, onto: str) -> str | None:
    """What the difference holds beside the rounding of the merged weights."""
    stored = models.stored_dtype(source.config)
    if source.bits and onto == "original":
        return f"the error of the base's {source.bits}-bit weights, which the adapter saw"
    if source.bits == 8:
        return "the error of 8-bit activations, which the merged model has not"
    if not source.bits and stored.itemsize > source.dtype.itemsize:
        return f"the rounding of the base's {stored} weights to {source.dtype}, which the adapter saw".replace(
            "torch.", ""
        )
    return None


def check(difference: Difference, text: Text, source: AdapterSource, onto: str, folder: Path) -> None:
    """Refuse a merged model that is not base and adapter.

    Raises:
        RunStopped: with the figures. Onto the original weights of a quantised base only what is no number is refused.
    """
    limit = largest_kl(source.bits)
    if difference.mean_kl <= (float("inf") if source.bits and onto == "original" else limit):
        return
    raise RunStopped(
        f"The merged model is not the adapted one: mean KL divergence {difference.mean_kl:.3g} nats per token (at most "
        f"{limit} is rounding), largest difference of a logit {difference.largest_logit:.3g}, most likely token "
        f"the same after {100 * difference.agreement:.1f} % of {difference.tokens:,} tokens of {text.name}. Nothing "
        f"was left at {folder}. Merge with --dtype fp32: if that helps, bf16 is too coarse for this adapter; else "
        "use the adapter unmerged, with PEFT, and report its figures."
    )


def describe(result: dict[str, Any]) -> str:
    """The result for a person; lines without paths have less than 80 columns."""
    return (
        f"The merged model lies in {result['folder']}\n"
        f"  {result['parameters']:,} parameters in {result['dtype']}, {result['seconds']} s\n{_measured(result)}"
    )


def _measured(result: dict[str, Any]) -> str:
    meaning = {
        "equal": f"the same model (at most {EQUAL_KL} nats per token apart).",
        "rounded": f"the same model up to rounding (at most {largest_kl(result['bits'])} nats per token apart).",
        "different": "another model than was trained; evaluate it before use.",
    }
    lines = [
        f"Against base and adapter as trained, over {result['difference']['tokens']:,} tokens of {result['text']}:",
        Difference(**result["difference"]).table(),
        f"Verdict: {meaning[result['verdict']]}",
    ]
    if result["includes"]:
        lines.append(f"The difference includes {result['includes']}.")
    return "\n".join(lines)


def model_card(result: dict[str, Any]) -> str:
    """The README.md of the merged model: what it was made from, and how far it is from that."""
    onto = f"its weights dequantised from {result['bits']} bits" if result["onto"] == "dequantized" else "its weights"
    return (
        f"---\nbase_model: {result['base']}\nlibrary_name: transformers\ntags: [sft, merged]\n---\n\n"
        f"# {Path(result['base']).name} with an adapter merged\n\n"
        f"- base: {result['base']}, {onto}\n- adapter: {result['adapter']}\n- dtype: {result['dtype']}\n\n"
        f"## Difference\n\n```\n{_measured(result)}\n```\n"
    )
