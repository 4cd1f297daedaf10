"""A conversation as text, with the spans that the assistant wrote: its words and the end of its turn.

Spans are found by rendering, with any chat template, and verified against the text; never guessed. If the template
marks them itself (``{% generation %}``), its marks are used. Limit: a template that changes an answer (other than white
space around it) is refused, unless it marks the result.

Example, ChatML: "a b" answered by "c d" renders to ``<|im_start|>user\\na b<|im_end|>\\n<|im_start|>assistant\\nc d
<|im_end|>\\n`` (in one line). A second rendering with a mark in place of each content gives the three parts around
them; laid against the text, they leave the turn "c d<|im_end|>", characters 53 to 66.

A template that writes today's date gets ``DATE`` instead: the same data must give the same tokens on another day.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.errors import BadRow

if TYPE_CHECKING:  # the process that renders starts in half a second, without tokenizers
    from transformers import PreTrainedTokenizerBase

DATE = datetime(2024, 7, 26)
"""The date that Llama 3's own template falls back to."""

Message = dict[str, Any]
Span = tuple[int, int]
"""First position and the one past the last."""

BEGINS, ENDS = "\U0010fffc", "\U0010fffd"
"""Marks of generated text, from Unicode's second private plane: finetune.data.formats lets no text have them."""
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
# what a template may raise beside its own errors: it calls the methods of texts, lists and numbers
_REFUSALS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
# Marks as a macro around each block: transformers' own tracker keeps one rendering at a time, for all threads.
_MARKING = f"{{% macro _mark() %}}{{{{ '{BEGINS}' + caller() + '{ENDS}' }}}}{{% endmacro %}}\n"
_FREE_CHARACTERS, _CHARACTERS_PER_CHARACTER = 1_000_000, 16
"""A rendering may have so many characters, and so many more for each character of its conversation as JSON."""

_FIRST_MARK = 0x100000  # Unicode's second private plane: finetune.data.formats lets no text have them
_MOST_MESSAGES = 0xFFF0  # as many marks as the plane holds, less those of generation
_MARK = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + _MOST_MESSAGES - 1)}]")
_TURN_MARK = re.compile(f"[{BEGINS}{ENDS}]")
_USE_ANOTHER = "set data.chat_template to a template that does, or data.train_on to all"


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


