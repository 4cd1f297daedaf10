"""An adapter to merge: its files, its base, and how it was trained. Problems are found before weights load.

It is the output folder of a run, whose run.yaml records the training, or the folder of an adapter. LoRA and its
variants (rsLoRA, DoRA, modules saved in full) are supported, other PEFT methods are not.
"""

import json
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.compat.peft_private import import_peft, only_what_is_quantised
from finetune.config import adapter_file
from finetune.data import sources
from finetune.data.encoding import Settings
from finetune.data.sources import Source, named_sources
from finetune.distributed.strategy import DTYPES
from finetune.errors import InputError, refuse_if_any
from finetune.export import own_code
from finetune.export.results import result_at
from finetune.hub_access import is_hub_id
from finetune.models import adapter, new_tokens, quantization, weights
from finetune.models import loading as models
from finetune.models.new_tokens import NewTokens


@dataclass(frozen=True)
class AdapterSource:
    """An adapter and how it was trained."""

    folder: Path
    """Of adapter_config.json and adapter_model.safetensors."""
    base: str
    """Folder or hub id of the model that it was trained on."""
    is_other_base: bool
    """The base was named, and is not to the byte the one that the run recorded."""
    random_weights: bool
    """The base's weights are drawn with ``seed``, as in the run, instead of read."""
    revision: str | None
    config: PreTrainedConfig
    """Of the base, with the rows that the adapter adds to its vocabulary."""
    new_tokens: NewTokens
    """Rows that the base lacks in its files."""
    trust_remote_code: bool
    """Whether code that comes with the base is run."""
    bits: int | None
    """Bits that the base was quantised to, for training or by its publisher."""
    dtype: torch.dtype
    """Of computation in training."""
    seed: int
    """Of random weights of the base."""
    sources: list[Source]
    """Held-out data of the run, or else its training data."""
    settings: Settings
    """How the run read it."""

    @property
    def notes(self) -> list[str]:
        """What to know of a model that is made of them, in sentences."""
        if not self.is_other_base:
            return []
        return [
            f"The model {self.base} is not the one that the run recorded, to the byte; if its weights are others, so "
            "is what the adapter makes of them."
        ]


def read(path: Path, *, base_model: str | None, bits: int | None, trust_remote_code: bool = False) -> AdapterSource:
    """Find the adapter and its base.

    Args:
        path: output folder of a run, or folder of an adapter.
        base_model: folder of the base, if it is not the one that the adapter names.
        bits: of the quantised base, if there is no run.yaml.
        trust_remote_code: run the code that comes with the base.

    Raises:
        InputError: if there is no LoRA adapter or no base, or they do not fit together; or if the base has changed
            since the run, and is not named.
    """
    folder, run = _find(path)
    named = _named_in(folder)
    base = base_model or named.get("base_model_name_or_path") or ""
    if problems := models.problems(base, None, None):
        raise _unreadable(problems[0])
    trained: dict[str, Any] = {"bits": None, "revision": named.get("revision")} if run is None else _recorded(run)
    if run is not None and bits and bits != trained["bits"] and (trained["bits"] or base_model is None):
        was = f"{trained['bits']}-bit" if trained["bits"] else "unquantised"
        raise InputError(f"--bits {bits}: {run} says that the adapter was trained on {was} weights; leave --bits out.")
    bits, revision = bits or trained["bits"], trained["revision"] if base_model is None else None
    try:
        config = own_code.load_config(base, revision=revision, trust_remote_code=trust_remote_code)
    except own_code.OwnCodeError:
        raise
    except InputError as error:
        raise _unreadable(str(error)) from error
    refuse_if_any(quantization.problems(config, bits))
    random_weights = trained.get("random_weights", False)
    is_other_base = _is_other_base(base, revision, trained)
    if is_other_base and base_model is None:
        raise InputError(
            f"The model {base} is not the one that the adapter was trained on, by the fingerprint in {run}: its "
            "configuration or its weights have changed, and the adapter is the difference to what they were; restore "
            f"it, or take it all the same with --base-model {base}."
        )
    skeleton = models.without_weights(config, trust_remote_code)
    grown = _grown(folder, skeleton)
    try:
        files = [] if random_weights else weights.files(base, revision)
        refuse_if_any(weights.problems(skeleton, files) if files else [])
        refuse_if_any(weights.not_finite(files))
    except InputError as error:
        raise _unreadable(str(error)) from error
    config = grown.grown(config)
    skeleton = models.without_weights(config, trust_remote_code) if grown else skeleton
    refuse_if_any(_tensor_problems(folder, base, skeleton))
    refuse_if_any(weights.not_finite([folder / adapter.WEIGHTS]))
    return AdapterSource(
        folder=folder,
        base=base,
        is_other_base=is_other_base,
        random_weights=random_weights,
        revision=revision,
        config=config,
        new_tokens=grown,
        trust_remote_code=trust_remote_code,
        bits=bits or quantization.stored_bits(config),
        dtype=trained.get("dtype", models.stored_dtype(config)),
        seed=trained.get("seed", 0),
        sources=trained.get("sources", []),
        settings=trained.get("settings", Settings(max_length=0)),
    )


def _unreadable(problem: str) -> InputError:
    problem = problem.removeprefix("model.path: ").rstrip(".")
    return InputError(f"The adapter's base model cannot be read ({problem}); give its folder with --base-model.")


