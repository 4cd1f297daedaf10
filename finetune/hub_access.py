"""Check access to a model or dataset on the hub: once, within seconds, before a library loads it.

The libraries retry six times, half a minute per file, and then only name the last file they tried.
"""

import threading
from concurrent import futures
from pathlib import Path
from typing import Literal

from finetune.errors import InputError, first_line

Kind = Literal["model", "dataset"]
SECONDS = 5.0
"""To wait for an answer, looking up the hub's name included."""


def refuse_without_access(
    name: str, file: str, *, kind: Kind = "model", revision: str | None = None, seconds: float = SECONDS
) -> None:
    """Nothing, unless the hub refuses a model or dataset, or does not answer and the cache does not know it either.

    A folder here needs no hub. A file that is missing in the repository, and a hub that is busy, are left to the
    library that loads it.

    Args:
        name: a folder here, or an id on the hub.
        file: whose metadata is asked for: the first that the library will ask for.
        revision: branch, tag or commit; None for the main branch.
        seconds: to wait for an answer.

    Raises:
        InputError: with what to do to get it.
    """
    if Path(name).exists():
        return
    from huggingface_hub import errors, hf_hub_url, try_to_load_from_cache  # a tenth of a second

    try:
        url = hf_hub_url(name, file, repo_type=kind, revision=revision)
    except errors.HFValidationError as error:
        raise InputError(f"{name} is neither a local folder nor a hub id (owner/name); check the name.") from error
    failure = _failure(url, seconds)
    answered = isinstance(failure, errors.HfHubHTTPError)
    if failure and (answered or try_to_load_from_cache(name, file, repo_type=kind, revision=revision) is None):
        why = _why_refused(failure, name, kind, revision) if answered else _why_silent(failure, name)
        if why is not None:
            raise InputError(f"{why}, or give the folder of a {kind}.") from failure


def _why_refused(failure: Exception, name: str, kind: Kind, revision: str | None) -> str | None:
    """What to do about an answer of the hub, None if it is none that refuses access."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    if isinstance(failure, errors.GatedRepoError):
        return f"No access to {name}: accept its terms at {page}, log in with `hf auth login`"
    if isinstance(failure, errors.RepositoryNotFoundError):
        return f"The hub has no {kind} {name}, or it is private: check the name, log in with `hf auth login`"
    if isinstance(failure, errors.RevisionNotFoundError):
        return f"{name} has no branch, tag or commit {revision}: check the revision"
    if isinstance(failure, errors.HfHubHTTPError) and failure.response.status_code in (401, 403):
        return f"No access to {name} ({first_line(failure)}): log in with `hf auth login`"
    return None


def _why_silent(failure: Exception, name: str) -> str:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(failure, OfflineModeIsEnabled):
        return f"{name} is not in the cache, and HF_HUB_OFFLINE prevents downloading it: unset it"
    return f"The hub cannot be reached ({first_line(failure)}), and {name} is not in the cache: check the network"


def _failure(url: str, seconds: float) -> Exception | None:
    """What a single request for a file's metadata ends in; None if that is an answer.

    On a thread that is left behind: looking up a name, and trying one address after another, knows no time limit.
    """
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import HTTPError

    answer: futures.Future[object] = futures.Future()

    def ask() -> None:
        try:
            answer.set_result(get_hf_file_metadata(url, timeout=seconds))
        except Exception as error:  # raised below
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer.result(seconds)
    except futures.TimeoutError:
        return TimeoutError(f"no answer within {seconds:g} seconds")
    except (HTTPError, OSError) as error:
        return error
    return None
