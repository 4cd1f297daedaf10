"""A saved adapter to continue from: its folder, and what its adapter_config.json says of the keys of ``adapter``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import InputError

NAME = "adapter_config.json"
KEYS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "rank_stabilized": "use_rslora",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "modules_to_save": "modules_to_save",
}
"""Keys of ``adapter``, and what PEFT calls them."""
NOT_CONTINUED = (
    "alora_invocation_tokens",
    "arrow_config",
    "exclude_modules",
    "kasa_config",
    "layers_to_transform",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
"""What PEFT can also have saved, and no key of ``adapter`` says."""
BASE_UNCHANGED = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` with which PEFT leaves the base and the training as they are. The others take the
first product off the base (pissa, olora, corda, lora_ga), replace the base by a quantised one (loftq), or freeze a
matrix (mica)."""


def folder_of(path: Path) -> Path | None:
    """The folder of the adapter in a folder, which is its own or that of a run; None where there is none."""
    return next((each for each in (path, path / "final") if (each / NAME).is_file()), None)


def continued(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``adapter`` of a run that continues from a saved adapter, as far as the adapter decides it.

    Args:
        path: folder of an adapter, or of a run whose result is one.
        given: the section as the configuration has it.

    Raises:
        InputError: if there is no adapter that a run can continue from, or the section contradicts it.
    """
    folder = folder_of(Path(path).expanduser())
    if folder is None:
        raise InputError(
            f"adapter.from: {path} holds no adapter ({NAME}); give the folder of an adapter, or the output folder of a "
            "run that trained one."
        )
    saved = _saved_in(folder / NAME)
    wrong = [
        f"adapter.{key} is {given[key]!r}, but the adapter in {folder} has {value!r}; leave the key out."
        for key, value in saved.items()
        if key in given and not _same(key, given[key], value)
    ]
    if wrong:
        raise InputError(wrong)
    if given.get("targets") == "all-linear":  # the tensors of the adapter will tell whether it is
        saved["targets"] = "all-linear"
    return saved


def _saved_in(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"adapter.from: {file} cannot be read ({error}); save the adapter again.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InputError(
            f"adapter.from: {file} is not of a LoRA adapter; a run continues from LoRA, rsLoRA and DoRA only."
        )
    others = [key for key in NOT_CONTINUED if config.get(key)]
    first = config.get("init_lora_weights", True)
    others += [] if first in BASE_UNCHANGED else [f"init_lora_weights {first}"]
    others += ["bias"] if config.get("bias", "none") != "none" else []
    if others or not isinstance(config.get("target_modules"), list):
        what = ", ".join(others) or "target_modules, which is not a list of names"
        raise InputError(f"adapter.from: {file} uses {what}, which a run cannot continue; merge the adapter instead.")
    defaults = {"rank_stabilized": False, "rank_pattern": {}, "alpha_pattern": {}}
    read = {key: config.get(name) or defaults.get(key) for key, name in KEYS.items()}
    # PEFT writes the paths of tied modules, and a run those of modules whose names others have beside the text
    read["modules_to_save"] = list(dict.fromkeys(name.split(".")[-1] for name in config.get("modules_to_save") or []))
    return {
        "type": "dora" if config.get("use_dora") else "lora",
        "targets": sorted({name.split(".")[-1] for name in config["target_modules"]}),
        **{key: value for key, value in read.items() if value is not None},
    }


def token_rows(folder: Path) -> list[int]:
    """Rows of embedding and output head that the adapter in a folder has of its own.

    Raises:
        InputError: if its configuration cannot be read.
    """
    file = folder / NAME
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("trainable_token_indices") or []
        each = named.values() if isinstance(named, dict) else [named]
        return sorted({int(row) for rows in each for row in rows})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{file} cannot be read ({error}); save the adapter again.") from error


def added_tokens(folder: Path) -> dict[int, str]:
    """Of the tokenizer beside the adapter in a folder, by their ids; none where there is no tokenizer.

    Raises:
        InputError: if it cannot be read.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    try:
        return {each["id"]: each["content"] for each in json.loads(file.read_text(encoding="utf-8"))["added_tokens"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"adapter.from: {file} cannot be read ({error}); save the tokenizer again.") from error


def _same(key: str, given: Any, saved: Any) -> bool:
    if key == "targets":
        return given == "all-linear" or (isinstance(given, list) and sorted(given) == saved)
    if key == "modules_to_save":
        return isinstance(given, list) and sorted(given) == sorted(saved)
    return bool(given == saved)
