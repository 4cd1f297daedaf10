"""What models are asked, as text and as tokens: conversations by the chat template, texts as they stand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.data.formats import Example
from finetune.data.template_process import Conversation, TemplateProcess
from finetune.errors import BadRow, refuse_if_any


@dataclass(frozen=True)
class Prompt:
    """What a model is to answer, or to continue."""

    source: str
    """Where it comes from, for the sentence that refuses it."""
    asked: Example
    record: dict[str, Any]
    """The row that it was read from, as it stands."""

    @classmethod
    def of_user(cls, source: str, text: str, *, is_plain: bool, system: str | None = None) -> "Prompt":
        """What a user says once, behind what the system says; or a text to continue."""
        begin = [] if system is None else [{"role": "system", "content": system}]
        talk = Example([*begin, {"role": "user", "content": text}])
        return cls(source, Example(None, prompt=text) if is_plain else talk, {"prompt": text})

    @property
    def is_text(self) -> bool:
        """It is continued as it stands, without a chat template."""
        return self.asked.messages is None


def as_text(prompt: Prompt) -> Prompt:
    """The same question without a chat template.

    Raises:
        BadRow: if it is more than what a user says once.
    """
    messages = prompt.asked.messages
    if messages is None:
        return prompt
    if len(messages) > 1:
        raise BadRow("it is a conversation of several messages, which only a chat template makes one text of")
    return Prompt(prompt.source, Example(None, prompt=messages[0]["content"]), prompt.record)


def texts_of(prompts: Sequence[Prompt], template: TemplateProcess) -> list[str]:
    """The text of each prompt, up to where its answer begins.

    Raises:
        InputError: with each prompt that the template refuses.
    """
    talks = [each for each in prompts if not each.is_text]
    rendered = iter(template.render([_conversation(each) for each in talks]) if talks else [])
    found, wrong = [], []
    for each in prompts:
        turns = None if each.is_text else next(rendered)
        if isinstance(turns, BadRow):
            wrong.append(f"{each.source}: {turns}; correct it, or leave it out.")
        else:
            found.append(each.asked.prompt if turns is None else turns[0].text)
    refuse_if_any(wrong)
    return found


def tokens_of(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str) -> list[int]:
    """The tokens of a prompt's text, behind the one that begins texts; a template writes its own.

    A tokenizer that also ends each text would have the model asked to go on behind its end.
    """
    begin = begin_of_text(tokenizer) if prompt.is_text else []
    return [*begin, *tokenizer(text, add_special_tokens=False)["input_ids"]]


def begin_of_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that a tokenizer writes in front of each text, if it does: its BOS."""
    first = tokenizer.bos_token_id
    return [first] if first is not None and first in tokenizer("")["input_ids"] else []


def room_problems(named: Sequence[str], tokens: Sequence[Sequence[int]], positions: int | None, name: str) -> list[str]:
    """Prompts that leave no position for an answer.

    Args:
        named: where each comes from.
        positions: None for a model without limit.
        name: of the model.
    """
    return [
        f"{source}: {len(ids):,} tokens leave no room for an answer, because {name} has {positions:,} "
        "positions; make it shorter."
        for source, ids in zip(named, tokens)
        if positions is not None and len(ids) >= positions
    ]


def _conversation(prompt: Prompt) -> Conversation:
    return Conversation(prompt.source, prompt.asked.messages or [], prompt.asked.tools, form="prompt")
