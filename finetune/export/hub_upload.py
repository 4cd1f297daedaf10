"""A model or an adapter to the hub: its weights, tokenizer, configuration and card, and nothing else of its folder."""

import json
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from finetune.errors import InputError, first_line
from finetune.export.results import Result, result_at
from finetune.hub_access import SECONDS, is_hub_id

UPLOADED = ("*.safetensors", "*.safetensors.index.json", "*.jinja", "tokenizer.model", "merges.txt", "README.md")
CONFIGURATIONS = (
    *("config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json", "preprocessor_config.json"),
)
"""What transformers and PEFT read. run.yaml stays here: it names folders and hardware of this machine."""
CARD = "README.md"
_BASE = re.compile(r"^base_model: .*\n", re.MULTILINE)


def upload(path: Path, name: str, *, public: bool, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Upload a result in one commit, to a repository that is made if there is none. Files of an earlier result that
    are not of this one, such as those of an adapter, are removed by the same commit.

    Args:
        path: output folder of a run, or folder of an adapter or of a model.
        name: of the repository, ``owner/name``.
        public: whether everybody may read a repository that is made; one that exists stays as it is.
        say: shows a line of progress.

    Returns:
        What was uploaded, for JSON.

    Raises:
        InputError: as ``to_upload``; without a network; if the hub refuses it.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    result, files = to_upload(path, name)
    card = card_of(result)
    size = sum(file.stat().st_size for file in files)
    say(f"Uploading {len(files)} files ({size / 1e6:,.1f} MB) of {result.folder} to {name}:")
    for file in files:
        say(f"  {file.name} ({file.stat().st_size / 1e6:,.1f} MB)")
    if base := local_base_of(result):
        say(f"The adapter names its base by a folder of this machine, {base}: others need that model too.")
    contents: dict[str, Any] = {file.name: str(file) for file in files} | {CARD: card.encode()}
    get_session().timeout = (SECONDS, None, None, None)  # to connect, for which it would wait for ever
    try:
        hub = HfApi()
        made = hub.create_repo(name, private=not public, exist_ok=True)
        stale = [name for name in hub.list_repo_files(made.repo_id) if _is_of_a_result(name) and name not in contents]
        for each in stale:
            say(f"  {each} is of another result, and is removed (the repository's history has it)")
        operations: list[Any] = [CommitOperationAdd(file, content) for file, content in contents.items()]
        operations += [CommitOperationDelete(each) for each in stale]
        commit = hub.create_commit(made.repo_id, operations, commit_message=f"Upload {result.folder.resolve().name}")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise InputError(
            f"--push {name}: the hub refuses it ({first_line(error)}); check the name, and that your token may write "
            "there (`hf auth login`)."
        ) from error
    except HTTPError as error:  # no answer
        raise InputError(
            f"--push {name}: the hub cannot be reached ({first_line(error)}); check the network, and try again."
        ) from error
    told = {"files": sorted(contents), "removed": sorted(stale), "bytes": size}
    return {"repository": str(made), "commit": commit.oid} | told


def to_upload(path: Path, name: str) -> tuple[Result, list[Path]]:
    """What ``upload`` takes, and its files, before it asks the hub.

    Raises:
        InputError: if there is no such result, or no login.
    """
    from huggingface_hub import get_token

    result = result_at(path)
    files = files_of(result)
    if name.count("/") != 1:
        raise InputError(f"--push {name}: give the repository with its owner, OWNER/NAME.")
    if get_token() is None:
        raise InputError(f"--push {name}: nobody is logged in to the hub; run `hf auth login`, or set HF_TOKEN.")
    return result, files


def _is_of_a_result(name: str) -> bool:
    """Whether a file of a repository is read with a model or an adapter: ``from_pretrained`` takes an adapter that lies
    beside a model, and one file of weights before several."""
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in (*UPLOADED, *CONFIGURATIONS))


def files_of(result: Result) -> list[Path]:
    """The files of a result that are uploaded, by their names; its code too, where its configuration names some."""
    found = {file for pattern in (*UPLOADED, *CONFIGURATIONS) for file in result.folder.glob(pattern) if file.is_file()}
    if not any(file.suffix == ".safetensors" for file in found):
        raise InputError(f"{result.folder} has no weights as safetensors; give the folder of a model or an adapter.")
    if any(_names_code(file) for file in found if file.name in ("config.json", "tokenizer_config.json")):
        found |= {*result.folder.glob("*.py")}
    return sorted(found)


def _names_code(configuration: Path) -> bool:
    return "auto_map" in json.loads(configuration.read_text(encoding="utf-8"))


def local_base_of(result: Result) -> str | None:
    """The folder that an adapter names as its base; None for an id on the hub, and for a model."""
    file = result.folder / "adapter_config.json"
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path") if file.is_file() else None
    return str(base) if base and not is_hub_id(str(base)) else None


def card_of(result: Result) -> str:
    """The model card, without the name of a base that is a folder here: the hub takes names of its models only."""
    file = result.folder / CARD
    text = file.read_text(encoding="utf-8") if file.is_file() else f"# {result.folder.resolve().name}\n"
    base = _BASE.search(text)
    if base and not is_hub_id(base[0].partition(":")[2].strip()):
        text = _BASE.sub("", text, count=1)
    return text
