"""The tokens at which a model stops, by its files."""

import json
from pathlib import Path

from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import PreTrainedConfig

from finetune.errors import InputError, first_line


def end_tokens_of(config: PreTrainedConfig, path: str, *, revision: str | None) -> tuple[int, ...]:
    """Tokens at which generation stops, by a model's generation_config.json, where it has one, and its config.json.

    Raises:
        InputError: if one of them does not name tokens, the former cannot be read or is not JSON, or the hub does not
            say whether there is one.
    """
    name = "generation_config.json"
    file = file_if_any(path, name, revision)
    found: set[int] = set()
    try:
        said = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file else None
        own = (getattr(each, "eos_token_id", None) for each in (config, config.get_text_config()))
        for tokens in (said, *own):
            several = tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in several):
                raise ValueError(f"the eos_token_id {tokens!r} names no tokens")
            found.update(several)
    except (OSError, ValueError, AttributeError) as error:  # not to be read, damaged, or not an object
        raise InputError(
            f"model.path: {name} or config.json of {path} cannot be used ({first_line(error)}); download it again, or "
            "correct it."
        ) from error
    return tuple(sorted(found))


def file_if_any(path: str, name: str, revision: str | None) -> Path | None:
    """A file of a model's folder, or of the hub; None where there is none."""
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.exists() else None
    try:
        return Path(hf_hub_download(path, name, revision=revision))
    except LocalEntryNotFoundError as error:  # not in the cache, and the hub was not asked, or did not answer
        if is_offline_mode() or try_to_load_from_cache(path, name, revision=revision) is not None:
            return None  # the cache knows that there is none
        raise InputError(
            f"model.path: the hub does not say whether {path} has a {name} ({first_line(error)}); check the network, "
            "or set HF_HUB_OFFLINE=1 to train with what the cache has."
        ) from error
    except EntryNotFoundError:
        return None
