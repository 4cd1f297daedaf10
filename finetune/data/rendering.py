"""Text of conversations by a tokenizer's chat template, the same today and tomorrow, with the template's own marks.

A template that writes today's date gets ``DATE`` instead: the same data must give the same tokens on another day.
Where it marks what the assistant generates (``{% generation %}``), the marks can be had as characters in the text.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.errors import BadRow

if TYPE_CHECKING:  # the process that renders starts in half a second, without tokenizers
    from transformers import PreTrainedTokenizerBase

DATE = datetime(2024, 7, 26)
"""The date that Llama 3's own template falls back to."""

Message = dict[str, Any]

BEGINS, ENDS = "\U0010fffc", "\U0010fffd"
"""Marks of generated text, from Unicode's second private plane: finetune.data.formats lets no text have them."""
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# what a template may raise beside its own errors: it calls the methods of texts, lists and numbers
_REFUSALS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
# Marks as a macro around each block: transformers' own tracker keeps one rendering at a time, for all threads.
_MARKING = f"{{% macro _mark() %}}{{{{ '{BEGINS}' + caller() + '{ENDS}' }}}}{{% endmacro %}}\n"


_FREE_CHARACTERS, _CHARACTERS_PER_CHARACTER = 1_000_000, 16
"""A rendering may have so many characters, and so many more for each character of its conversation as JSON."""


class TemplateRefuses(BadRow):
    """A conversation that the template was not made for."""


class RenderingTooLong(Exception):
    """A rendering far too long for its conversation; the message is a clause without a full stop."""


@dataclass(frozen=True)
class Template:
    """What a tokenizer brings to the rendering of a conversation; it can be sent to another process."""

    plain: str | None
    """Jinja text for conversations without tools; None where none of several templates is the default."""
    with_tools: str | None
    variables: dict[str, Any]
    """Special tokens by the names that templates know them under."""
    specials: tuple[str, ...]
    """Every special token, the longest first."""

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase") -> "Template":
        """The chat template of a tokenizer that has one."""
        specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        return cls(
            _chosen(tokenizer, None),
            _chosen(tokenizer, []),
            tokenizer.special_tokens_map,
            tuple(sorted(specials, key=lambda special: (-len(special), special))),
        )

    @property
    def special(self) -> re.Pattern[str]:
        """Finds special tokens in a text."""
        return re.compile("|".join(map(re.escape, self.specials)) or "(?!)")


def _chosen(tokenizer: "PreTrainedTokenizerBase", tools: list[Any] | None) -> str | None:
    try:
        return tokenizer.get_chat_template(None, tools)
    except ValueError:  # several, and none of them is the default
        return None


class Renderer:
    """One tokenizer's chat template. Sets no limit of time: ``template_process`` does."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self._templates: dict[bool, tuple[str, str | None]] = {}

    def text(self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """Text of a conversation, with the assistant's turn begun where ``prompt`` is set.

        Raises:
            BadRow: if the template refuses the conversation.
        """
        return self._render(self._template(tools)[0], messages, tools, prompt)

    def marks(self, tools: list[Any] | None) -> bool:
        """Whether the template marks what is generated."""
        return self._template(tools)[1] is not None

    def marked_text(self, messages: Sequence[Message], tools: list[Any] | None) -> str:
        """Text of a conversation with ``BEGINS`` and ``ENDS`` around what the template marks as generated.

        Raises:
            BadRow: if the template refuses the conversation.
        """
        template, marking = self._template(tools)
        return self._render(marking or template, messages, tools)

    def _render(self, template: str, messages: Sequence[Message], tools: list[Any] | None, prompt: bool = False) -> str:
        if not messages:
            raise TemplateRefuses("the conversation has no messages")
        # as apply_chat_template of a tokenizer does: many templates write None where a key is there without a value
        said = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            rendered: Any = render_jinja_template(
                [said], tools, chat_template=template, add_generation_prompt=prompt, **self.template.variables
            )
        except _REFUSALS as error:  # templates refuse what their model was not trained on
            raise TemplateRefuses(f"the chat template rejects the conversation ({error})") from None
        text: str = rendered[0][0]
        if len(text) > _FREE_CHARACTERS:
            most = _FREE_CHARACTERS + _CHARACTERS_PER_CHARACTER * len(json.dumps([said, tools], default=str))
            if len(text) > most:
                raise RenderingTooLong(f"more than {most:,} characters ({len(text):,})")
        return text

    def _template(self, tools: list[Any] | None) -> tuple[str, str | None]:
        """The template for conversations with or without tools, and its form with marks where it has them."""
        with_tools = tools is not None
        if with_tools not in self._templates:
            template = self.template.with_tools if with_tools else self.template.plain
            if template is None:
                raise BadRow(
                    "the tokenizer has several chat templates and no default; set data.chat_template to a Jinja file"
                )
            if "strftime_now" in template:
                template = _fixed_date() + template
            marking, marks = _GENERATION.subn(
                lambda tag: f"{tag[1]}{'endcall' if tag[2] else 'call _mark()'}{tag[3]}", template
            )
            self._templates[with_tools] = template, _MARKING + marking if marks else None
        return self._templates[with_tools]


def _fixed_date() -> str:
    """A macro that writes ``DATE`` in a template's format; in front of the template, and without a text of its own."""
    written = {"%F": "%Y-%m-%d", "%T": "%H:%M:%S"}
    written |= {f"%{code}": DATE.strftime(f"%{code}") for code in "aAbBcdfGHIjmMpSuUVwWxXyYzZ"}
    written |= {f"%-{code}": str(int(DATE.strftime(f"%{code}"))) for code in "dHIjmMSUWy"}  # without leading zeros
    filters = "".join(f" | replace('{code}', '{words}')" for code, words in written.items())
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n"
