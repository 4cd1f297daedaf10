"""Messages and tool definitions in the one form that chat templates take, or the reason why not.

It is OpenAI's form. Variants from clients and older data are converted: contents as lists of text parts, arguments as
JSON text, ``function_call`` and the role ``function``. What a message says can be looked for in a rendered text.

For example, the pieces of an answer ``<think>\\nhm\\n</think>\\n\\nYes.`` are "hm" and "Yes.": templates that know
reasoning take the two apart, and write them with other white space.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from finetune.data.columns import check_characters, check_value, is_given, not_a_text, parsed
from finetune.errors import BadRow

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys of a message under which templates look for what the model thought."""
_BLOCKS = re.compile(
    r"(?:<think>.*?</think>|\[THINK\].*?\[/THINK\]|<\|START_THINKING\|>.*?<\|END_THINKING\|>"
    r"|<\|channel\|>analysis<\|message\|>.*?<\|end\|>|<\|channel>thought\n.*?<channel\|>)\s*",
    re.DOTALL,
)
"""Reasoning as templates write it."""
OPENED = re.compile(r"(<think>|\[THINK\])\s*\Z")
"""A block of reasoning that a generation prompt has opened."""
CLOSING = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_CLOSED = re.compile(r".*?(?:</think>|\[/THINK\])\s*", re.DOTALL)
_THOUGHT = re.compile(r"(?:<think>|\[THINK\])(.*?)(?:</think>|\[/THINK\])", re.DOTALL)
_TRAINED = ("weight", "train", "training", "loss")
"""Keys by which other tools say whether an answer is trained: true or false, 1 or 0."""
_UNSUPPORTED = ("train_detail", "training_detail")
_ARGUMENTS = ("arguments", "parameters", "input")
"""What the arguments of a call are called: by OpenAI, in Llama's answers, and by Anthropic."""
_OF_A_CALL = ("id", "type", "index", "function", "name")
_RESERVED = ("role", "content", "tool_calls", "function_call", *_TRAINED)


def canonical_messages(turns: list[Any]) -> tuple[list[Message], set[int]]:
    """Messages with ``role``, ``content`` (a string), ``tool_calls`` and all other keys with a string value.

    A system or developer message without text counts as absent, as an empty field for it does. A tool call is
    ``{"type": "function", "function": {"name": str, "arguments": dict}}``, preceded by its ``id`` if it has one.

    Returns:
        The messages, and the indices of assistant messages marked as not trained, such as with ``"weight": 0``.

    Raises:
        BadRow: naming the message by its number from 1.
    """
    messages: list[Message] = []
    untrained = set()
    for number, turn in enumerate(turns, start=1):
        if is_empty_instruction(turn):
            continue
        message = _message(turn, number)
        if message["role"] == "assistant" and len(turn) > 2 and not _is_trained(turn, f"message {number}"):
            untrained.add(len(messages))
        messages.append(message)
    return messages, untrained


def is_empty_instruction(turn: Any) -> bool:
    """Whether a turn is a system or developer message without text."""
    if not isinstance(turn, dict) or turn.get("role") not in ("system", "developer"):
        return False
    content = turn.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    return not content or (isinstance(content, str) and not content.strip())