class ChatTemplate:
    """Renders conversations and finds the assistant's turns."""

    def __init__(self, template: Template) -> None:
        self.renderer, self.special = Renderer(template), template.special
        self._outlines: dict[tuple[str, ...], list[str] | None] = {}

    def render(self, messages: Sequence[Message], tools: list[Any] | None) -> tuple[str, list[Span]]:
        """Text of a conversation, and the characters of each assistant turn with the token that ends it.

        Raises:
            BadRow: if the template refuses the conversation, or does not let its answers be found.
        """
        if len(messages) > _MOST_MESSAGES:
            raise BadRow(f"it has {len(messages):,} messages, and at most {_MOST_MESSAGES:,} are supported; split it")
        if self.renderer.marks(tools):
            return self._marked_by_template(self.renderer.marked_text(messages, tools), messages)
        text = self.text(messages, tools)
        for find in (self._by_known_outline, self._by_outline, self._by_neighbours, self._by_prefixes):
            try:
                turns = find(messages, tools, text)
            except TemplateRefuses:  # not this conversation, but what was made of it to find the turns
                continue
            if turns is not None:
                return text, turns
        raise BadRow(
            "the chat template does not render the assistant's messages verbatim, so the trained tokens cannot be "
            f"located; {_USE_ANOTHER}"
        )

    def text(self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """Text of a conversation, with the assistant's turn begun where ``prompt`` is set.

        Raises:
            BadRow: if the template refuses the conversation.
        """
        return self.renderer.text(messages, tools, prompt=prompt)

    def _marked_by_template(self, rendered: str, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        marks, pieces = "".join(_TURN_MARK.findall(rendered)), _TURN_MARK.split(rendered)
        text, places = "".join(pieces), list(accumulate(map(len, pieces)))[:-1]
        turns = list(zip(places[::2], places[1::2]))
        answers = [message for message in messages if message["role"] == "assistant"]
        if marks != (BEGINS + ENDS) * len(answers) or not all(
            _says(text[first:end], answer) for answer, (first, end) in zip(answers, turns)
        ):
            raise BadRow(
                f"the chat template marks {marks.count(BEGINS)} spans as generated, but the assistant speaks "
                f"{len(answers)} times or in other words; fix its generation marks"
            )
        return text, [(first, self._end_of_marked(text, first, end)) for first, end in turns]

    def _end_of_marked(self, text: str, first: int, end: int) -> int:
        """Where a turn ends whose marks stop before, or a white space behind, the special token that ends it."""
        inside = [found.end() for found in self.special.finditer(text, first, end)]
        if inside and not text[inside[-1] : end].strip():
            return inside[-1]
        return end + self._end_of_turn(text[end:], "an assistant turn")

    def _end_of_turn(self, after: str, what: str) -> int:
        """Of the text after an answer, the characters that end the turn."""
        if self._closing and after.startswith(self._closing):
            return len(self._closing)
        end = self.special.search(after)
        if end is None or after[: end.start()].strip():  # other words before it are the next speaker's
            raise BadRow(_no_end(what))
        return end.end()

    @cached_property
    def _closing(self) -> str:
        """What the template writes behind an answer that ends the conversation, up to its special tokens in a row.

        Empty if it has none there, or refuses the conversation that shows it.
        """
        question, answer = chr(_FIRST_MARK), chr(_FIRST_MARK + 1)
        try:
            text = self.text([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], None)
        except BadRow:
            return ""
        found = re.match(f".*?(?:{self.special.pattern})+", text.rpartition(answer)[2], re.DOTALL)
        return found[0] if found else ""

    def _by_known_outline(self, messages: Sequence[Message], tools: list[Any] | None, text: str) -> list[Span] | None:
        """Turns of a plain conversation: the template's own text was learnt from an earlier one with the same roles."""
        if tools or any(len(message) > 2 for message in messages):
            return None
        roles = tuple(message["role"] for message in messages)
        if roles not in self._outlines:
            self._outlines[roles] = self._outline(messages, range(len(messages)), None)
        parts = self._outlines[roles]
        return None if parts is None else self._match(parts, list(enumerate(messages)), text)

    def _by_outline(self, messages: Sequence[Message], tools: list[Any] | None, text: str) -> list[Span] | None:
        """Turns by a second rendering, with a mark in place of each answer: the texts must agree everywhere else."""
        answers = [(i, message) for i, message in enumerate(messages) if message["role"] == "assistant"]
        parts = self._outline(messages, [i for i, _ in answers], tools)
        return None if parts is None else self._match(parts, answers, text)

    def _outline(self, messages: Sequence[Message], places: Sequence[int], tools: list[Any] | None) -> list[str] | None:
        """What the template writes around the messages at these places, a part more than there are of them.

        ``None`` if it does not write each of them once and in order.
        """
        outlined, marks = list(messages), [chr(_FIRST_MARK + place) for place in places]
        for place, mark in zip(places, marks):
            # an answer stands for all that its turn may hold, such as calls; of others, all but the words is kept
            kept = {} if messages[place]["role"] == "assistant" else messages[place]
            outlined[place] = {**kept, "role": messages[place]["role"], "content": mark}
        outline = self.text(outlined, tools)
        return _MARK.split(outline) if _MARK.findall(outline) == marks else None

    def _match(self, parts: list[str], contents: list[tuple[int, Message]], text: str) -> list[Span] | None:
        """Lay the outline's parts against the text, with each content between two of them."""
        turns: list[Span] = []
        if not text.startswith(parts[0]):
            return None
        position = len(parts[0])
        for (i, message), after in zip(contents, parts[1:]):
            first = position
            if message.get("tool_calls"):
                # what the template makes of a call is not known, but no text in it holds a special token
                position = text.find(after, first) if self.special.search(after) else -1
                if position == -1 or not _says(text[first:position], message):
                    return None
            else:
                words = _as_rendered(message["content"], after, text, first)
                if words is None:
                    return None
                position += words
            if message["role"] == "assistant":
                turns.append((first, position + self._end_of_turn(after, f"message {i + 1} (assistant)")))
            position += len(after)
        return turns if position == len(text) else None

    def _by_neighbours(self, messages: Sequence[Message], tools: list[Any] | None, text: str) -> list[Span] | None:
        """Turns between the messages before and behind: from where a prompt ends to what closes any turn.

        For templates that write a message otherwise when it is the last one, or refuse results without their call.
        """
        places = [i for i, message in enumerate(messages) if message["role"] in ("user", "tool")]
        before = {i - 1 for i, message in enumerate(messages) if message["role"] == "assistant"}
        parts = self._outline(messages, places, tools) if before.issubset(places) and self._closing else None
        if parts is None or not text.startswith(parts[0]):
            return None
        turns: list[Span] = []
        position = len(parts[0])
        for i, after in zip(places, parts[1:]):
            words = _as_rendered(messages[i]["content"], after, text, position)
            if words is None:
                return None
            position += words
            if i in before:
                mark = chr(_FIRST_MARK)
                prompt = self.text([*messages[:i], {**messages[i], "content": mark}], tools, prompt=True)
                begun = prompt.rpartition(mark)[2]
                end = after.find(self._closing, len(begun))
                if not after.startswith(begun) or end == -1 or not _says(after[len(begun) : end], messages[i + 1]):
                    return None
                turns.append((position + len(begun), position + end + len(self._closing)))
            position += len(after)
        return turns if position == len(text) else None

    def _by_prefixes(self, messages: Sequence[Message], tools: list[Any] | None, text: str) -> list[Span] | None:
        """Turns as what each assistant message adds to the text of those before it."""
        turns = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.text(messages[:i], tools, prompt=True), self.text(messages[: i + 1], tools)
            ends = [found.end() for found in self.special.finditer(after, len(before))]
            if not text.startswith(after) or not after.startswith(before):
                return None
            if not _says(after[len(before) :], message):
                return None
            if not ends:
                raise BadRow(_no_end(f"message {i + 1} (assistant)"))
            turns.append((len(before), ends[-1]))
        return turns


def _as_rendered(content: str, after: str, text: str, position: int) -> int | None:
    """Characters of a content at a position of the text, as it stands or stripped; ``None`` unless one of them fits."""
    forms = [form for form in {content, content.strip()} if text.startswith(form + after, position)]
    return len(forms[0]) if len(forms) == 1 else None


def _says(turn: str, message: Message) -> bool:
    """Whether a turn's text has the words of the message, and the names of the tools that it calls."""
    names = (call["function"]["name"] for call in message.get("tool_calls", ()))
    return message["content"].strip() in turn and all(name in turn for name in names)


def _no_end(what: str) -> str:
    return (
        f"the chat template ends {what} without a special token, so the model would not learn to stop; {_USE_ANOTHER}"
    )
