"""Check that the stored weights are complete, fit the model and are finite.

transformers fills missing weights with random numbers and continues. Here the tensors of the files are compared with
the model before they are read, by transformers' own loading on the meta device: it knows renamed weights, tied weights,
and weights that are merged while they are read.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from finetune.errors import InputError
from finetune.models import weight_files

HARMLESS = (
    r"(^|\.)rotary_emb\.inv_freq$",  # computed from the configuration; older versions of transformers stored it
    r"(^|\.)(masked_bias|attn\.bias)$",  # attention masks, which older versions stored
    r"(^|\.)mtp(\.|$)",  # layers that predict further tokens for speculative decoding, unused here
)
"""Patterns of extra tensors that are ignored, in addition to those that transformers ignores."""
OF_BITSANDBYTES = re.compile(r"(\.weight\.(nested_)?(absmax|quant_map)|\.quant_state\.\w+|\.SCB|\.weight_format)$")
"""What bitsandbytes stores beside a quantised weight."""
ELEMENTS_AT_ONCE = 2**26


def files(path: str, revision: str | None) -> list[Path]:
    """The files of a model's weights; those of a hub model are downloaded unless they are in the cache.

    Args:
        path: folder of a model, or its id on the hub.

    Raises:
        InputError: if they are missing or incomplete, or cannot be downloaded.
    """
    if Path(path).is_dir():
        return weight_files.local_files(Path(path))
    from huggingface_hub import snapshot_download

    try:
        names = [weight_files.ONE_FILE, weight_files.INDEX, weight_files.ADAPTER]
        folder = Path(snapshot_download(path, revision=revision, allow_patterns=names))
        if not (folder / weight_files.ONE_FILE).is_file() and (folder / weight_files.INDEX).is_file():
            snapshot_download(path, revision=revision, allow_patterns=weight_files.parts(folder / weight_files.INDEX))
    except OSError as error:
        raise InputError(
            f"model.path: the weights of {path} cannot be downloaded ({error}); check the connection, or give a "
            "local folder."
        ) from error
    if not (folder / weight_files.ONE_FILE).is_file() and not (folder / weight_files.INDEX).is_file():
        raise InputError(
            f"model.path: {path} has no safetensors weights on the hub, and pickle files are not read because they can "
            "run code; use a model with safetensors, or convert this one."
        )
    return weight_files.local_files(folder)


def problems(skeleton: PreTrainedModel, files: Sequence[Path]) -> list[str]:
    """Why these files are not the weights of this model, as a sentence: missing, unknown or differently shaped tensors.

    Args:
        skeleton: the model on the meta device, as its configuration describes it.
    """
    if named := skeleton.config.to_dict().get("transformers_weights"):
        return [
            f"model.path: the config.json in {files[0].parent} names {named} as its weights, but weights are only "
            f"read from {weight_files.ONE_FILE} or {weight_files.INDEX}; rename the file, and remove "
            "transformers_weights."
        ]
    stored = weight_files.shapes(files)
    model_class: Any = type(skeleton)
    config: Any = copy.deepcopy(skeleton.config)
    model_shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
    if any(OF_BITSANDBYTES.search(name) for name in stored):
        stored = {n: model_shapes.get(n, s) for n, s in stored.items() if not OF_BITSANDBYTES.search(n)}
        vars(config).pop("quantization_config", None)
    try:
        _, found = model_class.from_pretrained(
            None,
            config=config,
            state_dict={name: torch.empty(shape, device="meta") for name, shape in stored.items()},
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # all of them are named below
        )
    except RuntimeError:  # transformers names them in its log only
        wrong = ["tensors that are merged while they are read, such as experts, are missing or have other shapes"]
    else:
        wrong = _differences(found)
    if not wrong:
        return []
    return [
        f"model.path: the weights in {files[0].parent} do not fit its config.json: "
        f"{'; '.join(wrong)}. Download the model again, or correct config.json."
    ]


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that stand in a model's files beside its parameters, such as the bias by which experts are chosen."""
    saved = model.state_dict().keys()
    return {name: each for name, each in model.named_buffers() if name in saved}


def _differences(found: Mapping[str, Any]) -> list[str]:
    """transformers' loading info as clauses."""
    missing = sorted(found["missing_keys"])
    unknown = sorted(name for name in found["unexpected_keys"] if not any(re.search(known, name) for known in HARMLESS))
    other = [
        f"{name} has shape {_shape(stored)} instead of {_shape(described)}"
        for name, stored, described in sorted(found["mismatched_keys"])
    ]
    return (
        ([f"{weight_files.first_of(missing)} missing"] if missing else [])
        + ([f"{weight_files.first_of(unknown)} unknown"] if unknown else [])
        + ([weight_files.first_of(other)] if other else [])
    )


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes)) or "scalar"


def not_finite(files: Sequence[Path], *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Files with NaN or infinite weights, as sentences. Reads all weights once.

    The files are checked and not the model, because quantising turns NaN into a finite weight.

    Args:
        rank: of this process, which checks every ``world_size``-th tensor.
    """
    found, stored = [], weight_files.shapes(files)
    packed = {name for name in stored if f"{name}.absmax" in stored}  # 4-bit values, under the name of another dtype
    for path in files:
        with weight_files.opened(path, "pt") as file:
            share = sorted(set(file.keys()) - packed)[rank::world_size]
            wrong = [name for name in share if not _is_finite(file.get_tensor(name))]
        if wrong:
            found.append(
                f"{path} has NaN or infinite weights in {weight_files.first_of(wrong)}; download it again, or use "
                "another version of the model."
            )
    return found


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite: the extremes are NaN where one value is. Ten times as fast as ``isfinite``."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    for part in tensor.flatten().split(ELEMENTS_AT_ONCE):
        whole = part.float() if part.element_size() == 1 else part  # 8-bit formats have no minimum
        if not all(torch.isfinite(extreme) for extreme in torch.aminmax(whole)):
            return False
    return True
