"""LoRA adapters through PEFT: attached, counted, saved, read back and compared.

The adapter is injected into the model (PEFT's ``inject_adapter_in_model``), which stays what transformers made of it:
sharding, generation and checkpointing see no wrapper. What is saved is PEFT's own format, for
``PeftModel.from_pretrained``. PEFT takes seconds to import, so that each function does it when it needs it.
"""

import copy
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from finetune.compat.peft_private import import_peft, only_what_is_quantised, rows_of_whole_weights
from finetune.config import sections
from finetune.config.refusals import adapter_name_problems
from finetune.errors import InputError, RunStopped, first_line
from finetune.models import new_tokens, text_part
from finetune.models.adapter_layers import ending_with, linear_layers, saved_modules, target_names
from finetune.models.adapter_start import in_terms_of_base, twice_the_rank
from finetune.models.token_rows import compute_apart

PREFIX = "base_model.model."
"""Before each name in a saved adapter: where the model lies in a PeftModel."""
WEIGHTS = "adapter_model.safetensors"
FORMAT = {"format": "pt"}
TOKEN_ROWS = ".trainable_tokens_delta."
"""In the names of rows of embedding and output head."""


def problems(
    model: PreTrainedModel,
    *,
    targets: str | list[str],
    modules_to_save: list[str],
    quantised: bool,
    patterns: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Names that match nothing in the model, and modules that cannot be trained in full, as sentences.

    Args:
        model: the model's modules; its weights may be on the meta device.
        quantised: whether the linear layers will be, except the output head.
        patterns: names in adapter.rank_pattern and adapter.alpha_pattern, by these keys.
    """
    layers = linear_layers(model)
    linear, every = _last_names(layers), _last_names(name for name, _ in model.named_modules() if name)
    found = adapter_name_problems(targets, modules_to_save, linear=linear, modules=every, patterns=patterns)
    head = model.get_output_embeddings()
    inside = [name.split(".") for name, layer in layers.items() if layer is not head]
    if packed := [m for m in modules_to_save if quantised and any(m in parts for parts in inside)]:
        found.append(
            f"adapter.modules_to_save: {', '.join(packed)} will be quantised and cannot be trained in full; put its "
            "linear layers into adapter.targets, or set quantization.bits to none."
        )
    return found + _unreached_problems(model, modules_to_save)


def _unreached_problems(model: PreTrainedModel, modules_to_save: Sequence[str]) -> list[str]:
    """Modules that would be trained in full, but get no gradient from rows of text."""
    parts = text_part.unreached(model)
    found = {saved: ending_with(model, saved) for saved in modules_to_save}
    return [
        f"adapter.modules_to_save: {saved} matches {names[0]}, which rows of text do not reach, so that it would learn "
        "nothing; remove it, or name modules of the text."
        for saved, names in found.items()
        if names and all(text_part.is_within(name, parts) for name in names)
    ]


def unreached_target_problems(model: PreTrainedModel, section: sections.Adapter) -> list[str]:
    """Names of a new adapter's section that are found only among layers that rows of text do not reach.

    They would be dropped. A continued adapter may have them, where it has learnt nothing.
    """
    parts, layers = text_part.unreached(model), linear_layers(model)
    text = _last_names(name for name in layers if not text_part.is_within(name, parts))
    lost = _last_names(layers) - text
    named = {
        "targets": [] if isinstance(section.targets, str) else section.targets,
        "rank_pattern": section.rank_pattern,
        "alpha_pattern": section.alpha_pattern,
    }
    return [
        f"adapter.{key}: {', '.join(without)} is only found in {' and '.join(parts)}, which rows of text do not reach, "
        f"so that it would get no adapter; remove it, or name linear layers of the text: {', '.join(sorted(text))}."
        for key, names in named.items()
        if not section.from_ and (without := sorted(lost.intersection(names)))
    ]


def _last_names(names: Iterable[str]) -> set[str]:
    last = {name.split(".")[-1] for name in names}
    return {name for name in last if not name.isdigit()}  # layers are numbered


def on_a_copy(model: PreTrainedModel, section: sections.Adapter, token_rows: Sequence[int] = ()) -> PreTrainedModel:
    """A copy of a model, without weights, that has the adapter."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        found: PreTrainedModel = copy.deepcopy(model).to("meta")  # type: ignore[arg-type]  # transformers wraps it
        attach(found, section, base="", revision=None, dtype=torch.float32, seed=0, token_rows=token_rows)
    return found


def attach(
    model: PreTrainedModel,
    section: sections.Adapter,
    *,
    base: str,
    revision: str | None,
    dtype: torch.dtype,
    seed: int,
    token_rows: Sequence[int] = (),
) -> None:
    """Freeze a model and put an adapter into it.

    Args:
        section: of a configuration, whose type is ``lora`` or ``dora``.
        base: folder or hub id of the model, for whoever loads the adapter.
        revision: of the model on the hub.
        dtype: of computation. The adapter's matrices start from values of this dtype and compute in it.
        seed: of the matrices' random values.
        token_rows: rows of embedding and output head that are trained beside it, which follow one another.

    Raises:
        InputError: if PEFT cannot.
    """
    import_peft()
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    with_rows = new_tokens.names_of(model, section.modules_to_save) if token_rows else []
    targets = target_names(model, section.targets)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # PEFT divides it, and takes any number
        rank_pattern=_of_targets(section.rank_pattern, targets),
        alpha_pattern=_of_targets(section.alpha_pattern, targets),
        use_rslora=section.rank_stabilized,
        use_dora=section.type == "dora",
        lora_dropout=section.dropout,
        target_modules=targets,
        modules_to_save=saved_modules(model, section.modules_to_save) or None,  # PEFT adds to it
        ensure_weight_tying=trains_tied_weights(model, section.modules_to_save),
        trainable_token_indices={name: list(token_rows) for name in with_rows} or None,
        base_model_name_or_path=str(Path(base).absolute()) if Path(base).is_dir() else base,
        revision=revision,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    try:
        with only_what_is_quantised(), rows_of_whole_weights(), warnings.catch_warnings():
            # an adapted head learns apart from the embedding that it is tied to, and is merged apart
            warnings.filterwarnings("ignore", "Model has .tie_word_embeddings=True.")
            inject_adapter_in_model(config, model)
    except (ValueError, TypeError) as error:  # of layers that it knows, but not with one another
        raise InputError(
            f"adapter: PEFT cannot attach it ({first_line(error)}); change adapter.targets, adapter.modules_to_save or "
            "adapter.type."
        ) from error
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            # PEFT would cast each layer's input to the dtype of the adapter's fp32 masters: a second copy of every
            # activation, and fp32 products. Autocast and sharding bring the masters to the input's dtype instead.
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]
    compute_apart(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _of_targets(pattern: Mapping[str, Any], targets: str | list[str]) -> dict[str, Any]:
    """A pattern without the names of layers that get no adapter, which a continued one may have beside the text."""
    every = isinstance(targets, str)
    return {n: each for n, each in pattern.items() if every or any(f".{t}".endswith(f".{n}") for t in targets)}


def trains_tied_weights(model: PreTrainedModel, modules_to_save: Sequence[str]) -> bool:
    """Whether embedding and output head share a weight that the adapter trains: then they stay tied."""
    return bool(_tied_names(model) & set(modules_to_save))


def wraps_tied_weights(model: PreTrainedModel, section: sections.Adapter, *, trains_rows: bool) -> bool:
    """Whether the adapter puts a module of its own around a weight that embedding and output head share."""
    if trains_rows:
        return bool(_tied_names(model))
    targets = [] if section.targets == "all-linear" else section.targets  # to PEFT the head is none of all
    return bool(_tied_names(model) & {*targets, *section.modules_to_save})


def _tied_names(model: PreTrainedModel) -> set[str]:
    """Last names of embedding and output head, if they share a weight."""
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    names = _last_names(name for name, module in model.named_modules() if any(module is m for m in both))
    return names if getattr(model.config.get_text_config(), "tie_word_embeddings", False) else set()


def save(
    folder: Path,
    model: PreTrainedModel,
    trained: Mapping[str, torch.Tensor],
    *,
    beginning: Mapping[str, torch.Tensor] = {},
) -> None:
    """Write adapter_model.safetensors and adapter_config.json, as ``PeftModel.from_pretrained`` reads them.

    Args:
        trained: whole value of each trained parameter, by its name in ``model``.
        beginning: what ``adapter_start.start`` returned.
    """
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True)
    every = {name: in_terms_of_base(first, trained[first], beginning) for name, first in all_names(model).items()}
    state = get_peft_model_state_dict(model, state_dict=every, save_embedding_layers=False)
    # a tensor of its own under each name of a tied weight, as PEFT saves and expects it
    save_file({PREFIX + name: value.clone() for name, value in state.items()}, folder / WEIGHTS, FORMAT)
    config: Any = copy.deepcopy(model.peft_config["default"])
    config.inference_mode = True
    if beginning:
        twice_the_rank(config)
    config.save_pretrained(folder)


