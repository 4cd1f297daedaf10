"""Conversations rendered in a separate process, which is killed if a chat template needs too much time or memory.

A chat template is a program that comes with a model. Jinja's sandbox keeps it from files and from Python's insides,
but not from loops within loops, ``'a' * 10**10`` or ``9 ** (9 ** 9)``. The last two are one operation of Python each,
which no exception, signal handler or other thread can stop; the kernel can stop a process. Time is the CPU time of
that process, so a busy machine refuses nothing. Limit: memory is limited on Linux only.

The child has a socket as its standard input. From there it reads pickled questions (a pickled ``Template``, and
``Conversation``s with their seconds) until it is closed, and writes a pickled answer for each conversation as soon as
it has one: see ``serve``.
"""

import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedRWPair
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import psutil

from finetune.data.chat_template import ChatTemplate, Rendering, RenderingTooLong
from finetune.data.messages import Message
from finetune.data.templates import Template
from finetune.errors import BadRow, InputError, RunStopped
from finetune.units import GIB

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS, SECONDS_PER_MESSAGE = 10.0, 0.05
"""What rendering a conversation and finding its turns may take. Measured on real templates: a millisecond for ten
messages, 2 seconds for 65,000; where turns are found by rendering every beginning, 3 seconds for 1,000."""
MEMORY_BYTES = 4 * GIB
"""What the process may take beyond what it has when it starts."""
_START = "import sys; sys.path[:] = sys.argv[1:]; from finetune.data.template_process import serve; serve()"


@dataclass(frozen=True)
class Conversation:
    """What is to be rendered."""

    source: str
    """``file:line`` it came from, for the sentence that refuses it."""
    messages: Sequence[Message]
    tools: list[Any] | None
    form: Literal["turns", "text", "prompt"]
    """turns: the texts with the answers that are trained. text: one text, with everything. prompt: the same, with a
    turn begun."""
    trained: tuple[int, ...] | None = None
    """Indices of the answers that are trained, for the form "turns"; None for all."""


Rendered = list[Rendering]
"""The texts of a conversation: one, but for answers that no single text has as they are generated."""


class TemplateProcess:
    """Renders with one tokenizer's chat template. May be shared between threads.

    All of a process's own share one child; it ends when the last of them is gone.

    Args:
        ends: tokens at which generation stops, beside the tokenizer's own.
        seconds: CPU time for a conversation, to which ``SECONDS_PER_MESSAGE`` come.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", *, ends: Iterable[str] = (), seconds: float = SECONDS
    ) -> None:
        template = Template.of(tokenizer, ends)
        self._seconds = seconds
        self.special = template.special
        """Finds the tokenizer's special tokens in a text."""
        self._pickled = pickle.dumps(template)
        self._child = shared_child()
        self._refusal: str | None = None

    def render(self, conversations: Sequence[Conversation]) -> list[Rendered | BadRow]:
        """The text of each conversation, or why it cannot be trained.

        Raises:
            InputError: if the template exceeds its limits; from then on at every call, so that no thread waits for
                another try.
        RunStopped: if the child failed, for a reason that is not the template's.
        """
        if not conversations:  # plain texts need no child
            return []
        with self._child.lock:
            if self._refusal is None:
                seconds = [self._seconds + SECONDS_PER_MESSAGE * len(each.messages) for each in conversations]
                answers = self._child.answers(self._pickled, list(zip(conversations, seconds)))
                rendered = [answer for answer in answers if not isinstance(answer, str)]
                if len(rendered) == len(conversations):
                    return rendered
                why = f"{conversations[len(rendered)].source}: the chat template {answers[-1]}"
                self._refusal = f"{why}; set data.chat_template to a different template file, or fix this one."
        raise InputError(self._refusal)


def end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The special token with which a tokenizer's chat template ends an answer, whatever the model's files say of it:
    it is trained like the answer. None where there is no such one.

    Raises:
        InputError: if the template exceeds its limits.
    """
    if tokenizer.chat_template is None:
        return None
    template = TemplateProcess(tokenizer)
    if template._pickled not in _endings:  # a child takes a second to start
        _endings[template._pickled] = _ending(template)
    token = tokenizer.convert_tokens_to_ids(_endings[template._pickled] or "")
    return token if isinstance(token, int) else None


def _ending(template: TemplateProcess) -> str | None:
    """The special token at the end of an answer."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (found,) = template.render([Conversation("a question of one letter", messages, None, "turns")])
    if isinstance(found, BadRow):
        return None
    first, end = found[-1].turns[1]
    last = re.search(rf"(?:{template.special.pattern})\Z", found[-1].text[first:end])
    return last[0] if last else None


