"""Messages and tool definitions in the one form that chat templates take, or the reason why not.

It is OpenAI's form. Variants from clients and older data are converted: contents as lists of text parts, arguments as
JSON text, ``function_call`` and the role ``function``.
"""

import json
import re
from typing import Any

from finetune.errors import BadRow

ROLES = ("system", "developer", "user", "assistant", "tool")
_MARKS = 0xF0000  # from here on code points are private, and taken as marks where contents are found in a rendering
_REFUSED = re.compile(f"[\0\ud800-\udfff{chr(_MARKS)}-\U0010ffff]")
_DEEPEST = 64  # levels of an argument or a tool definition
_RESERVED = ("role", "content", "tool_calls", "function_call", "weight", "train")


def canonical_messages(turns: list[Any]) -> tuple[list[dict[str, Any]], set[int]]:
    """Messages with ``role``, ``content`` (a string), ``tool_calls`` and all other keys with a string value.

    A tool call is ``{"type": "function", "function": {"name": str, "arguments": dict}}``, preceded
    by its ``id`` if it has one.

    Returns:
        The messages, and the indices of assistant messages marked ``"weight": 0`` or ``"train": false``.

    Raises:
        BadRow: naming the message by its number from 1.
    """
    messages, untrained = [], set()
    for index, turn in enumerate(turns):
        message = _message(turn, index + 1)
        messages.append(message)
        if message["role"] == "assistant" and len(turn) > 2 and not _is_trained(turn, f"message {index + 1}"):
            untrained.add(index)
    return messages, untrained


def canonical_tools(value: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tool definitions of a row: its key ``tools``, a list or one as JSON text, or the older ``functions``.

    A bare function is wrapped as ``{"type": "function", "function": ...}``.

    Raises:
        BadRow: if they are not a list of objects.
    """
    key = "tools" if value.get("tools") is not None else "functions"
    tools = value.get(key)
    if isinstance(tools, str):
        tools = parsed(tools) if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"the key `{key}` is neither a list of objects nor JSON text of one")
    _check_value(tools, f"the key `{key}`")
    return [{"type": "function", "function": t} if "name" in t and "function" not in t else t for t in tools]


def check_characters(text: str, where: str) -> None:
    """Refuse characters that no text should contain: NUL, unpaired surrogates, supplementary private-use characters.

    Raises:
        BadRow: beginning with ``where``.
    """
    if text.isascii() and "\0" not in text:  # the common case, without a search
        return
    if found := _REFUSED.search(text):
        what = "a NUL character" if found[0] == "\0" else "an unpaired surrogate or a private-use character"
        raise BadRow(f"{where} contains {what}")


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
        content = "" if calls and content is None else content
    if not isinstance(content, str) or not (content.strip() or calls or role == "tool"):
        raise BadRow(f"{where} has no text as content")
    check_characters(content, where)
    message = {"role": role, "content": content}
    if is_plain:
        return message
    for key, item in turn.items():
        if isinstance(item, str) and key not in _RESERVED:
            check_characters(item, where)
            message[key] = item
    return {**message, "tool_calls": calls} if calls else message


def _joined(parts: list[Any], where: str) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = f"a part of type {repr(kind)[:40]}" if isinstance(kind, str) else "a part without a type"
            raise BadRow(f"{where} contains {shown}; only parts of type 'text' can be trained on")
        if not isinstance(part.get("text"), str):
            raise BadRow(f"{where} contains a text part without text")
        texts.append(part["text"])
    return "".join(texts)


def _is_trained(turn: dict[str, Any], where: str) -> bool:
    weight, train = turn.get("weight"), turn.get("train")
    if weight is not None and (not isinstance(weight, int | float) or weight not in (0, 1)):
        raise BadRow(f"{where} (assistant) has a weight that is neither 0 nor 1")
    if train is not None and not isinstance(train, bool):
        raise BadRow(f"{where} (assistant) has a key `train` that is neither true nor false")
    return weight != 0 and train is not False


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
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    elif arguments is None:  # how Arrow gives a call without arguments
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadRow(f"{where} calls a tool with arguments that are neither an object nor JSON text of one")
    check_characters(function["name"], where)
    _check_value(arguments, where)
    canonical = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        check_characters(call["id"], where)
        return {"id": call["id"], **canonical}
    return canonical


def parsed(text: str) -> Any:
    """The value of a JSON text; the text itself if it is not JSON, so that it is refused as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _check_value(value: Any, where: str) -> None:
    """Refuse characters as ``check_characters``, what JSON does not know, and what is too deep to be rendered."""
    level = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                check_characters(item, where)
            elif isinstance(item, list):
                below += item
            elif isinstance(item, dict):
                below += [*item.keys(), *item.values()]
            elif item is not None and not isinstance(item, int | float):
                raise BadRow(f"{where} contains a value of type {type(item).__name__}, which JSON does not support")
        level = below
        if not level:
            return
    raise BadRow(f"{where} contains a value that is nested too deeply")