def all_names(model: torch.nn.Module) -> dict[str, str]:
    """Every name of each trained parameter, with the one under which it is listed: tied weights have several.

    Not so rows of tied weights, which PEFT saves once.
    """
    first = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    every = model.named_parameters(remove_duplicate=False)
    return {n: first[id(p)] for n, p in every if id(p) in first and (n == first[id(p)] or TOKEN_ROWS not in n)}


def verify(
    folder: Path,
    model: torch.nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    live: Iterable[tuple[str, torch.Tensor]],
    *,
    beginning: Mapping[str, torch.Tensor] = {},
) -> None:
    """Read a saved adapter back and compare it with the model in memory.

    Args:
        shapes: of every trained parameter, taken before the model was sharded.
        live: name and whole value of each trained parameter, as the model computes with it: the saved masters, or
            those rounded to the precision of computation.
        beginning: what ``adapter_start.start`` returned.

    Raises:
        RunStopped: if a tensor is missing, or has another shape or other values.
    """
    keys: dict[str, list[str]] = {}
    for name, first in all_names(model).items():
        keys.setdefault(first, []).append(saved_name(name))
    wrong, compared = [], set()
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        saved = {name: file.get_slice(name) for name in sorted(file.keys())}
        for name, value in live:
            compared.add(name)
            expected = in_terms_of_base(name, torch.empty(shapes[name], device="meta"), beginning).shape
            for key in keys[name]:
                if key not in saved:
                    wrong.append(f"{key} is missing")
                elif tuple(saved[key].get_shape()) != expected:
                    wrong.append(f"{key} has shape {tuple(saved[key].get_shape())} instead of {tuple(expected)}")
                elif not torch.equal(file.get_tensor(key).to(value), in_terms_of_base(name, value, beginning)):
                    wrong.append(f"{key} differs from the model")
    wrong += [f"{name} was not compared" for name in shapes if name not in compared]
    wrong += [f"{key} is not in the model" for key in saved if key not in {k for own in keys.values() for k in own}]
    if wrong:
        raise RunStopped(
            f"The saved adapter differs from the trained one: {'; '.join(wrong[:5])} ({len(wrong)} of "
            f"{len(saved)} tensors). "
            f"It stays in {folder}; nothing else was replaced. Please report this."
        )


def saved_name(name: str) -> str:
    """Name of a parameter in a saved adapter: without the adapter's own name and PEFT's wrappers."""
    name = re.sub(r"\.modules_to_save\.default\.", ".", name)
    name = re.sub(r"\.lora_magnitude_vector\.default\.weight$", ".lora_magnitude_vector", name)
    return PREFIX + re.sub(r"\.default(?=\.|$)", "", name)