_endings: dict[bytes, str | None] = {}
"""Of the templates that this process has asked for, by what is sent of them."""


class _Child:
    """The process, started at its first question, and again at the next one after it was ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], BufferedRWPair] | None = None
        self._end: weakref.finalize

    def answers(
        self, template: bytes, conversations: Sequence[tuple[Conversation, float]]
    ) -> list[Rendered | BadRow | str]:
        """The result of each conversation; a clause, and nothing after it, where the template reached a limit.

        Args:
            template: a pickled ``Template``.
        """
        process, channel = self._running or self._started()
        found: list[Rendered | BadRow | str] = []
        complete = False
        try:
            with suppress(ConnectionError):  # why it ended is said below
                pickle.dump((template, conversations), channel)
                channel.flush()
            for _, seconds in conversations:
                try:
                    found.append(pickle.load(channel))
                except (EOFError, ConnectionError, pickle.UnpicklingError):
                    found.append(_why_ended(process.wait(), seconds))
                if isinstance(found[-1], str):
                    return found
            complete = True
            return found
        finally:
            if not complete:  # what is still to be read would be taken for the answers to the next question
                self._running = None
                self._end()

    def _started(self) -> "tuple[subprocess.Popen[bytes], BufferedRWPair]":
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # in a session of its own: what a terminal signals is for the run, which then lets its child end
            process = subprocess.Popen(
                [sys.executable, "-c", _START, *sys.path], stdin=theirs.fileno(), stdout=2, start_new_session=True
            )
            channel = ours.makefile("rwb")  # which keeps the socket open
        self._running = process, channel
        self._end = weakref.finalize(self, _end, process, channel)
        return process, channel


def _end(process: "subprocess.Popen[bytes]", channel: BufferedRWPair) -> None:
    """Nothing is read, so that a fork of the process that asked does not wait for a child that is not its own."""
    process.kill()
    with suppress(ConnectionError):
        channel.close()
    process.wait()


def _why_ended(code: int, seconds: float) -> str:
    if code == -signal.SIGPROF:
        return f"was still rendering this conversation after {seconds:.1f} seconds of CPU time"
    if code < 0:
        return f"crashed the process that renders it ({signal.Signals(-code).name})"
    raise RunStopped(f"The chat template process failed with exit code {code}; see the error above.")


_children: "WeakValueDictionary[int, _Child]" = WeakValueDictionary()
_starting = threading.Lock()


def shared_child() -> _Child:
    """The child that everything in this process shares while somebody holds it; a fork of it gets its own."""
    with _starting:
        child = _children.get(os.getpid())
        if child is None:
            child = _children[os.getpid()] = _Child()
        return child


def serve() -> None:
    """Answer questions until there are no more."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # when whoever asked is gone
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # when the time is over; it may have been ignored by whoever asked
    if sys.platform == "linux":  # where the kernel keeps to it
        most, (_, hard) = psutil.Process().memory_info().vms + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    template_of = lru_cache(maxsize=16)(lambda pickled: ChatTemplate(pickle.loads(pickled)))
    channel = socket.socket(fileno=0).makefile("rwb")
    while True:
        try:
            pickled, conversations = pickle.load(channel)
        except EOFError:
            return
        for conversation, seconds in conversations:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = pickle.dumps(_answer(template_of(pickled), conversation))
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.write(answer)
            channel.flush()


def _answer(template: ChatTemplate, conversation: Conversation) -> Rendered | BadRow | str:
    messages, tools = conversation.messages, conversation.tools
    try:
        if conversation.form == "turns":
            return template.render(messages, tools, conversation.trained)
        if conversation.form == "text":
            return [template.whole(messages, tools)]
        return [Rendering(template.text(messages, tools, prompt=True), {})]
    except BadRow as reason:
        return reason
    except RenderingTooLong as reason:
        return f"renders {reason} for this conversation"
    except MemoryError:
        return f"needs more than {MEMORY_BYTES // GIB} GiB of memory to render this conversation"
