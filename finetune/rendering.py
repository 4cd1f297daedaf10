"""Text of conversations by a tokenizer's chat template, the same today and tomorrow, with the template's own marks.

A template that writes today's date gets ``DATE`` instead: the same data must give the same tokens on another day.
Where it marks what the assistant generates (``{% generation %}``), the marks can be had as characters in the text.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from .errors import BadRow

DATE = datetime(2024, 7, 26)
"""The date that Llama 3's own template falls back to."""

Message = dict[str, Any]

BEGINS, ENDS = "\U0010fffc", "\U0010fffd"
"""Marks of generated text, from Unicode's second private plane: finetune.formats lets no text have them."""
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# what a template may raise beside its own errors: it calls the methods of texts, lists and numbers
_REFUSALS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
# Marks as a macro around each block: transformers' own tracker keeps one rendering at a time, for all threads.
_MARKING = f"{{% macro _mark() %}}{{{{ '{BEGINS}' + caller() + '{ENDS}' }}}}{{% endmacro %}}\n"


class TemplateRefuses(BadRow):
    """A conversation that the template was not made for."""


class Renderer:
    """One tokenizer's chat template. May be shared between threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
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
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
        except _REFUSALS as error:  # templates refuse what their model was not trained on
            raise TemplateRefuses(f"the chat template refuses the conversation ({error})") from None
        assert isinstance(text, str)
        return text

    def _template(self, tools: list[Any] | None) -> tuple[str, str | None]:
        """The template for conversations with or without tools, and its form with marks where it has them."""
        with_tools = tools is not None
        if with_tools not in self._templates:
            try:
                template = self.tokenizer.get_chat_template(None, tools)
            except ValueError:
                raise BadRow(
                    "the tokenizer has several chat templates, and none of them is the default; set "
                    "data.chat_template to a Jinja file"
                ) from None
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
