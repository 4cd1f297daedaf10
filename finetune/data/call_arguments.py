"""The arguments of calls, in the form that a template takes: values, or the same as JSON text."""

import json
from collections.abc import Sequence
from typing import Any

from finetune.data.messages import Message


def with_json_arguments(messages: Sequence[Message]) -> list[Message]:
    """The same messages, with the arguments of their calls as JSON text."""
    return [
        {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": _json(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ],
        }
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written_as_python(messages: Sequence[Message], text: str) -> int:
    """How often a text has arguments of calls as Python writes a dictionary, ``{'now': True}``, and JSON does not.

    A template that expects JSON text writes those of others so, and no program reads the calls of the model then.
    """
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()]
    return sum(text.count(str(each)) for each in calls if not isinstance(each, str) and str(each) != _json(each))
