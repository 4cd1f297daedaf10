"""A saved adapter that a run continues from: whether it fits the model, and its values."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune.cache import checksums, key_of
from finetune.config import adapter_file, sections
from finetune.errors import first_line, refuse_if_any
from finetune.models.adapter import PREFIX, WEIGHTS, all_names, saved_name


def problems(model: torch.nn.Module, section: sections.Adapter) -> list[str]:
    """Why the adapter does not fit the model, as sentences; only the headers of its file are read.

    Args:
        model: its modules; weights may be on the meta device.
    """
    file = file_of(section)
    if not file.is_file():
        return [f"adapter.from: {file.parent} has no {WEIGHTS}; save the adapter as safetensors, with PEFT."]
    head = model.get_output_embeddings()  # type: ignore[operator]
    is_all = section.targets == "all-linear"
    expected = {
        f"{PREFIX}{name}.lora_A.weight": (section.rank_pattern.get(_last(name), section.rank), _columns(layer))
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | Conv1D)
        and (layer is not head if is_all else _last(name) in section.targets)
    }
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in sorted(opened.keys())}
    except (OSError, SafetensorError) as error:
        return [f"adapter.from: {file} cannot be read ({first_line(error)}); save the adapter again."]
    saved = {name: shape for name, shape in shapes.items() if name.endswith(".lora_A.weight")}
    wrong = [f"{name} is missing" for name in expected if name not in saved]
    wrong += [f"{name} is unexpected" for name in saved if name not in expected]
    wrong += [f"{n} has shape {saved[n]} instead of {s}" for n, s in expected.items() if saved.get(n, s) != s]
    return _does_not_fit(file, wrong)


def load_values(model: PreTrainedModel, section: sections.Adapter) -> None:
    """Give an attached adapter the values of the saved one.

    Raises:
        InputError: if that has other tensors.
    """
    names = all_names(model)
    file, wrong, taken = file_of(section), list[str](), set[str]()
    with safe_open(file, framework="pt") as opened:
        saved = set(opened.keys())
        for first, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            keys = {saved_name(name) for name in names if names[name] == first}  # several of a tied weight
            taken |= keys
            if missing := sorted(keys - saved):
                wrong += [f"{key} is missing" for key in missing]
                continue
            value, *copies = (opened.get_tensor(key) for key in sorted(keys))
            if value.shape != parameter.shape:
                wrong.append(f"{saved_name(first)} has shape {tuple(value.shape)} instead of {tuple(parameter.shape)}")
            elif any(not torch.equal(value, copy) for copy in copies):
                wrong.append(f"{' and '.join(sorted(keys))} differ, and are one weight in the model")
            else:
                parameter.data.copy_(value)
    refuse_if_any(_does_not_fit(file, wrong + [f"{key} is unexpected" for key in sorted(saved - taken)]))


def identity(section: sections.Adapter) -> dict[str, str]:
    """The fingerprint of the adapter's bytes, as ``adapter``; nothing for a run that begins with a new one."""
    return {"adapter": key_of(checksums(file_of(section).parent, WEIGHTS))} if section.from_ else {}


def file_of(section: sections.Adapter) -> Path:
    """The adapter's weights."""
    path = Path(str(section.from_))
    return (adapter_file.folder_of(path) or path) / WEIGHTS


def _last(name: str) -> str:
    return name.split(".")[-1]


def _columns(layer: torch.nn.Linear | Conv1D) -> int:
    """Of the input of a linear layer."""
    return int(layer.nx if isinstance(layer, Conv1D) else layer.in_features)


def _does_not_fit(file: Path, wrong: Sequence[str]) -> list[str]:
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    sentence = f"adapter.from: {file} does not fit the model: {'; '.join(wrong[:3])}{more}; set model.path to its base."
    return [sentence] if wrong else []
