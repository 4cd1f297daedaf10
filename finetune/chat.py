"""A conversation as tokens, with the positions that are trained: the assistant's text and the end of its turn.

The mask is found by rendering, with any chat template: the conversation is rendered twice, once with a mark in
place of each answer, and the two texts must agree everywhere else. It is kept by position, never by token id, so
that a PAD token that equals the end of a turn cannot hide it. Limits: text contents only; a template that renders
an answer otherwise than as it stands (but for white space around it) is refused.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from transformers import AddedToken, PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant")
_MARKS = 0xF0000  # Unicode's supplementary private use area: text has no business there
_ANSWER_MARKS = 0x100000


@dataclass(frozen=True)
class Row:
    """A tokenised conversation."""

    tokens: list[int]
    trained: list[bool]
    """Per token, whether its prediction is trained."""
    source: str
    """``file:line`` it came from."""

    @property
    def trained_tokens(self) -> int:
        """Trained tokens that have a predecessor to be predicted from."""
        return sum(self.trained[1:])


class BadRow(ValueError):
    """A row that cannot be trained, with the reason as a sentence."""


def check_messages(messages: Any) -> None:
    """Refuse what is not a conversation with an answer.

    Raises:
        BadRow: with the reason.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRow("the key `messages` holds no list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow(f"message {number} is not an object with role and content")
        if message.get("role") not in ROLES:
            raise BadRow(f"message {number} has the role {message.get('role')!r}; known roles are {', '.join(ROLES)}")
        if message.get("tool_calls"):
            raise BadRow(f"message {number} calls tools, which this recipe does not render")
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            raise BadRow(f"message {number} ({message['role']}) has no text as content")
        if any(0xD800 <= ord(character) <= 0xDFFF or ord(character) >= _MARKS for character in content):
            raise BadRow(f"message {number} ({message['role']}) holds half a surrogate pair or a private character")
    if all(message["role"] != "assistant" for message in messages):
        raise BadRow("there is no assistant turn, so nothing to train on")
    if messages[0]["role"] == "assistant":
        raise BadRow("it begins with the assistant, so there is nothing that its answer could follow from")


class Encoder:
    """Conversations to rows, with one tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.specials = sorted(
            (token.content for token in tokenizer.added_tokens_decoder.values() if token.special), key=len, reverse=True
        )
        self.mark_of = {special: chr(_MARKS + i) for i, special in enumerate(self.specials)}

    def encode(self, messages: list[dict[str, str]], source: str) -> Row:
        """Render a conversation, tokenise it and mark what is trained.

        Strings in contents that look like special tokens stay text: marks take their places in the template,
        and are tokenised as the text they stand for.

        Raises:
            BadRow: if the messages are no conversation, or the template does not let the answers be found.
        """
        check_messages(messages)
        shielded = [{**message, "content": self._shield(message["content"])} for message in messages]
        text = self._render(shielded)
        turns = self._turns(shielded, text)
        if shielded == messages:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            tokens, spans = encoded["input_ids"], encoded["offset_mapping"]
        else:
            tokens, spans = self._tokenize_marks(text)
        trained = [any(start < last and end > first for first, last in turns) for start, end in spans]
        return Row(tokens, trained, source)

    def _shield(self, content: str) -> str:
        for special, mark in self.mark_of.items():
            if special in content:
                content = content.replace(special, mark)
        return content

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False)
        except jinja2.TemplateError as error:  # templates refuse what their model was not trained on
            raise BadRow(f"the chat template refuses the conversation ({error})") from None
        assert isinstance(text, str)
        return text

    def _turns(self, messages: list[dict[str, str]], text: str) -> list[tuple[int, int]]:
        """First and last character (exclusive) of each answer with the special token that ends its turn."""
        answers = {i: message["content"] for i, message in enumerate(messages) if message["role"] == "assistant"}
        marks = {i: chr(_ANSWER_MARKS + i) for i in answers}
        outline = self._render([{**m, "content": marks[i]} if i in marks else m for i, m in enumerate(messages)])
        turns, position = [], 0
        for i, answer in answers.items():
            before, mark, outline = outline.partition(marks[i])
            after = outline[: min((outline.find(m) for m in marks.values() if m in outline), default=len(outline))]
            start = position + len(before)
            forms = [form for form in (answer, answer.strip()) if text.startswith(form + after, start)]
            if not (mark and forms and text.startswith(before, position)):
                raise BadRow(
                    f"the chat template does not render message {i + 1} (assistant) as it stands, so the trained "
                    "tokens cannot be told; set data.chat_template to a template that does"
                )
            position = start + len(forms[0])
            ends = [after.find(special) + len(special) for special in self.specials if special in after]
            if not ends:
                raise BadRow(
                    f"the chat template ends message {i + 1} (assistant) without a special token, so the model could "
                    "not learn to stop; set data.chat_template to a template that does"
                )
            turns.append((start, position + min(ends)))
        return turns

    @cached_property
    def _tokenizer_with_marks(self) -> PreTrainedTokenizerBase:
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in self.mark_of.values()])
        return tokenizer

    def _tokenize_marks(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens and their characters, with each mark tokenised as the text that it stands for."""
        encoded = self._tokenizer_with_marks(text, add_special_tokens=False, return_offsets_mapping=True)
        literal = {mark: special for special, mark in self.mark_of.items()}
        tokens, spans = [], []
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
            own = [token]
            if text[start:end] in literal:
                own = self.tokenizer(literal[text[start:end]], add_special_tokens=False, split_special_tokens=True)[
                    "input_ids"
                ]
            tokens += own
            spans += [(start, end)] * len(own)
        return tokens, spans
