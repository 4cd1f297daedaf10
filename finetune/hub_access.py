"""Check access to a model or dataset on the hub: once, within seconds, before a library loads it.

The libraries retry six times, half a minute per file, and then only name the last file they tried.
"""

import os
import re
import threading
from concurrent import futures
from pathlib import Path
from typing import Literal

from finetune.errors import InputError, first_line

Kind = Literal["model", "dataset"]
WAITS = "HF_HUB_ETAG_TIMEOUT"
"""The variable in which huggingface_hub is told how many seconds to wait for an answer."""
SECONDS = float(text) if (text := os.environ.get(WAITS, "")).isdecimal() and int(text) else 3.0
"""To wait for an answer, looking up the hub's name included: a command without access then ends within five. As in
huggingface_hub, 0 is as if it were not set."""
_ID = re.compile(r"(?:(?P<owner>\w[\w.-]*)/)?\w[\w.-]*")


def is_hub_id(name: str, *, needs_owner: bool = True) -> bool:
    """Whether a name can only be that of a model or dataset on the hub, ``owner/name``: what is here comes first, and
    in a folder that is here something may be missing.

    Args:
        needs_owner: otherwise ``gpt2`` is one too, as the oldest models are called.
    """
    found = _ID.fullmatch(name)
    if found is None or os.path.exists(name):
        return False
    return not needs_owner if found["owner"] is None else not os.path.isdir(found["owner"])


def missing_in_folder(name: str) -> str | None:
    """What is wrong with a name that could be an id of the hub, but for a folder of the owner's name that is here."""
    found = _ID.fullmatch(name)
    if found is None or not found["owner"] or os.path.exists(name) or not os.path.isdir(found["owner"]):
        return None
    return (
        f"there is no folder {name}, though there is a folder {found['owner']}; check the name, or, if the hub's is "
        f"meant, start in a folder that has no {found['owner']}."
    )


def refuse_without_access(
    name: str,
    file: str,
    *,
    kind: Kind = "model",
    revision: str | None = None,
    seconds: float = SECONDS,
    waits_if_busy: bool = True,
    instead: str | None = None,
    may_be_here: bool = True,
) -> bool:
    """Whether the hub is to be asked for a model or dataset; if not, the folder or the cache has it.

    A folder here needs no hub. A file that is missing in the repository is left to the library that loads it.

    Args:
        name: a folder here, or an id on the hub.
        file: whose metadata is asked for: the first that the library will ask for.
        revision: branch, tag or commit; None for the main branch.
        seconds: to wait for an answer.
        waits_if_busy: leave a hub that is busy to the library, which asks again for half a minute; otherwise that is no
            answer.
        instead: what else can be given; None for the folder of a model or dataset.
        may_be_here: otherwise the name is an id, whatever folders are here.

    Raises:
        InputError: with what to do to get it, if it is missing in a folder that is here, if the hub refuses it, or if
            the hub does not answer and the cache does not know it.
    """
    if may_be_here and Path(name).exists():
        return False
    if may_be_here and (missing := missing_in_folder(name)):
        raise InputError(missing[0].upper() + missing[1:])
    from huggingface_hub import errors, hf_hub_url, try_to_load_from_cache  # a tenth of a second

    try:
        url = hf_hub_url(name, file, repo_type=kind, revision=revision)
    except errors.HFValidationError as error:
        raise InputError(f"{name} is neither a local folder nor a hub id (owner/name); check the name.") from error
    failure = _failure(url, seconds)
    if failure is None:
        return True
    answered = isinstance(failure, errors.HfHubHTTPError) and (
        waits_if_busy or not _is_busy(failure.response.status_code)
    )
    if not answered and try_to_load_from_cache(name, file, repo_type=kind, revision=revision) is not None:
        return False
    why = _why_refused(failure, name, kind, revision) if answered else _why_silent(failure, name, kind)
    if why is not None:
        raise InputError(f"{why}, or give {instead or f'the folder of a {kind}'}.") from failure
    return True


def _is_busy(status_code: int) -> bool:
    """Whether the hub answers that it cannot answer now."""
    return status_code == 429 or status_code >= 500


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


def _why_silent(failure: Exception, name: str, kind: Kind) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    too = f"log in with `hf auth login` if the {kind} is gated"
    if isinstance(failure, OfflineModeIsEnabled):
        return f"{name} is not in the cache, and HF_HUB_OFFLINE prevents downloading it: unset it, {too}"
    reason = f"({first_line(failure)}), and {name} is not in the cache"
    if isinstance(failure, HfHubHTTPError):
        return f"The hub is busy {reason}: try again later, {too}"
    return f"The hub cannot be reached {reason}: check the network, {too}"


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
        return TimeoutError(f"no answer within {seconds:g} seconds; {WAITS}=30 waits longer")
    except (HTTPError, OSError) as error:
        return error
    return None
