"""A conversation as text, as the model sees it in use, with the stretches that it generates.

One rule for every template: an answer's stretch is what follows the generation prompt of the conversation before it
(``add_generation_prompt``), up to the token at which generation stops. Whether the words, reasoning blocks and calls
of the row stand in that text is verified, never guessed. Answers share a text as long as the template goes on writing
them as they were generated; where it does not (it drops earlier reasoning, or moves the system's words to the last
question), the answer has a text of its own. If the template marks what is generated (``{% generation %}``), its marks
are used.

Example, ChatML: "a b" answered by "c d" renders to ``<|im_start|>user\\na b<|im_end|>\\n<|im_start|>assistant\\nc d
<|im_end|>\\n`` (in one line). The generation prompt of "a b" ends behind ``assistant\\n``, at character 53, and
``<|im_end|>`` ends at 66: the turn is "c d<|im_end|>", characters 53 to 66.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.data.call_arguments import with_json_arguments, written_as_python
from finetune.data.messages import (
    CLOSING,
    OPENED,
    Message,
    dropped,
    has_words,
    laid_between,
    pieces,
    reasoning_of,
    standing,
)
from finetune.data.templates import BEGINS, ENDS, Template
from finetune.errors import BadRow

Span = tuple[int, int]
"""First position and the one past the last."""

# what a template may raise beside its own errors: it calls the methods of texts, lists and numbers
_REFUSALS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_FREE_CHARACTERS, _CHARACTERS_PER_CHARACTER = 1_000_000, 16
"""A rendering may have so many characters, and so many more for each character of its conversation as JSON."""
_MOST_MESSAGES = 0xFFF0  # as many marks as the plane holds, less those of generation
_MOST_BY_THEMSELVES = 500_000
"""Messages times trained answers of a conversation whose answers are rendered one by one, which takes seconds."""
_MOST_OUTLINES = 10_000
_LEARNT_FROM = 64
"""Messages from which the outline of a longer plain conversation is continued."""
_FIRST_MARK = 0x100000  # Unicode's second private plane: finetune.data.formats lets no text have them
_MARK = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + _MOST_MESSAGES - 1)}]")
_TURN_MARK = re.compile(f"[{BEGINS}{ENDS}]")
_USE_ANOTHER = "set data.chat_template to a template that does"

Mode = tuple[tuple[str, bool | str], ...]
"""Variables by which templates are told whether the model is to reason before it answers."""
DEFAULT: Mode = ()
_THINKING: list[Mode] = [((name, on),) for name in ("enable_thinking", "thinking") for on in (True, False)]
_MODES: list[Mode] = [*_THINKING, (("reasoning_effort", "high"),)]


class TemplateRefuses(BadRow):
    """A conversation that the template was not made for."""


class RenderingTooLong(Exception):
    """A rendering far too long for its conversation; the message is a clause without a full stop."""


@dataclass(frozen=True)
class Rendering:
    """A text with one or several of a conversation's answers."""

    text: str
    turns: dict[int, Span]
    """By the index of the assistant's message, the characters that the model generates."""
    dropped: tuple[str, ...] = ()
    """What of the conversation does not stand in the text."""
    mode: Mode = DEFAULT
    """How the template was told to write it."""


@dataclass(frozen=True)
class _Outline:
    """What the template writes around the contents of plain messages with certain roles."""

    messages: int
    parts: list[str]
    """A part more than there are messages."""
    turns: dict[int, Span]
    """By the index of an answer, the generated characters before its content and behind it."""
    mode: Mode


