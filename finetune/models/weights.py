"""Whether the weights that are stored are those of the model, all of them, and numbers.

transformers fills what it does not find with random numbers and goes on. Here the tensors of the files are held against
the model before they are read, by transformers' own loading on the meta device: it knows which names a model has had,
what is tied, and which parts are put together when they are read.
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
"""Patterns of tensors that may be stored beside the model's, in addition to those that transformers ignores."""
OF_BITSANDBYTES = re.compile(r"(\.weight\.(nested_)?(absmax|quant_map)|\.quant_state\.\w+|\.SCB|\.weight_format)$")
"""What bitsandbytes stores beside a quantised weight."""
ELEMENTS_AT_ONCE = 2**26


def files(path: str, revision: str | None) -> list[Path]:
    """The files of a model's weights; those of a hub model are downloaded unless they are in the cache.

    Args:
        path: folder of a model, or its id on the hub.

    Raises:
        InputError: if there are none, or not all of them, or they cannot be downloaded.
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
            f"model.path: the weights of {path} cannot be downloaded ({error}); check the connection, or give a folder."
        ) from error
    if not (folder / weight_files.ONE_FILE).is_file() and not (folder / weight_files.INDEX).is_file():
        raise InputError(
            f"model.path: {path} has no weights in safetensors on the hub, and pickle files are not read, because they "
            "can run code; take a model that has them, or convert it."
        )
    return weight_files.local_files(folder)


def problems(skeleton: PreTrainedModel, files: Sequence[Path]) -> list[str]:
    """Why these files are not the weights of this model, as a sentence: what is missing, unknown or of another shape.

    Args:
        skeleton: the model on the meta device, as its configuration describes it.
    """
    if named := skeleton.config.to_dict().get("transformers_weights"):
        return [
            f"model.path: the config.json in {files[0].parent} names {named} as its weights, which are read from "
            f"{weight_files.ONE_FILE} or {weight_files.INDEX} only; rename the file, and remove transformers_weights."
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
        wrong = ["tensors that are put together when they are read, such as experts, are missing or of other shapes"]
    else:
        wrong = _differences(found)
    if not wrong:
        return []
    return [
        f"model.path: the weights in {files[0].parent} are not the model that its config.json describes: "
        f"{'; '.join(wrong)}. Download the model again, or correct config.json."
    ]


def _differences(found: Mapping[str, Any]) -> list[str]:
    """What transformers' loading info tells, as clauses."""
    missing = sorted(found["missing_keys"])
    unknown = sorted(name for name in found["unexpected_keys"] if not any(re.search(known, name) for known in HARMLESS))
    other = [
        f"{name} has the shape {_shape(stored)}, not {_shape(described)}"
        for name, stored, described in sorted(found["mismatched_keys"])
    ]
    return (
        ([f"{weight_files.first_of(missing)} missing"] if missing else [])
        + ([f"{weight_files.first_of(unknown)} unknown to it"] if unknown else [])
        + ([weight_files.first_of(other)] if other else [])
    )


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes)) or "scalar"


def not_finite(files: Sequence[Path], *, rank: int = 0, world_size: int = 1) -> list[str]:
    """Which files hold NaN or infinite weights, as sentences. Reads all weights once.

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
                f"{path} holds NaN or infinite weights, in {weight_files.first_of(wrong)}; download it again, or use "
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