def canonical_tools(value: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tool definitions of a row: its key ``tools``, a list or one as JSON text, or the older ``functions``.

    A bare function is wrapped as ``{"type": "function", "function": ...}``.

    Raises:
        BadRow: if they are not a list of objects.
    """
    key = "tools" if is_given(value.get("tools")) else "functions"
    tools = value.get(key)
    if isinstance(tools, str):
        tools = parsed(tools) if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"the key `{key}` is neither a list of objects nor JSON text of one")
    check_value(tools, f"the key `{key}`")
    return [{"type": "function", "function": t} if "name" in t and "function" not in t else t for t in tools]


def _message(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRow(f"message {number} is not an object with role and content")
    role = "tool" if turn.get("role") == "function" else turn.get("role")
    if role not in ROLES:
        shown = repr(role)[:40] if isinstance(role, str) else f"of type {type(role).__name__}"
        raise BadRow(f"message {number} has the role {shown}; known roles are {', '.join(ROLES)}")
    where = f"message {number} ({role})"
    content = turn.get("content")
    if isinstance(content, list):
        content = _joined(content, where)
    calls: list[dict[str, Any]] = []
    is_plain = len(turn) == 2 and "content" in turn
    if role == "assistant" and not is_plain:
        calls = _tool_calls(turn, where)
    if content is None and (calls or role == "tool"):  # Arrow gives no key either
        content = ""
    if not isinstance(content, str) or not (content.strip() or calls or role == "tool"):
        raise BadRow(f"{where} has no text as content{not_a_text(content)}")
    check_characters(content, where)
    message = {"role": role, "content": content}
    if is_plain:
        return message
    if role == "assistant":
        turn = turn | _reasoning(turn, where)
    for key, item in turn.items():
        if isinstance(item, str) and key not in _RESERVED:
            check_characters(item, where)
            message[key] = item
    return {**message, "tool_calls": calls} if calls else message


def _reasoning(turn: dict[str, Any], where: str) -> dict[str, str]:
    """What an answer has under the keys of ``REASONING`` in another form than a text, as text."""
    found = {}
    for key in REASONING:
        item = turn.get(key)
        if isinstance(item, list):
            found[key] = _joined(item, f"{where}, in its key `{key}`,")
        elif item is not None and not isinstance(item, str):
            raise BadRow(
                f"{where} has a key `{key}` that is neither a text nor a list of text parts; write what it thought as "
                "text, or remove the key"
            )
    return found


def _joined(parts: list[Any], where: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = f"a part of type {repr(kind)[:40]}" if isinstance(kind, str) else "a part without a type"
            raise BadRow(f"{where} contains {shown}; only parts of type 'text' can be trained on")
        if not isinstance(part.get("text"), str):
            raise BadRow(f"{where} contains a text part without text")
        if marks := [key for key in _TRAINED if part.get(key) is not None]:
            raise BadRow(
                f"{where} contains a part with the key `{marks[0]}`, and only whole messages can be left untrained; "
                "move it to the message"
            )
        texts.append(part["text"])
    return "".join(texts)


def _is_trained(turn: dict[str, Any], where: str) -> bool:
    for key in _UNSUPPORTED:
        if turn.get(key):
            raise BadRow(
                f"{where} (assistant) has the key `{key}`, and only whole messages can be left untrained; "
                "remove it, or set `train` to true or false"
            )
    marks = {key: turn[key] for key in _TRAINED if turn.get(key) is not None}
    for key, mark in marks.items():
        if not isinstance(mark, int | float) or mark not in (0, 1):
            raise BadRow(f"{where} (assistant) has a key `{key}` that is neither true nor false, 1 nor 0")
    return all(marks.values())


def _tool_calls(turn: dict[str, Any], where: str) -> list[dict[str, Any]]:
    calls = turn.get("tool_calls")
    if isinstance(calls, str):
        calls = parsed(calls) if calls.strip() else None
    if turn.get("function_call") is not None:
        if calls:
            raise BadRow(f"{where} has tool_calls and the older function_call; keep one of them")
        calls = [turn["function_call"]]
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadRow(f"{where} has tool_calls that are not a list")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(f"{where} has a tool call without a function name")
    arguments = _arguments(call | function, where)
    check_characters(function["name"], where)
    check_value(arguments, where)
    canonical = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        check_characters(call["id"], where)
        return {"id": call["id"], **canonical}
    return canonical


def _arguments(call: dict[str, Any], where: str) -> dict[str, Any]:
    """The arguments of a call, by any of the names that they have in data; a call may have none."""
    given = {key: item for key, item in call.items() if item is not None and key not in _OF_A_CALL}
    names = [key for key in _ARGUMENTS if key in given]
    if names[:1] == ["arguments"]:
        names = names[:1]
    if len(names) > 1:
        raise BadRow(f"{where} calls a tool with both `{names[0]}` and `{names[1]}`; keep the one with its arguments")
    if given and not names:
        raise BadRow(
            f"{where} calls a tool without `arguments`, but with `{next(iter(given))[:40]}`; call it `arguments` if "
            "it holds them, or remove it"
        )
    arguments = given[names[0]] if names else {}  # Arrow gives no key for none
    if isinstance(arguments, str):
        arguments = parsed(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise BadRow(f"{where} calls a tool with arguments that are neither an object nor JSON text of one")
    return arguments


def shielded(value: Any, shield: Callable[[str], str]) -> Any:
    """The same value with all texts in it, keys too, shielded."""
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, list):
        return [shielded(item, shield) for item in value]
    if isinstance(value, dict):
        return {shield(key): shielded(item, shield) for key, item in value.items()}
    return value


def shielded_messages(messages: Sequence[Message], shield: Callable[[str], str]) -> list[Message]:
    """Messages with their texts shielded, but for the marks of reasoning in an answer: those a model generates."""
    found = []
    for message in messages:
        found.append(shielded(message, shield))
        if message["role"] == "assistant":
            found[-1]["content"] = _shielded_answer(message["content"], shield)
    return found


def _shielded_answer(content: str, shield: Callable[[str], str]) -> str:
    parts, begin = list[str](), 0
    for block in _THOUGHT.finditer(content):
        first, end = block.span(1)
        parts += [shield(content[begin : block.start()]), content[block.start() : first], shield(block[1])]
        parts.append(content[end : block.end()])
        begin = block.end()
    return "".join([*parts, shield(content[begin:])])


def pieces(message: Message) -> list[str]:
    """The texts of a message that are to stand in a rendering: content, reasoning, names and arguments of calls."""
    return [*spoken_pieces(message), *reasoning_of(message), *call_pieces(message)]


def spoken_pieces(message: Message) -> list[str]:
    """A content without the blocks of reasoning that it holds."""
    return [piece.strip() for piece in _THOUGHT.split(message["content"])[::2] if piece.strip()]


def reasoning_of(message: Message) -> list[str]:
    """The reasoning of a message: under keys of its own, or in blocks of its content."""
    thoughts = _THOUGHT.split(message["content"])[1::2] if message["role"] == "assistant" else []
    return [thought.strip() for thought in (*thoughts, *(message.get(key, "") for key in REASONING)) if thought.strip()]


def call_pieces(message: Message) -> list[str]:
    """Names of the tools that a message calls, and all texts in their arguments."""
    found = []
    for call in message.get("tool_calls", ()):
        found += [call["function"]["name"], *_texts(call["function"]["arguments"])]
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)


def defines(text: str, tool: dict[str, Any], messages: Sequence[Message]) -> bool:
    """Whether a text defines a tool: its name and parameters stand there, and not only where the messages call it."""
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):  # a tool of the model's own
        return all(standing(piece, text) for piece in _texts(tool))
    name, parameters, description = function["name"], function.get("parameters"), function.get("description")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not all(standing(piece, text) for piece in (name, *(properties if isinstance(properties, dict) else ()))):
        return False
    if isinstance(description, str) and description.strip() and standing(description, text):
        return True
    calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    return text.count(name) > calls.count(name)


def has_words(message: Message, text: str) -> bool:
    """Whether a text holds what a message says beside reasoning and calls: an answer as it is, others in any form."""
    if message["role"] == "assistant":
        return all(piece in text for piece in spoken_pieces(message))
    return standing(message["content"], text)


def dropped(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, text: str, turns: Mapping[int, tuple[int, int]]
) -> list[str]:
    """What does not stand in a rendering, in words for a sentence, each once and in the order of the conversation.

    Of an answer that is no more than the history of a later one, reasoning may be left out: models do not see it again.

    Args:
        turns: by the index of an answer, where it is generated; empty for a text that is trained as a whole.
    """
    found = []
    if tools and not all(defines(text, tool, messages) for tool in tools):
        found.append("the definitions of tools")
    for i, message in enumerate(messages):
        there = text[slice(*turns[i])] if i in turns else text
        if not has_words(message, there):
            beside = " beside a tool call" if message.get("tool_calls") else ""
            found.append(f"the words of the {message['role']}{beside}")
        if not all(standing(piece, there) for piece in call_pieces(message)):
            found.append("tool calls")
        if (i in turns or not turns) and not all(standing(piece, there) for piece in reasoning_of(message)):
            found.append("reasoning")
    return list(dict.fromkeys(found))


def standing(piece: str, text: str) -> bool:
    """Whether a text holds a piece, as it is, as JSON writes it, or with other white space."""
    piece = piece.strip()
    if piece in text or json.dumps(piece, ensure_ascii=False)[1:-1] in text:
        return True
    return "".join(piece.split()) in _squeezed(text)


@lru_cache(maxsize=4)  # a text is asked for many pieces
def _squeezed(text: str) -> str:
    return "".join(text.split())


def laid_between(parts: Sequence[str], messages: Sequence[Message], text: str) -> list[tuple[int, int]] | None:
    """Where each content stands in a text, between two of the parts that a template writes; None if it does not."""
    if not text.startswith(parts[0]):
        return None
    position, places = len(parts[0]), []
    for message, after in zip(messages, parts[1:]):
        content = message["content"]
        forms = [form for form in {content, content.strip()} if text.startswith(form + after, position)]
        if len(forms) != 1:
            return None
        places.append((position, position + len(forms[0])))
        position += len(forms[0]) + len(after)
    return places if position == len(text) else None


def without_reasoning(text: str, turn: tuple[int, int]) -> list[tuple[int, int]]:
    """The parts of a turn around its blocks of reasoning, of which the generation prompt may have opened the first.

    For example, of the turn "<think>\\nhm\\n</think>\\n\\nYes.<|im_end|>" the last 14 characters.
    """
    begin, end = turn
    opened = OPENED.search(text, 0, begin) and _CLOSED.match(text, begin, end)
    parts = []
    for block in ([opened] if opened else []) + list(_BLOCKS.finditer(text, opened.end() if opened else begin, end)):
        parts.append((begin, block.start()))
        begin = block.end()
    return [(first, last) for first, last in [*parts, (begin, end)] if first < last]