def _find(path: Path) -> tuple[Path, Path | None]:
    """The adapter's folder, and its run.yaml, if it has one."""
    result = result_at(path)
    if not result.is_adapter:
        raise InputError(
            f"{result.folder} is a full model, not an adapter, so there is nothing to merge; use it as it is."
        )
    if not (result.folder / adapter.WEIGHTS).is_file():
        raise InputError(
            f"{result.folder} has no {adapter.WEIGHTS}; save the adapter as safetensors (pickle files are not read, "
            "because they can run code)."
        )
    return result.folder, result.run


def _named_in(folder: Path) -> dict[str, Any]:
    try:
        named = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder / 'adapter_config.json'} cannot be read ({error}); save the adapter again."
        ) from error
    if not isinstance(named, dict) or named.get("peft_type") != "LORA":
        kind = named.get("peft_type") if isinstance(named, dict) else None
        raise InputError(
            f"{folder} has an adapter of type {kind}, but only LORA (including rsLoRA and DoRA) is supported; merge it "
            "with PEFT's merge_and_unload."
        )
    return named


def _recorded(run: Path) -> dict[str, Any]:
    """What run.yaml records of the training, by the field names of ``AdapterSource``."""
    try:
        record = yaml.safe_load(run.read_text(encoding="utf-8"))
        config, data = record["config"], record["config"]["data"]
        bits, weights = config["quantization"]["bits"], config["train"]["weights"]
        named = [entries for entries in (data["eval"], data["train"]) if entries and not isinstance(entries, float)]
        found = [entries for entries in map(named_sources, named) if not sources.problems(entries)]
        return {
            "bits": None if bits == "none" else bits,
            "dtype": torch.bfloat16 if weights == "bf16" else DTYPES[record["strategy"]["precision"]],
            "seed": config["train"]["seed"],
            "random_weights": config["model"].get("random_weights", False),  # older runs have no such key
            "sources": found[0] if found else [],
            "settings": Settings(
                data["max_length"],
                data["format"],
                data["train_on"],
                paired="dpo" in config,  # the section of the recipe that reads two answers of a row
                columns=tuple(data.get("columns", {}).items()),  # older runs have no such key
            ),
            "revision": config["model"]["revision"],
            "path": config["model"]["path"],
            "fingerprint": record.get("data", {}).get("base"),  # older runs have none
        }
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise InputError(
            f"{run} is not the record of a run ({type(error).__name__}: {error}); copy the adapter elsewhere without "
            "it, and give that folder, with --bits where the base was quantised."
        ) from error


def _is_other_base(base: str, revision: str | None, trained: dict[str, Any]) -> bool:
    """Whether a base differs from the recorded one; False where that cannot be known, as of a copy from the hub."""
    if trained.get("fingerprint") is None:
        return False
    from_hub = [is_hub_id(path, needs_owner=False) for path in (base, trained["path"])]
    if base != trained["path"] and from_hub[0] != from_hub[1]:
        return False
    found = models.identity(base, revision=revision, weights=not trained["random_weights"])
    return bool(found != trained["fingerprint"])


def _grown(folder: Path, base: PreTrainedModel) -> NewTokens:
    """Rows of an adapter's vocabulary that its base lacks: those it trained alone, and those of modules saved whole."""
    rows = [row + 1 for row in adapter_file.token_rows(folder)]
    whole = {f"{adapter.PREFIX}{name}.weight" for name, each in base.named_modules() if each in new_tokens.own(base)}
    try:
        with safe_open(folder / adapter.WEIGHTS, framework="pt") as file:
            saved = [file.get_slice(name).get_shape()[0] for name in sorted(file.keys()) if name in whole]
    except SafetensorError:  # which will be told of with what does not fit
        return NewTokens()
    return new_tokens.up_to(max(rows + saved, default=0), base.config, max(saved, default=None))


def inject(model: PreTrainedModel, folder: Path) -> Any:
    """Put a saved adapter's modules into a model, as PEFT's LoraModel; they hold no values of the adapter yet."""
    import_peft()
    from peft import LoraModel, PeftConfig

    config: Any = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False  # so that what the adapter holds is told by requires_grad
    with warnings.catch_warnings(), only_what_is_quantised():
        warnings.filterwarnings("ignore", "Model has .tie_word_embeddings=True.")  # ties are settled after merging
        return LoraModel(model, config, "default", low_cpu_mem_usage=model.device.type == "meta")


def saved_names(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """The names that each of the adapter's tensors may have in its file: several, where modules share a tensor."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names[parameter].append(adapter.saved_name(name))
    return dict(names)


def _tensor_problems(folder: Path, base: str, skeleton: PreTrainedModel) -> list[str]:
    """Whether each tensor of the adapter has a place in the base, of its shape, and none is missing."""
    path, advice = folder / adapter.WEIGHTS, "name the model that it was trained on with --base-model."
    try:
        inject(skeleton, folder)
        with safe_open(path, framework="pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    except SafetensorError as error:
        return [f"{path} cannot be read ({error}); save the adapter again, or copy it again."]
    except ValueError as error:
        return [f"The adapter {folder} does not fit {base} ({str(error).splitlines()[0]}); {advice}"]
    # beside its own tensors, PEFT may have saved copies of the base's embedding and head
    places = {adapter.saved_name(name): tuple(p.shape) for name, p in skeleton.named_parameters(remove_duplicate=False)}
    wrong = [f"{names[0]} is missing" for names in saved_names(skeleton).values() if not set(names) & set(saved)]
    wrong += [f"{name} is unexpected" for name in saved if name not in places]
    wrong += [f"{n} has shape {s} instead of {places[n]}" for n, s in saved.items() if n in places and s != places[n]]
    if not wrong:
        return []
    rest = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return [f"The adapter {folder} does not fit {base}: {'; '.join(wrong[:3])}{rest}; {advice}"]
