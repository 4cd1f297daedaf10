"""A saved adapter that a run continues from: whether it fits the model, and its values.

Of a model that reads images too, PEFT's ``all-linear`` and names such as ``q_proj`` also adapt layers that rows of text
do not reach. A run has no adapter there: where the saved one has learnt nothing, it is left out, else it is refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from finetune.cache import checksums, key_of
from finetune.config import adapter_file, sections
from finetune.errors import first_line, refuse_if_any
from finetune.models import new_tokens, text_part
from finetune.models.adapter import PREFIX, WEIGHTS, all_names, on_a_copy, saved_name
from finetune.models.new_tokens import NewTokens


def problems(model: PreTrainedModel, section: sections.Adapter, new: NewTokens | None = None) -> list[str]:
    """Why the adapter does not fit the model, as sentences.

    Only the headers of its file are read, and the matrices B of layers that rows of text do not reach.

    Args:
        model: its modules; weights may be on the meta device.
        new: tokens that the run adds to the vocabulary.

    Raises:
        InputError: if PEFT cannot attach such an adapter.
    """
    file = file_of(section)
    if not file.is_file():
        return [f"adapter.from: {file.parent} has no {WEIGHTS}; save the adapter as safetensors, with PEFT."]
    try:
        with safe_open(file, framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in sorted(opened.keys())}
            idle, learnt = _beside_the_text(opened, model)
    except (OSError, SafetensorError) as error:
        return [f"adapter.from: {file} cannot be read ({first_line(error)}); save the adapter again."]
    new = new or NewTokens()
    trains_rows = bool(new) and bool(new_tokens.names_of(model, section.modules_to_save))
    own, saved = list(new.rows) if trains_rows else [], adapter_file.token_rows(file.parent)
    known = adapter_file.added_tokens(file.parent)
    if saved != own or (known and not set(new.names) <= set(known.values())):
        return [
            f"adapter.from: {file.parent} has rows of its own for {_tokens(saved, known)}, and this run trains "
            f"{_tokens(own, dict(zip(new.rows, new.names)))}; set data.chat_template, model.tokenizer and model.path "
            "to those that the adapter was trained with."
        ]
    if learnt:
        more = f" and {len(learnt) - 1} more" if len(learnt) > 1 else ""
        return [
            f"adapter.from: {file} has learnt something in {learnt[0]}{more}, which rows of text do not reach, so that "
            "the result would lack it; merge the adapter into its base (finetune merge), set model.path to the merged "
            "model, and begin with a new adapter."
        ]
    expected = _shapes_of(model, section, new.rows)
    wrong = [f"{name} is missing" for name in expected if name not in shapes]
    wrong += [f"{name} is unexpected" for name in shapes if name not in expected and name not in idle]
    wrong += [f"{n} has shape {shapes[n]} instead of {s}" for n, s in expected.items() if shapes.get(n, s) != s]
    return _does_not_fit(file, wrong)


def _beside_the_text(opened: safe_open, model: PreTrainedModel) -> tuple[set[str], list[str]]:
    """Of an adapter's file, the layers that rows of text do not reach.

    A layer has learnt nothing where its B is still 0. The magnitudes of DoRA, too, are then those that it began with: a
    gradient that reaches them reaches B.

    Returns:
        Names of all tensors of those that have learnt nothing; names, in the model, of those that have, and of weights
        that were trained whole.
    """
    parts, saved, b = text_part.unreached(model), sorted(opened.keys()), ".lora_B.weight"
    beside = [name for name in saved if text_part.is_within(name.removeprefix(PREFIX), parts)]
    layers = [name.removesuffix(b) for name in beside if name.endswith(b)]
    learnt = [layer for layer in layers if opened.get_tensor(layer + b).any()]
    ends = (".lora_A.weight", b, ".lora_magnitude_vector")
    idle = {layer + end for layer in layers if layer not in learnt for end in ends}
    learnt += [name for name in beside if not name.endswith(ends)]
    return idle & {*saved}, [layer.removeprefix(PREFIX) for layer in learnt]


def _tokens(rows: Sequence[int], known: Mapping[int, str]) -> str:
    return f"the tokens {', '.join(known.get(row, str(row)) for row in rows)}" if rows else "no token of its vocabulary"


def _shapes_of(
    model: PreTrainedModel, section: sections.Adapter, token_rows: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor that the adapter has in a file."""
    adapted = on_a_copy(model, section, token_rows)
    parameters = dict(adapted.named_parameters())
    return {saved_name(name): tuple(parameters[first].shape) for name, first in all_names(adapted).items()}


def load_values(model: PreTrainedModel, section: sections.Adapter) -> None:
    """Give an attached adapter the values of the saved one.

    Raises:
        InputError: if that has other tensors.
    """
    names = all_names(model)
    file, wrong, taken = file_of(section), list[str](), set[str]()
    with safe_open(file, framework="pt") as opened:
        saved = set(opened.keys()) - _beside_the_text(opened, model)[0]
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
                wrong.append(f"{' and '.join(sorted(keys))} differ, but the model has one weight for both")
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


def _does_not_fit(file: Path, wrong: Sequence[str]) -> list[str]:
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    sentence = f"adapter.from: {file} does not fit the model: {'; '.join(wrong[:3])}{more}; set model.path to its base."
    return [sentence] if wrong else []
