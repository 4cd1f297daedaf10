"""A tokenizer's chat template, made ready: the same today and tomorrow, and with marks of what is generated.

A template that writes today's date gets ``DATE`` instead: the same data must give the same tokens on another day.
Where it marks what the assistant generates (``{% generation %}``), the marks can be had as characters in the text.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from finetune.errors import BadRow

if TYPE_CHECKING:  # the process that renders starts in half a second, without tokenizers
    from transformers import PreTrainedTokenizerBase

DATE = datetime(2024, 7, 26)
"""The date that Llama 3's own template falls back to."""

BEGINS, ENDS = "\U0010fffc", "\U0010fffd"
"""Marks of generated text, from Unicode's second private plane: finetune.data.formats lets no text have them."""
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# Marks as a macro around each block: transformers' own tracker keeps one rendering at a time, for all threads.
_MARKING = f"{{% macro _mark() %}}{{{{ '{BEGINS}' + caller() + '{ENDS}' }}}}{{% endmacro %}}\n"


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
    ends: frozenset[str] = frozenset()
    """The special tokens at which generation stops, as far as they are known."""

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", ends: Iterable[str] = ()) -> "Template":
        """The chat template of a tokenizer that has one.

        Args:
            ends: tokens at which generation stops, beside the tokenizer's own.
        """
        specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        return cls(
            _chosen(tokenizer, None),
            _chosen(tokenizer, []),
            tokenizer.special_tokens_map,
            tuple(sorted(specials, key=lambda special: (-len(special), special))),
            frozenset(specials & {tokenizer.eos_token, *ends}),
        )

    @property
    def special(self) -> re.Pattern[str]:
        """Finds special tokens in a text."""
        return re.compile("|".join(map(re.escape, self.specials)) or "(?!)")

    def ready(self, *, with_tools: bool) -> tuple[str, str | None]:
        """The template for conversations with or without tools, and its form with marks where it has them.

        Raises:
            BadRow: if the tokenizer has several templates, and none of them for these.
        """
        template = self.with_tools if with_tools else self.plain
        if template is None:
            raise BadRow(
                "the tokenizer has several chat templates and no default; set data.chat_template to a Jinja file"
            )
        if "strftime_now" in template:
            template = _fixed_date() + template
        marking, marks = _GENERATION.subn(
            lambda tag: f"{tag[1]}{'endcall' if tag[2] else 'call _mark()'}{tag[3]}", template
        )
        return template, _MARKING + marking if marks else None


def _chosen(tokenizer: "PreTrainedTokenizerBase", tools: list[Any] | None) -> str | None:
    try:
        return tokenizer.get_chat_template(None, tools)
    except ValueError:  # several, and none of them is the default
        return None


def _fixed_date() -> str:
    """A macro that writes ``DATE`` in a template's format; in front of the template, and without a text of its own."""
    written = {"%F": "%Y-%m-%d", "%T": "%H:%M:%S"}
    written |= {f"%{code}": DATE.strftime(f"%{code}") for code in "aAbBcdfGHIjmMpSuUVwWxXyYzZ"}
    written |= {f"%-{code}": str(int(DATE.strftime(f"%{code}"))) for code in "dHIjmMSUWy"}  # without leading zeros
    filters = "".join(f" | replace('{code}', '{words}')" for code, words in written.items())
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n"
