"""Merges an adapter into its base: the result needs no PEFT, and is checked on real text before it is kept.

The merged model is written to a temporary folder, read back, and compared with base and adapter as they were trained.
Only then it gets its final name: the folder is complete or absent. One model is in memory at a time, in the dtype of
its weights. What rounding alone does is measured too, by rounding the weights of the unmerged model while it computes;
a merge that differs by more is wrong. After training on 8-bit weights this cannot be told, because activations were in
8 bits too.
"""

import gc
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from finetune.data.template_process import end_of_turn
from finetune.distributed import prepare_import
from finetune.errors import InputError, RunStopped, refuse_if_any
from finetune.export import adapted_model, adapter_source, comparison, new_folder
from finetune.export.adapter_source import AdapterSource
from finetune.export.comparison import Difference
from finetune.models import generation_settings, packing_support, quantization
from finetune.models import loading as models
from finetune.units import GIB

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EQUAL_KL, LARGEST_KL, LARGEST_KL_8_BIT = 1e-6, 0.05, 0.25
"""Nats per token: limits for an equal model, for rounding, and for rounding after LLM.int8, which rounds inputs.
On SmolLM2-135M: 1e-11 for a merge in fp32, 8e-5 in bf16, 0.01 to 0.09 after 8 bits."""
NOISE_KL, OF_ROUNDING = 1e-4, 2.0
"""Nats per token that the order of sums may make in a large model, and how often what rounding alone makes."""
_ADVICE = (
    "Merge with --dtype fp32: if that helps, bf16 is too coarse for this adapter; otherwise use the adapter unmerged, "
    "with PEFT, and report these figures."
)
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
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Merge an adapter and write the model to ``folder``.

    Args:
        path: output folder of a run, or folder of an adapter.
        base_model: folder or hub id of the base, if it is not the one that the adapter names.
        bits: 4 or 8, the bits of the quantised base, if there is no run.yaml.
        base: ``dequantized`` (the weights that an adapter of a quantised base was trained on; the default for
            these) or ``original`` (the weights before quantisation).
        dtype: of the merged model, ``bf16`` or ``fp32``.
        text_file: to compare on, instead of the run's own data.
        trust_remote_code: run the code that comes with the base.
        say: shows a line of progress.

    Returns:
        What was merged and measured, for JSON.

    Raises:
        InputError: for wrong input, before weights load.
        RunStopped: if the merged model differs from base and adapter, or cannot be written; nothing is left then.
    """
    models.quiet()
    prepare_import()  # transformers imports DeepSpeed, where it is installed, when it saves
    start, out = time.perf_counter(), DTYPES[dtype]
    refuse_if_any(new_folder.problems(folder))
    source = adapter_source.read(path, base_model=base_model, bits=bits, trust_remote_code=trust_remote_code)
    onto = base or ("dequantized" if source.bits else "original")
    refuse_if_any(onto_problems(source, onto))
    parameters = models.without_weights(source.config, trust_remote_code).num_parameters()
    refuse_if_any(disk_problems(folder, parameters * out.itemsize))
    tokenizer = load_tokenizer(source)
    text = comparison.choose_text(
        tokenizer,
        text_file=text_file,
        entries=source.sources,
        settings=source.settings,
        vocabulary=source.config.get_text_config().vocab_size,
    )

    for note in source.notes:
        say(note)
    say(f"Adapter {source.folder} on {source.base} ({kind(source)}): computing {text.tokens:,} tokens ...")
    trained = adapted_model.load_as_trained(source)
    before = list(comparison.logits(trained, text))
    rounding = None
    if out.itemsize < torch.float32.itemsize and source.bits != 8:
        rounding = _kl_of_rounding(trained, out, before, text)
    del trained
    gc.collect()  # PEFT's modules know each other
    temporary = new_folder.temporary_of(folder)
    with _writing(folder):
        temporary.mkdir(parents=True)
    try:
        say(f"Merging onto the {'dequantised' if onto == 'dequantized' else 'original'} weights ...")
        merged = adapted_model.load_merged(source, dequantized=onto == "dequantized", dtype=out)
        generation_settings.stop_at(merged, tokenizer.eos_token_id, end_of_turn(tokenizer))
        with _writing(folder):
            merged.save_pretrained(temporary)
            models.save_tokenizer(tokenizer, temporary)
        del merged
        gc.collect()
        say("Reading the merged model back ...")
        saved = _read_back(temporary, out, source)
        difference = comparison.compare(before, comparison.logits(adapted_model.on_device(saved), text))
        limit = largest_kl(source, onto, rounding)
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
            "rounding_kl": rounding,
            "verdict": verdict(difference, limit),
            "includes": included(source, onto),
        }
        if verdict(difference, limit) == "different" and not (source.bits and onto == "original"):
            raise RunStopped(f"{sentence(result)} {_ADVICE} Nothing was written to {folder}.")
        with _writing(folder):
            (temporary / "README.md").write_text(model_card(result), encoding="utf-8")
            new_folder.put_in_place(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # it is gone, if it has taken its place
    return result


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunStopped(
            f"--output {folder} could not be written ({error}); free some space, or choose a folder on another disk. "
            "Nothing was left there."
        ) from error


def disk_problems(folder: Path, weight_bytes: int) -> list[str]:
    """Whether there is disk space for the merged model."""
    needed, free = weight_bytes * DISK_MARGIN, shutil.disk_usage(new_folder.existing_parent(folder)).free
    if needed <= free:
        return []
    return [
        f"--output {folder} needs {needed / GIB:.2f} GiB, but {free / GIB:.2f} GiB are free on its disk; free some "
        "space, or choose a folder on another disk."
    ]


def onto_problems(source: AdapterSource, onto: str) -> list[str]:
    """Why the adapter cannot be merged onto these weights, as sentences."""
    if onto == "dequantized" and not source.bits:
        return [
            "--base dequantized: this adapter has no record of training on quantised weights; leave --base out, "
            "or add --bits 4 (or 8) if it was trained so and its run.yaml is lost."
        ]
    if onto == "original" and quantization.stored_bits(source.config):
        return [
            f"--base original: {source.base} is published in {source.bits} bits, without its original weights; leave "
            f"--base out, or give the 16-bit model with --base-model and add --bits {source.bits}."
        ]
    return []


def _kl_of_rounding(trained: Any, dtype: torch.dtype, before: Sequence[torch.Tensor], text: comparison.Text) -> float:
    """What rounding the weights alone costs."""
    with adapted_model.rounding_to(trained, dtype):
        return comparison.compare(before, comparison.logits(trained, text)).mean_kl


def _read_back(folder: Path, dtype: torch.dtype, source: AdapterSource) -> Any:
    """The merged model, with the attention that the model has with its adapter."""
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=source.trust_remote_code,
        attn_implementation="eager" if packing_support.caps_scores(source.config) else None,
    )


def load_tokenizer(source: AdapterSource) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved with the adapter, else the base's.

    Raises:
        InputError: if there is none.
    """
    own = (source.folder / "tokenizer_config.json").is_file()
    path, revision = (str(source.folder), None) if own else (source.base, source.revision)
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError) as error:
        raise InputError(
            f"No tokenizer could be loaded from {path} ({str(error).splitlines()[0]}); copy its files to the "
            f"adapter's folder, {source.folder}."
        ) from error


