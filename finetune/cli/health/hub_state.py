"""Whether the hub answers, and knows who asks."""

from collections.abc import Iterator

from finetune.cli.health.finding import Finding
from finetune.errors import InputError
from finetune.hub_access import refuse_without_access

PUBLIC = ("HuggingFaceTB/SmolLM2-135M-Instruct", "config.json")
"""A model that everybody may read: that of recipes/configs/sample.yaml. A token that is not valid is refused."""


def examine() -> Iterator[Finding]:
    """Ask the hub once, and wait for some seconds at most."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "ok", "not asked: HF_HUB_OFFLINE is set; models are read from folders and the cache")
        return
    try:
        answers = refuse_without_access(*PUBLIC, waits_if_busy=False, may_be_here=False)
    except InputError as error:
        reason, _, advice = str(error).rpartition(": ")
        yield Finding("hub", "warning", reason, advice[:1].upper() + advice[1:])
        return
    if not answers:
        seen = f"{constants.ENDPOINT} does not answer; {PUBLIC[0]} is in the cache"
        yield Finding("hub", "warning", seen, "Check the network. Models and data in folders or the cache can be used.")
        return
    yield Finding("hub", "ok", f"{constants.ENDPOINT} answers")
    if get_token() is None:
        yield Finding("hub login", "ok", "not logged in", "For gated models, such as Llama: hf auth login")
    else:
        yield Finding("hub login", "ok", "logged in")
