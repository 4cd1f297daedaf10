"""From a record to an example: the usual formats of fine-tuning data, converted to one form.

``detect`` finds the format from the keys of a record, ``convert`` returns the example or raises the reason why not.
Limits: text only; keys that no chat template renders (scores, row ids, dates) are ignored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.columns import check_characters, check_row, is_given, optional_text, parsed, require, seen, text_of
from finetune.data.messages import canonical_messages, canonical_tools, is_empty_instruction
from finetune.errors import BadRow

FORMATS = ("messages", "sharegpt", "alpaca", "prompt-completion", "text")
PREFERENCE = "preference"
"""Format of a record with a chosen and a rejected answer, or one of them, which is not trained as an example."""
SIDES = ("chosen", "rejected")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}


@dataclass(frozen=True)
class Example:
    """What is trained on: a conversation, or a text with an optional prompt."""

    messages: list[dict[str, Any]] | None
    """Each with ``role``, ``content`` (a string), ``tool_calls`` where there are any, and its other string keys;
    ``None`` for plain text."""
    tools: list[dict[str, Any]] | None = None
    """Definitions of the tools that the conversation may call."""
    untrained: frozenset[int] = frozenset()
    """Indices of assistant messages that are not trained."""
    prompt: str = ""
    """Plain text that is not trained."""
    completion: str = ""
    """Plain text that is trained."""
    begins: bool = True
    """Whether the text begins here, with the token that the tokenizer begins texts with."""
    ends: bool = True
    """Whether it ends here, so that an end-of-sequence token follows."""


def detect(value: Any) -> str | None:
    """The format of a record by its keys, one of ``FORMATS``; ``None`` if none fits. Keys with null do not count."""
    if not isinstance(value, dict):
        return None
    keys = {key for key, item in value.items() if item is not None}
    if "messages" in keys or ("conversations" in keys and not {"chosen", "rejected"} <= keys):
        turns = _turns(value)
        first = turns[0] if isinstance(turns, list) and turns else None
        return "sharegpt" if isinstance(first, dict) and "from" in first else "messages"
    if {"instruction", "output"} <= keys:
        return "alpaca"
    if {"prompt", "completion"} <= keys:
        return "prompt-completion"
    return "text" if "text" in keys else None


def convert(value: Any, format: str) -> Example:
    """The example that a record stands for.

    Args:
        format: one of ``FORMATS``, or ``auto`` to detect it per record.

    Raises:
        BadRow: with the reason, if the record does not have the format or contains nothing to train on.
    """
    name = detect(value) if format == "auto" else format
    check_row(value, is_text=name == "text")
    if name is None:
        raise BadRow(_unknown(value))
    return _CONVERTERS[name](value)


def convert_pair(value: Any) -> tuple[Example, Example]:
    """The chosen and the rejected answer of a record, each as an example that trains this answer alone.

    ``chosen`` and ``rejected`` are texts or messages after a ``prompt`` (a text, or messages), after ``conversations``,
    or after ``instruction`` and ``input``; or they are whole conversations that begin alike. For example, of
    [user a, assistant b, user c, assistant d] and [user a, assistant b, user c, assistant e], d and e are the answers.

    Raises:
        BadRow: with the reason, if the record is no such pair, or its sides are the same.
    """
    check_row(value)
    require(value, PREFERENCE, ["chosen", "rejected"])
    value = value | {key: _read(value[key]) for key in ("prompt", *SIDES) if key in value}
    if value["chosen"] == value["rejected"]:
        raise BadRow("chosen and rejected are the same, so there is nothing to prefer")
    prompt = _prompt_of_pair(value)
    if isinstance(prompt, str) and all(isinstance(value[side], str) for side in SIDES):
        _refuse_beside_text(value)
        chosen, rejected = (_plain(text_of(value, "prompt"), text_of(value, key)) for key in SIDES)
        return chosen, rejected
    conversations = [_answered(prompt, value, key) for key in SIDES]
    begin = _alike(*conversations)
    for turns, key in zip(conversations, SIDES):
        if len(turns) == begin:
            raise BadRow(f"the key `{key}` ends where the other goes on; give one prompt with two answers")
    if any(turns[begin].get("role") != "assistant" for turns in conversations):
        raise BadRow(f"chosen and rejected differ before their answers: from message {begin + 1} on; give one prompt")
    for turns, key in zip(conversations, SIDES):
        if not any(turn.get("content") or turn.get("tool_calls") for turn in turns[begin:]):
            raise BadRow(f"the key `{key}` has an empty answer")
    chosen, rejected = (
        _conversation(turns, value, key=key, untrained_until=begin) for turns, key in zip(conversations, SIDES)
    )
    return chosen, rejected


def convert_prompt(value: Any, *, to_last_answer: bool = False) -> Example:
    """What a record asks, in any format: a conversation without the answers at its end, or what the others ask.

    A ``prompt`` that is a text is what a user says, unless a text follows it in ``completion``: such rows are trained
    without a chat template.

    Args:
        to_last_answer: leave out what stands behind the last answer of a conversation, too.

    Raises:
        BadRow: with the reason, if it asks nothing.
    """
    format = detect(value)
    check_row(value, is_text=format == "text")
    if format in ("messages", "sharegpt"):
        prompt = _as_messages(_turns(value), "messages")
    else:
        prompt = _read(value["prompt"] if format == "prompt-completion" else _prompt_of_pair(value))
    if isinstance(prompt, str) or (prompt is None and value.get("text") is not None):
        key = "text" if prompt is None else "prompt"
        text = text_of(value, key)
        check_characters(text, f"the key `{key}`", is_plain=True)
        if key == "text" or isinstance(value.get("completion"), str):
            _refuse_beside_text(value if key == "prompt" else {})
            return Example(None, prompt=text)
        prompt = [{"role": "user", "content": text}]
    if prompt is None:
        raise BadRow(
            f"the row has {seen(value)}, and asks nothing: give prompt, messages, conversations or instruction"
        )
    messages, _ = canonical_messages(_as_messages(prompt, "messages"))
    messages = [*_system(messages, value), *messages]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if to_last_answer and answers and format in ("messages", "sharegpt"):
        messages = messages[: answers[-1] + 1]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if all(message["role"] in ("system", "developer") for message in messages):
        raise BadRow("it has no question")
    return Example(messages, canonical_tools(value))


def convert_compared(value: Any) -> tuple[Example | None, Example | None]:
    """The chosen and the rejected answer of a record, as ``convert_pair``; or the only one where it is judged alone.

    That is a record with ``prompt``, ``completion`` and ``label``. The label true makes it a chosen one, false a
    rejected one: (answer, None) or (None, answer).

    Raises:
        BadRow: with the reason, if the record is neither.
    """
    if not isinstance(value, dict) or value.get("completion") is None or value.get("chosen") is not None:
        return convert_pair(value)
    require(value, "judged", ["prompt", "label"])
    label = value["label"]
    if isinstance(label, str):  # as tables store it
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.strip().lower(), label)
    if label not in (True, False):
        raise BadRow(f"the key `label` is {repr(label)[:40]}; give true for good, or false for bad")
    check_row(value)
    answer = _from_prompt_completion(value)
    return (answer, None) if label else (None, answer)


def _read(side: Any) -> Any:
    """Messages that a table stores as JSON text, as a list; or the side itself."""
    if isinstance(side, str) and side.lstrip().startswith(("[", "{")) and ('"role"' in side or '"from"' in side):
        found = parsed(side)
        turns = [found] if isinstance(found, dict) else found
        if turns and isinstance(turns, list) and all(map(_is_turn, turns)):
            return turns
    return side


def _is_turn(turn: Any) -> bool:
    keys = turn.keys() if isinstance(turn, dict) else set[str]()
    said = ("content", "tool_calls", "function_call")
    return {"from", "value"} <= keys or ("role" in keys and not keys.isdisjoint(said))


def _prompt_of_pair(value: dict[str, Any]) -> Any:
    """A text, messages, or None where the sides are whole conversations."""
    if value.get("instruction") is not None:
        return _instructions(value)
    if value.get("prompt") is not None:
        return value["prompt"]
    turns = _turns(value)
    if isinstance(turns, str):
        key = "conversations" if value.get("messages") is None else "messages"
        raise BadRow(f"the key `{key}` is a text, but not JSON; give a list of messages, or call it prompt")
    return turns


def _answered(prompt: Any, value: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The conversation of one side of a pair."""
    side = value[key]
    if isinstance(side, str):
        if prompt is None:
            raise BadRow(f"the key `{key}` is a text without a prompt; give one in the key `prompt`")
        answer = [{"role": "assistant", "content": text_of(value, key)}]
    else:
        answer = _as_messages([side] if isinstance(side, dict) else side, key)
        if not answer:
            raise BadRow(f"the key `{key}` has an empty answer")
    if isinstance(prompt, list):
        begin = _as_messages(prompt, "prompt")
        return answer if answer[: len(begin)] == begin else [*begin, *answer]
    if isinstance(prompt, str) and answer[:1] and answer[0].get("role") == "assistant":
        return [{"role": "user", "content": prompt}, *answer]
    return answer  # a whole conversation, which repeats what is in ``prompt``