def kind(source: AdapterSource) -> str:
    """What the adapter was trained on, in words."""
    return f"quantised to {source.bits} bits" if source.bits else "not quantised"


def largest_kl(source: AdapterSource, onto: str, rounding: float | None) -> float:
    """Most nats per token by which a right merge may differ.

    Args:
        rounding: nats per token that rounding alone makes; None where it is not known, or nothing is rounded.
    """
    if source.bits == 8:
        return LARGEST_KL_8_BIT
    if source.bits and onto == "original":  # the error of the quantised weights, which the adapter saw, is in it
        return LARGEST_KL
    return min(LARGEST_KL, max(NOISE_KL, OF_ROUNDING * (rounding or 0.0)))


def verdict(difference: Difference, limit: float) -> str:
    """The meaning of a difference: ``equal``, ``rounded`` or ``different``."""
    if difference.mean_kl <= EQUAL_KL:
        return "equal"
    return "rounded" if difference.mean_kl <= limit else "different"


def sentence(result: dict[str, Any]) -> str:
    """Whether the merged model is the one that was trained, with what rounding makes of the difference."""
    answers = "does not answer" if result["verdict"] == "different" else "answers"
    by_rounding = (
        ""
        if result["rounding_kl"] is None
        else (f", of which {result['dtype']} rounding alone makes {result['rounding_kl']:.2g}")
    )
    apart = f"{result['difference']['mean_kl']:.2g} nats per token apart"
    return f"The merged model {answers} as the adapter did: {apart}{by_rounding}."


def included(source: AdapterSource, onto: str) -> str | None:
    """What the difference includes beside the rounding of the merged weights."""
    if source.bits and onto == "original":
        return f"the error of the base's {source.bits}-bit weights, which the adapter saw"
    if source.bits == 8:
        return "the error of 8-bit activations, which the merged model does not have"
    return None


def describe(result: dict[str, Any]) -> str:
    """The result as text; lines without paths have less than 80 columns."""
    return (
        f"Merged model: {result['folder']}\n"
        f"  {result['parameters']:,} parameters in {result['dtype']}, {result['seconds']} s\n{_measured(result)}"
    )


def _measured(result: dict[str, Any]) -> str:
    lines = [
        f"Compared with base and adapter as trained, over {result['difference']['tokens']:,} tokens of "
        f"{result['text']}:",
        Difference(**result["difference"]).table(),
        textwrap.fill(sentence(result), 79),
    ]
    if result["includes"]:
        lines.append(f"The difference includes {result['includes']}.")
    return "\n".join(lines)


def model_card(result: dict[str, Any]) -> str:
    """The README.md of the merged model: its sources, and how much it differs from them."""
    onto = f"its weights dequantised from {result['bits']} bits" if result["onto"] == "dequantized" else "its weights"
    return (
        f"---\nbase_model: {result['base']}\nlibrary_name: transformers\ntags: [sft, merged]\n---\n\n"
        f"# {Path(result['base']).name} with an adapter merged\n\n"
        f"- base: {result['base']}, {onto}\n- adapter: {result['adapter']}\n- dtype: {result['dtype']}\n\n"
        f"## Difference\n\n```\n{_measured(result)}\n```\n"
    )