class ChatTemplate:
    """Renders conversations and finds what the model generates in them. Sets no limit of time: its process does."""

    def __init__(self, template: Template) -> None:
        self.template, self.special = template, template.special
        self._ready = lru_cache(maxsize=2)(lambda with_tools: template.ready(with_tools=with_tools))
        text = f"{template.plain}{template.with_tools}"
        self._modes = [DEFAULT, *(mode for mode in _MODES if mode[0][0] in text)]
        self._last_specials = re.compile(rf"(?:{self.special.pattern})+(?=\s*\Z)")
        self._outlines: dict[tuple[Any, ...], list[_Outline] | None] = {}

    def text(
        self, messages: Sequence[Message], tools: list[Any] | None, *, prompt: bool = False, mode: Mode = DEFAULT
    ) -> str:
        """Text of a conversation, with the assistant's turn begun where ``prompt`` is set.

        Raises:
            BadRow: if the template refuses the conversation.
        """
        return self._render(self._ready(tools is not None)[0], messages, tools, prompt, mode)

    def _render(
        self,
        template: str,
        messages: Sequence[Message],
        tools: list[Any] | None,
        prompt: bool = False,
        mode: Mode = DEFAULT,
    ) -> str:
        if not messages:
            raise TemplateRefuses("the conversation has no messages")
        # as apply_chat_template of a tokenizer does: many templates write None where a key is there without a value
        said = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables: dict[str, Any] = {"add_generation_prompt": prompt, **self.template.variables, **dict(mode)}

        def rendered(said: list[Message]) -> str:
            texts: Any = render_jinja_template([said], tools, chat_template=template, **variables)
            return str(texts[0][0])

        try:
            try:
                text = rendered(said)
            except TypeError:  # some templates expect the arguments of calls as JSON text
                text = rendered(with_json_arguments(said))
            else:
                calls = [message for message in said if "tool_calls" in message]
                if calls and (as_python := written_as_python(calls, text)):  # so do others, which write what they get
                    as_json = rendered(with_json_arguments(said))
                    text = as_json if written_as_python(calls, as_json) < as_python else text
        except _REFUSALS as error:  # templates refuse what their model was not trained on
            raise TemplateRefuses(f"the chat template rejects the conversation ({error})") from None
        if len(text) > _FREE_CHARACTERS:
            most = _FREE_CHARACTERS + _CHARACTERS_PER_CHARACTER * len(json.dumps([said, tools], default=str))
            if len(text) > most:
                raise RenderingTooLong(f"more than {most:,} characters ({len(text):,})")
        return text

    def whole(self, messages: Sequence[Message], tools: list[Any] | None) -> Rendering:
        """Text of a conversation of which everything is trained.

        Raises:
            BadRow: if the template refuses the conversation.
        """
        return _checked(Rendering(self.text(messages, tools), {}), messages, tools)

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None, trained: Sequence[int] | None = None
    ) -> list[Rendering]:
        """The texts with a conversation's answers: one, or several where no single text has all as they are generated.

        Args:
            trained: indices of the assistant's messages that are asked for; None for all.

        Raises:
            BadRow: if the template refuses the conversation, or does not write an answer or its end.
        """
        if len(messages) > _MOST_MESSAGES:
            raise BadRow(f"it has {len(messages):,} messages, and at most {_MOST_MESSAGES:,} are supported; split it")
        if trained is None:
            trained = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        marking = self._ready(tools is not None)[1]
        if marking:
            marked = self._render(marking, messages, tools)
            return [_checked(self._marked_by_template(marked, messages, trained), messages, tools)]
        if not tools and all(len(message) == 2 for message in messages):
            known = self._by_outlines(messages, trained)
            if known is not None:
                return known
        return self._each_answer(messages, tools, trained)

    def _each_answer(
        self, messages: Sequence[Message], tools: list[Any] | None, trained: Sequence[int]
    ) -> list[Rendering]:
        if len(messages) * len(trained) > _MOST_BY_THEMSELVES:
            raise BadRow(
                f"it has {len(messages):,} messages, and about 1,000 are supported with tools, reasoning, or a "
                "template that changes what it wrote before; split it"
            )
        found: list[Rendering] = []
        for i in reversed(trained):  # the last text is the longest, and mostly has the earlier answers as well
            answer = self._answer(messages, i, tools)
            until = answer.turns[i][1]
            sharing = next((each for each in found if each.text.startswith(answer.text[:until])), None)
            if sharing is None:
                found.append(answer)
            else:
                sharing.turns[i] = answer.turns[i]
        found = [replace(each, turns=dict(sorted(each.turns.items()))) for each in reversed(found)]
        return [_checked(each, messages[: max(each.turns) + 1], tools) for each in found]

    def _answer(self, messages: Sequence[Message], i: int, tools: list[Any] | None) -> Rendering:
        """The prompt of an answer with what the model then generates."""
        what = f"message {i + 1} (assistant)"
        mode, prompt, written = self._behind_prompt(messages, i, tools)
        if written is None:
            raise BadRow(
                f"the chat template does not go on with {what} where its generation prompt ends; {_USE_ANOTHER}"
            )
        if not messages[i].get("tool_calls") and not has_words(messages[i], written):
            raise BadRow(f"the chat template does not write the words of {what}; {_USE_ANOTHER}")
        end = self._end(messages[i], written)
        if end is None:
            written = self._with_next_speaker(messages, i, tools, prompt, written) or ""
            end = len(written)
        if not end:
            raise BadRow(
                f"the chat template ends {what} without a special token, so the model would not learn to stop; "
                f"{_USE_ANOTHER}"
            )
        return Rendering(prompt + written, {i: (len(prompt), len(prompt) + end)}, mode=mode)

    def _behind_prompt(
        self, messages: Sequence[Message], i: int, tools: list[Any] | None
    ) -> tuple[Mode, str, str | None]:
        """The generation prompt of an answer, and what the template writes behind it; None if it does not go on there.

        In the template's own mode, or in that in which the model reasons as the answer does.
        """
        for mode in self._modes:
            prompt = self.text(messages[:i], tools, prompt=True, mode=mode)
            whole = self.text(messages[: i + 1], tools, mode=mode)
            if whole.startswith(prompt):
                return mode, prompt, whole[len(prompt) :]
        prompt, whole = self.text(messages[:i], tools, prompt=True), self.text(messages[: i + 1], tools)
        opened = OPENED.search(prompt)
        if opened and whole.startswith(prompt[: opened.start()]):  # the model reasons, and the template drops that
            rest = whole[opened.start() :]
            if rest.startswith(opened[1]):  # it writes the block itself, with other white space
                return DEFAULT, prompt, rest[len(opened[1]) :].lstrip()
            thought = "\n".join(reasoning_of(messages[i]))
            return DEFAULT, prompt, f"{thought}\n{CLOSING[opened[1]]}\n\n{rest}"
        return DEFAULT, prompt, self._behind_last_content(messages, i, tools)

    def _behind_last_content(self, messages: Sequence[Message], i: int, tools: list[Any] | None) -> str | None:
        """What the template writes of an answer behind the generation prompt, where it changes what is before that.

        Both renderings must agree from the content of the message before the answer on; or the generation prompt, with
        a special token in it, must occur once behind that content.
        """
        if messages[i - 1]["role"] == "assistant":
            return None
        mark = chr(_FIRST_MARK)
        asked = [*messages[: i - 1], {**messages[i - 1], "content": mark}]
        try:
            silent, begun, answered = (
                self.text(said, tools, prompt=prompt).rpartition(mark)
                for said, prompt in ((asked, False), (asked, True), ([*asked, messages[i]], False))
            )
        except TemplateRefuses:
            return None
        if not begun[1] or not answered[1]:
            return None
        if answered[2].startswith(begun[2]):
            return answered[2][len(begun[2]) :]
        header = begun[2].removeprefix(silent[2])
        known = begun == (*silent[:2], silent[2] + header) and self.special.search(header)
        return answered[2].partition(header)[2] if known and answered[2].count(header) == 1 else None

    def _end(self, message: Message, written: str) -> int | None:
        """Where generation stops in what is written of an answer: behind its words, at a token that ends turns.

        Where none of these is in it, behind the special tokens that it ends with.
        """
        words = [piece for piece in pieces(message) if standing(piece, written)]
        stops = [found.end() for found in self.special.finditer(written) if found[0] in self.template.ends]
        if not stops and (last := self._last_specials.search(written)):
            stops = [last.end()]
        return next((stop for stop in stops if all(standing(piece, written[:stop]) for piece in words)), None)

    def _with_next_speaker(
        self, messages: Sequence[Message], i: int, tools: list[Any] | None, prompt: str, written: str
    ) -> str | None:
        """What is written of an answer, up to the next speaker's token, if that is where generation stops."""
        follower, marks = "tool" if messages[i].get("tool_calls") else "user", (chr(_FIRST_MARK), chr(_FIRST_MARK + 1))
        written = written.rstrip()
        try:
            longer = self.text([*messages[: i + 1], {"role": follower, "content": marks[1]}], tools)
            if not longer.startswith(prompt + written):  # it writes the answer otherwise once another speaks
                answer = {"role": "assistant", "content": marks[0]}
                longer = self.text([*messages[:i], answer, {"role": follower, "content": marks[1]}], tools)
                behind = longer.rpartition(marks[0])[2]
            else:
                behind = longer[len(prompt + written) :]
        except TemplateRefuses:
            return None
        found = re.match(rf"\s*({self.special.pattern})", behind)
        return written + found[0] if found and found[1] in self.template.ends else None

    def _by_outlines(self, messages: Sequence[Message], trained: Sequence[int]) -> list[Rendering] | None:
        """Renderings of a plain conversation: the template's own text was learnt from an earlier one of these roles."""
        key = (*(message["role"] for message in messages), *trained)
        if key not in self._outlines:
            if len(self._outlines) >= _MOST_OUTLINES:
                self._outlines.clear()
            try:
                self._outlines[key] = self._outlines_of(messages, trained)
            except BadRow:  # not this conversation, but marks in its place
                self._outlines[key] = None
        outlines = self._outlines[key]
        if outlines is None:
            return None
        found = []
        for outline in outlines:
            text = self.text(messages[: outline.messages], None, mode=outline.mode)
            contents = laid_between(outline.parts, messages[: outline.messages], text)
            if contents is None:
                return None
            turns = {i: (contents[i][0] - lead, contents[i][1] + trail) for i, (lead, trail) in outline.turns.items()}
            found.append(Rendering(text, turns))
        return found

    def _outlines_of(self, messages: Sequence[Message], trained: Sequence[int]) -> list[_Outline] | None:
        if len(messages) > _LEARNT_FROM + 1:
            long = self._continued(messages, trained)
            return None if long is None else [long]
        marked = [{**message, "content": chr(_FIRST_MARK + i)} for i, message in enumerate(messages)]
        outlines = []
        for each in self._each_answer(marked, None, trained):
            count = max(each.turns) + 1
            if each.text != self.text(marked[:count], None, mode=each.mode) or _MARK.findall(each.text) != [
                message["content"] for message in marked[:count]
            ]:
                return None  # some content is dropped or moved, which is for the conversation itself to show
            turns = {}
            for i, (first, end) in each.turns.items():
                place = each.text.index(marked[i]["content"])
                turns[i] = place - first, end - place - 1
            outlines.append(_Outline(count, _MARK.split(each.text), turns, each.mode))
        return outlines

    def _continued(self, messages: Sequence[Message], trained: Sequence[int]) -> _Outline | None:
        """The outline of a long conversation: around each answer stands what stood around one of its first answers."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learnt = [i for i in answers if i < _LEARNT_FROM]
        start = self._outlines_of(messages[: max(learnt) + 1], learnt) if learnt else None
        if not start or len(start) != 1:
            return None
        count = max(trained) + 1
        marked = [{**message, "content": chr(_FIRST_MARK + i)} for i, message in enumerate(messages[:count])]
        text = self.text(marked, None, mode=start[0].mode)
        parts = _MARK.split(text)
        if _MARK.findall(text) != [message["content"] for message in marked]:
            return None
        known = {(start[0].parts[i], start[0].parts[i + 1]): turn for i, turn in start[0].turns.items()}
        turns = {i: known.get((parts[i], parts[i + 1])) for i in trained}
        found = {i: turn for i, turn in turns.items() if turn is not None}
        return _Outline(count, parts, found, start[0].mode) if len(found) == len(turns) else None

    def _marked_by_template(self, rendered: str, messages: Sequence[Message], trained: Sequence[int]) -> Rendering:
        marks, parts = "".join(_TURN_MARK.findall(rendered)), _TURN_MARK.split(rendered)
        text, places = "".join(parts), list(accumulate(map(len, parts)))[:-1]
        turns = list(zip(places[::2], places[1::2]))
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if marks != (BEGINS + ENDS) * len(answers) or not all(
            has_words(messages[i], text[first:end]) for i, (first, end) in zip(answers, turns)
        ):
            raise BadRow(
                f"the chat template marks {marks.count(BEGINS)} spans as generated, but the assistant speaks "
                f"{len(answers)} times or in other words; fix its generation marks"
            )
        found = {i: (first, self._end_of_marked(text, first, end)) for i, (first, end) in zip(answers, turns)}
        return Rendering(text, {i: found[i] for i in trained})

    def _end_of_marked(self, text: str, first: int, end: int) -> int:
        """Where a turn ends whose marks stop before, or a white space behind, the special tokens that end it."""
        inside = [found.end() for found in self.special.finditer(text, first, end)]
        if inside and not text[inside[-1] : end].strip():
            return inside[-1]
        behind = re.compile(rf"\s*(?:{self.special.pattern})").match(text, end)
        if behind is None:
            raise BadRow(
                "the chat template ends an assistant turn without a special token, so the model would not learn to "
                f"stop; {_USE_ANOTHER}"
            )
        return behind.end()


def _checked(rendering: Rendering, messages: Sequence[Message], tools: list[Any] | None) -> Rendering:
    """The rendering, with what is dropped of the conversation."""
    return replace(rendering, dropped=tuple(dropped(messages, tools, rendering.text, rendering.turns)))