def _as_messages(turns: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow(f"the key `{key}` is neither a text nor a list of messages")
    return [_from_sharegpt_turn(turn, i) if "from" in turn else turn for i, turn in enumerate(turns, start=1)]


def _alike(one: list[Any], other: list[Any]) -> int:
    """Messages with which both conversations begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _unknown(value: dict[str, Any]) -> str:
    if value.get("chosen") is not None and value.get("rejected") is not None:
        return (
            "the row is a preference pair (chosen and rejected), not an example for supervised fine-tuning; train it "
            "with recipes/dpo.py, or convert the chosen answers to conversations first"
        )
    return (
        f"the row has {seen(value)}, which match no known format: messages (key messages), "
        "sharegpt (conversations), alpaca (instruction, output), prompt-completion (prompt, completion), text (text); "
        "name columns of other names in data.columns, for example {prompt: question, completion: answer}"
    )


def _turns(value: dict[str, Any]) -> Any:
    """The turns of a conversation, as they are or parsed from JSON text (the only form a table can store)."""
    turns = value.get("messages")
    if turns is None:
        turns = value.get("conversations")
    return parsed(turns) if isinstance(turns, str) else turns


def _conversation(turns: Any, value: dict[str, Any], *, key: str = "messages", untrained_until: int = 0) -> Example:
    if not isinstance(turns, list) or not turns:
        is_text = isinstance(turns, str)
        what = "a text, but not JSON" if is_text else "empty" if not turns else f"of type {type(turns).__name__}"
        raise BadRow(f"the key `{key}` is {what}; give a list of messages{', or JSON text of one' if is_text else ''}")
    if value.get("chat_template_kwargs"):
        raise BadRow(
            "the key `chat_template_kwargs` is not supported: the chat template is the same for all rows; remove it"
        )
    untrained_until -= sum(map(is_empty_instruction, turns[:untrained_until]))
    messages, untrained = canonical_messages(turns)
    untrained |= {i for i in range(untrained_until) if messages[i]["role"] == "assistant"}
    first = _system(messages, value)
    return _example([*first, *messages], value, {i + len(first) for i in untrained})


def _system(messages: list[dict[str, Any]], value: dict[str, Any]) -> list[dict[str, Any]]:
    """The message of the key `system`, to stand before the others."""
    system = optional_text(value, "system")
    if system and messages and messages[0]["role"] == "system":
        raise BadRow("the row has both a key `system` and a system message; keep one of them")
    return canonical_messages([{"role": "system", "content": system}])[0]


def _example(messages: list[dict[str, Any]], value: dict[str, Any], untrained: set[int]) -> Example:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise BadRow("there is no assistant turn, so there is nothing to train on")
    if all(message["role"] in ("system", "developer") for message in messages[: answers[0]]):
        raise BadRow("it begins with the assistant, so the first answer has no question")
    if untrained.issuperset(answers):
        raise BadRow("every assistant turn is excluded from training")
    tools = canonical_tools(value)
    return Example(messages, tools, frozenset(untrained))


def _from_messages(value: dict[str, Any]) -> Example:
    key = "conversations" if value.get("messages") is None and value.get("conversations") is not None else "messages"
    require(value, "messages", [key])
    return _conversation(_turns(value), value, key=key)


def _from_sharegpt(value: dict[str, Any]) -> Example:
    key = "messages" if value.get("conversations") is None and value.get("messages") is not None else "conversations"
    require(value, "sharegpt", [key])
    turns = _turns({"messages": value[key]})
    if isinstance(turns, list):
        turns = [_from_sharegpt_turn(turn, number) for number, turn in enumerate(turns, start=1)]
    return _conversation(turns, value, key=key)


def _from_sharegpt_turn(turn: Any, number: int) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRow(f"message {number} is not an object with from and value")
    speaker = turn.get("from")
    role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        seen = f"is from {repr(speaker)[:40]}" if isinstance(speaker, str) else "has no key `from` with a text"
        raise BadRow(f"message {number} {seen}; known senders are {', '.join(_SHAREGPT_ROLES)}")
    message = {key: item for key, item in turn.items() if key not in ("from", "value")}
    if speaker != "function_call":
        return {**message, "role": role, "content": turn.get("value")}
    calls = turn.get("value")
    if isinstance(calls, str):
        calls = parsed(calls)
    if not isinstance(calls, dict | list) or not calls:
        raise BadRow(f"message {number} (function_call) is not JSON with a name and arguments")
    return {**message, "role": role, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _from_alpaca(value: dict[str, Any]) -> Example:
    require(value, "alpaca", ["instruction", "output"])
    turns = [*_instructions(value), {"role": "assistant", "content": text_of(value, "output")}]
    return _conversation(turns, value)


def _instructions(value: dict[str, Any]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    history = value.get("history") or []
    if not isinstance(history, Sequence) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise BadRow("the key `history` is not a list of pairs [user, assistant]")
    for question, answer in history:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    input = optional_text(value, "input")
    instruction = text_of(value, "instruction")
    return [*turns, {"role": "user", "content": f"{instruction}\n\n{input}" if input else instruction}]


def _from_prompt_completion(value: dict[str, Any]) -> Example:
    require(value, "prompt-completion", ["prompt", "completion"])
    prompt, completion = _read(value["prompt"]), value["completion"]
    is_object = isinstance(completion, str) and completion.lstrip().startswith("{")
    if isinstance(prompt, list) or not is_object:  # an object after a text is what is to be answered
        completion = _read(completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        turns = [*_as_messages(prompt, "prompt"), *_as_messages(completion, "completion")]
        return _conversation(turns, value, key="prompt", untrained_until=len(prompt))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise BadRow("prompt and completion must both be texts or both be lists of messages")
    _refuse_beside_text(value)
    return _plain(text_of(value, "prompt"), text_of(value, "completion"))


def _refuse_beside_text(value: dict[str, Any]) -> None:
    for key in ("system", "tools", "functions", "history"):
        if is_given(value.get(key)):
            raise BadRow(
                f"the key `{key}` stands beside a prompt that is plain text, which has no place for it; give the "
                "prompt and its answers as lists of messages"
            )


def _from_text(value: dict[str, Any]) -> Example:
    require(value, "text", ["text"])
    return _plain("", text_of(value, "text"))


def _plain(prompt: str, completion: str) -> Example:
    for text, key in ((prompt, "prompt"), (completion, "completion" if prompt else "text")):
        check_characters(text, f"the key `{key}`", is_plain=True)
    return Example(None, prompt=prompt, completion=completion)


_CONVERTERS: dict[str, Callable[[dict[str, Any]], Example]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt-completion": _from_prompt_completion,
    "text": _from_text,
}
