"""A model's config.json, read from a folder, a file or the hub, without PyTorch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import InputError, first_line
from finetune.hub_access import is_hub_id, missing_in_folder, refuse_without_access

INSTEAD = "a config.json file (--model path/to/config.json)"
"""What can be given where the hub gives nothing."""


def read_config(path: str, revision: str | None = None) -> dict[str, Any]:
    """The contents of a model's config.json.

    Args:
        path: a model's folder, a config.json file of whatever name, or an id on the hub (owner/name), of which
            nothing but the config.json is downloaded.
        revision: branch, tag or commit on the hub.

    Raises:
        InputError: if there is none, if it cannot be downloaded, or if it is not a JSON object.
    """
    file = _file(path, revision)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({first_line(error)}); give a model's config.json.") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} is not a JSON object; give a model's config.json.")
    return config


def _file(path: str, revision: str | None) -> Path:
    if Path(path).is_file():
        return Path(path)
    if Path(path).is_dir():
        file = Path(path) / "config.json"
        if not file.is_file():
            raise InputError(f"The folder {path} has no config.json; give the folder of a transformers model.")
        return file
    if not is_hub_id(path) and not missing_in_folder(path):  # which will be said below
        raise InputError(
            f"There is no file or folder {path}; give a model folder, its config.json, or a hub id (owner/name)."
        )
    return _download(path, revision)


def _download(model_id: str, revision: str | None) -> Path:
    from huggingface_hub import errors, hf_hub_download  # a tenth of a second

    asks = refuse_without_access(model_id, "config.json", revision=revision, waits_if_busy=False, instead=INSTEAD)
    try:
        return Path(hf_hub_download(model_id, "config.json", revision=revision, local_files_only=not asks))
    except (OSError, ValueError, errors.HTTPError, errors.EntryNotFoundError) as error:
        at = f" at {revision}" if revision else ""
        cause = error.__cause__ if isinstance(error.__cause__, errors.HTTPError) else error  # what the hub answered
        raise InputError(
            f"{model_id}{at} is not a local folder, and its config.json cannot be downloaded from the hub "
            f"({first_line(cause)}); check the name and the network, log in with `hf auth login`, or give {INSTEAD}."
        ) from error


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """In which a published model's weights are stored, as PyTorch names it; None where config.json does not say."""
    found = config.get("dtype") or config.get("torch_dtype")
    return found if isinstance(found, str) else None


def published_bits(config: Mapping[str, Any]) -> int | None:
    """Bits that bitsandbytes quantised a published model's linear layers to; None for one that is not quantised.

    Raises:
        InputError: for a model that is quantised by something else.
    """
    stored = config.get("quantization_config")
    if not stored:
        return None
    method = stored.get("quant_method", "an unknown method") if isinstance(stored, Mapping) else stored
    if isinstance(stored, Mapping) and (method == "bitsandbytes" or {"load_in_4bit", "load_in_8bit"} & set(stored)):
        return 4 if stored.get("load_in_4bit") else 8
    raise InputError(
        f"config.json: the model is published quantised with {method}, which is not supported; use its 16-bit version."
    )
