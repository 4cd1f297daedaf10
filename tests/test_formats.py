"""Formats of training data: each is detected, brought to one form, and refused with a reason where it cannot be."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.formats import FORMATS, Example, convert, convert_compared, convert_pair, convert_prompt, detect
from finetune.data.sources import Record, Source, read
from finetune.errors import BadRow

SHARED = Path(__file__).parents[2] / "shared"
USER = {"role": "user", "content": "the tree"}
ANSWER = {"role": "assistant", "content": "walks"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": ["木", 1, None]}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ROWS = {
    "messages": {"messages": [USER, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "the tree"}, {"from": "gpt", "value": "walks"}]},
    "alpaca": {"instruction": "the tree", "input": "", "output": "walks"},
    "prompt-completion": {"prompt": "the tree", "completion": " walks"},
    "text": {"text": "the tree walks"},
}


def example(*messages: dict[str, Any], **keys: Any) -> Example:
    return convert({"messages": list(messages), **keys}, "auto")


def test_every_format_has_a_row_here():
    assert tuple(ROWS) == FORMATS


@pytest.mark.parametrize("format", FORMATS)
def test_format_is_detected_and_detected_or_named_gives_the_same(format: str):
    assert detect(ROWS[format]) == format
    assert convert(ROWS[format], "auto") == convert(ROWS[format], format)


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"conversations": [USER, ANSWER]}, "messages"),
        ({"messages": ROWS["sharegpt"]["conversations"]}, "sharegpt"),
        ({"messages": None, "conversations": [USER, ANSWER]}, "messages"),
        ({"prompt": "the tree", "prompt_id": "1", "messages": [USER, ANSWER]}, "messages"),
        ({"prompt": [USER], "completion": [ANSWER]}, "prompt-completion"),
        ({**ROWS["alpaca"], "text": "all of it"}, "alpaca"),
        ({**ROWS["text"], "messages": None, "prompt": None, "completion": None}, "text"),
        ({"prompt": "a", "response": "b"}, None),
        ({}, None),
        ([USER, ANSWER], None),
        (None, None),
    ],
)
def test_format_follows_from_the_keys_that_are_not_null(row: Any, format: str | None):
    assert detect(row) == format


@pytest.mark.parametrize("format", ["messages", "sharegpt", "alpaca"])
def test_conversation_formats_give_the_same_example(format: str):
    assert convert(ROWS[format], "auto") == Example([USER, ANSWER])


def test_plain_texts_keep_every_character():
    assert convert(ROWS["prompt-completion"], "auto") == Example(None, prompt="the tree", completion=" walks")
    assert convert({"text": " a\n"}, "auto") == Example(None, completion=" a\n")


def test_keys_of_a_row_do_not_say_where_a_text_begins_or_ends():
    row = {"text": "a", "begins": False, "ends": False}
    assert convert(row, "auto") == Example(None, completion="a")


def test_alpaca_has_input_system_and_history():
    row = {**ROWS["alpaca"], "input": "an oak", "system": "be brief", "history": [["hello", "hi"]]}
    assert convert(row, "auto").messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "the tree\n\nan oak"},
        ANSWER,
    ]


def test_conversational_prompt_is_not_trained():
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "tools": TOOLS}
    assert convert(row, "auto") == Example([USER, ANSWER, USER, ANSWER], TOOLS, frozenset({1}))


NOT_TRAINED = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"loss": 0}]


@pytest.mark.parametrize("mark", NOT_TRAINED)
def test_marked_answers_are_not_trained(mark: dict[str, Any]):
    kept = {**ANSWER, "weight": 1, "train": True, "training": None, "loss": True}
    assert example(USER, {**ANSWER, **mark}, USER, kept) == Example(
        [USER, ANSWER, USER, ANSWER], untrained=frozenset({1})
    )
    turns = [*ROWS["sharegpt"]["conversations"], *ROWS["sharegpt"]["conversations"]]
    turns[1] = {**turns[1], **mark}
    assert convert({"conversations": turns, "system": "be brief"}, "auto").untrained == {2}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("content", ["", " \n", None, [], [{"type": "text", "text": ""}]])
def test_empty_instruction_is_none_in_every_format(role: str, content: Any):
    empty = {"role": role, "content": content}
    assert example(empty, USER, ANSWER) == Example([USER, ANSWER])
    marked = {**ANSWER, "weight": 0}
    assert example(empty, USER, marked, USER, ANSWER).untrained == {1}
    turns = [{"from": "system", "value": content}, *ROWS["sharegpt"]["conversations"]]
    assert convert({"conversations": turns}, "auto") == Example([USER, ANSWER])
    row = {"prompt": [empty, USER, ANSWER, USER], "completion": [ANSWER]}
    assert convert(row, "auto") == Example([USER, ANSWER, USER, ANSWER], untrained=frozenset({1}))
    if not isinstance(content, list):
        assert convert({**ROWS["alpaca"], "system": content}, "auto") == Example([USER, ANSWER])


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "tree"}]
    assert example({**USER, "content": parts}, ANSWER) == Example([USER, ANSWER])


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [CALL["function"]]},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "content": "", "function_call": CALL["function"]},
        {"role": "assistant", "content": [], "function_call": CALL["function"], "tool_calls": None},
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_every_form_of_a_tool_call_is_brought_to_one(turn: dict[str, Any], as_text: bool):
    turn = copy.deepcopy(turn)
    if as_text and not isinstance(turn.get("tool_calls"), str):
        call = turn.get("function_call") or turn["tool_calls"][0]
        function = call.get("function", call)
        function["arguments"] = json.dumps(function["arguments"])
    canonical = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "", "name": "look"}
    for role in ("tool", "function"):
        assert example(USER, turn, {**result, "role": role}, ANSWER).messages == [USER, canonical, result, ANSWER]


def test_sharegpt_tool_calls_are_the_same_as_those_of_messages():
    turns = [
        {"from": "human", "value": "the tree"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "an oak"},
        {"from": "gpt", "value": "walks"},
    ]
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    expected = example(USER, call, {"role": "tool", "content": "an oak"}, ANSWER, tools=TOOLS)
    assert convert({"conversations": turns, "tools": json.dumps(TOOLS)}, "auto") == expected


@pytest.mark.parametrize("key", ["arguments", "parameters", "input"])
@pytest.mark.parametrize("as_text", [False, True])
def test_arguments_of_a_call_are_found_under_each_of_their_names(key: str, as_text: bool):
    arguments = CALL["function"]["arguments"]
    call = {"name": "look", "arguments": None, key: json.dumps(arguments) if as_text else arguments}
    expected = example(USER, {"role": "assistant", "content": "", "tool_calls": [CALL]})
    for form in (call, {"type": "function", "function": call}, {"type": "tool_use", "id": None, **call}):
        assert example(USER, {"role": "assistant", "content": "", "tool_calls": [form]}) == expected
        assert example(USER, {"role": "assistant", "function_call": form}) == expected
        turns = [{"from": "human", "value": "the tree"}, {"from": "function_call", "value": json.dumps(form)}]
        assert convert({"conversations": turns}, "auto") == expected


@pytest.mark.parametrize("arguments", ["", " ", None, {}, "{}"])
def test_call_without_arguments_has_an_empty_object(arguments: Any):
    messages = example(USER, {"role": "assistant", "function_call": {"name": "a", "arguments": arguments}}).messages
    assert messages is not None
    assert messages[1]["tool_calls"][0]["function"] == {"name": "a", "arguments": {}}


@pytest.mark.parametrize(
    "form", [{"role": "tool", "content": None}, {"role": "tool"}, {"role": "function", "name": "a"}]
)
def test_answer_of_a_tool_may_be_null_or_absent_as_it_may_be_empty(form: dict[str, Any]):
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert example(USER, call, form, ANSWER) == example(USER, call, {**form, "content": ""}, ANSWER)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_reasoning_in_parts_is_joined(key: str):
    parts = [{"type": "text", "text": "it is "}, {"type": "text", "text": "an oak"}]
    assert example(USER, {**ANSWER, key: parts}) == example(USER, {**ANSWER, key: "it is an oak"})


def test_functions_are_the_tools_where_tools_are_empty():
    for empty in ([], "[]", "", None):
        assert example(USER, ANSWER, tools=empty, functions=[TOOLS[0]["function"]]).tools == TOOLS


@pytest.mark.parametrize(
    "keys",
    [
        {"tools": TOOLS},
        {"tools": json.dumps(TOOLS)},
        {"tools": [TOOLS[0]["function"]]},
        {"functions": [TOOLS[0]["function"]]},
    ],
)
def test_tools_are_a_list_of_definitions_in_one_form(keys: dict[str, Any]):
    assert example(USER, ANSWER, **keys).tools == TOOLS


@pytest.mark.parametrize("empty", [None, [], "", "[]", " ", "null"])
def test_no_tools_are_none(empty: Any):
    assert example(USER, ANSWER, tools=empty).tools is None


def test_other_string_keys_are_kept_and_other_values_are_not():
    answer = {**ANSWER, "reasoning_content": "it is an oak", "id": 3, "refusal": None}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", **CALL, "index": 0}]}
    result = {"role": "tool", "content": "x", "tool_call_id": "call_1"}
    assert example(USER, call, result, answer).messages == [
        USER,
        {**call, "tool_calls": [{"id": "call_1", **CALL}]},
        result,
        {**ANSWER, "reasoning_content": "it is an oak"},
    ]


def test_conversation_in_a_table_cell_is_json_text():
    assert convert({"messages": json.dumps([USER, ANSWER]), "system": ""}, "auto") == Example([USER, ANSWER])


@pytest.mark.parametrize("sender", ["role", "from"])
def test_prompt_and_completion_in_table_cells_are_json_text(sender: str):
    prompt, completion = [USER, ANSWER, USER], [ANSWER]
    if sender == "from":
        prompt, completion = ([as_sharegpt(message) for message in turns] for turns in (prompt, completion))
    row = {"prompt": json.dumps(prompt, indent=1), "completion": json.dumps(completion)}
    assert convert(row, "auto") == Example([USER, ANSWER, USER, ANSWER], untrained=frozenset({1}))
    assert convert_prompt(row) == Example([USER, ANSWER, USER])


@pytest.mark.parametrize(
    "completion",
    [
        '{"from": "Tokyo", "to": "Osaka"}',
        '{"role": "admin"}',
        '{"role": "admin", "content": "all"}',
        '[{"from": "Tokyo"}, 3]',
        '[{"a": 1, "a": 2}]',
        "[1]",
        "[]",
    ],
)
def test_json_that_is_no_list_of_messages_stays_text(completion: str):
    row = {"prompt": "the tree", "completion": completion}
    assert convert(row, "auto") == Example(None, prompt="the tree", completion=completion)


@pytest.mark.parametrize(
    ("key", "item"),
    [
        ("system", "be brief"),
        ("tools", TOOLS),
        ("tools", json.dumps(TOOLS)),
        ("functions", TOOLS),
        ("history", [["a", "b"]]),
    ],
)
def test_what_a_plain_prompt_has_no_place_for_is_refused_unless_it_is_empty(key: str, item: Any):
    compared = {"prompt": "a", "chosen": "b", "rejected": "c"}
    ways: list[tuple[Any, dict[str, Any]]] = [
        (lambda row: convert(row, "auto"), ROWS["prompt-completion"]),
        (convert_prompt, ROWS["prompt-completion"]),
        (convert_compared, {**ROWS["prompt-completion"], "label": True}),
        (convert_pair, compared),
    ]
    for way, row in ways:
        with pytest.raises(
            BadRow, match=f"the key `{key}` stands beside a prompt .* give the prompt and its answers as"
        ):
            way({**row, key: item})
        for empty in (None, "", " ", [], "[]"):
            assert way({**row, key: [] if key == "system" and empty == [] else empty}) == way(row)


def test_system_beside_messages_in_prompt_and_completion_is_rendered():
    row = {"prompt": [USER], "completion": [ANSWER], "system": "be brief"}
    system = {"role": "system", "content": "be brief"}
    assert convert(row, "auto") == Example([system, USER, ANSWER])


@pytest.mark.parametrize("key", ["image", "images", "video", "videos", "audio", "audios"])
def test_row_with_pictures_films_or_sound_is_refused_by_name(key: str):
    reason = f"the row has the key `{key}`, and only texts can be trained on"
    for format, row in ROWS.items():
        for ask in (lambda value: convert(value, "auto"), convert_prompt):
            if format == "text":  # which a corpus may keep beside pictures that it does not need
                assert ask({**row, key: ["a.png"]}) == ask(row)
                continue
            for item in ("a.png", ["a.png"], {"bytes": None, "path": "a.png"}):
                with pytest.raises(BadRow, match=reason):
                    ask({**row, key: item})
            for empty in (None, "", [], [None], "[]"):
                assert ask({**row, key: empty}) == ask(row)
    with pytest.raises(BadRow, match=reason):
        convert_pair({"prompt": "a", "chosen": "b", "rejected": "c", key: ["a.png"]})


ANOTHER = {"prompt": "another", "instruction": "another", "question": "another", "input": "more"}


@pytest.mark.parametrize("format", ["messages", "sharegpt", "prompt-completion"])
def test_row_is_asked_the_question_that_it_trains(format: str):
    row = {**ANOTHER, **ROWS[format]}
    assert detect(row) == format
    assert convert_prompt(row) == convert_prompt(ROWS[format])


def test_what_stands_behind_the_last_answer_is_asked_unless_it_is_to_be_left_out():
    turns = [USER, ANSWER, {**USER, "content": "so?"}]
    for row in ({"messages": turns}, {"conversations": [as_sharegpt(message) for message in turns]}):
        assert convert_prompt(row) == Example(turns)
        assert convert_prompt(row, to_last_answer=True) == Example([USER])
    assert convert_prompt({"messages": [USER]}, to_last_answer=True) == Example([USER])
    conversational = {"prompt": turns, "completion": [ANSWER]}
    assert convert_prompt(conversational, to_last_answer=True) == Example(turns)


def test_system_message_beside_a_key_of_it_is_refused_in_a_question_too():
    with pytest.raises(BadRow, match="both a key `system` and a system message"):
        convert_prompt({"messages": [{"role": "system", "content": "b"}, USER, ANSWER], "system": "a"})


DEEP: Any = "x"
for _ in range(900):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "answer": None}, r"the keys 'prompt', 'answer' \(null\), which match no known format"),
        (
            {},
            "no keys, which match no known format: messages .* sharegpt .* alpaca .* prompt-completion .* text",
        ),
        ({"質問": "a", "\ud800": "b"}, r"the keys '質問', '\\ud800', which"),
        ([], "not an object"),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, "preference pair"),
        ({"conversations": [USER], "chosen": [ANSWER], "rejected": [ANSWER]}, "preference pair"),
        (
            {"messages": "[{'role': 'user'}]"},
            "`messages` is a text, but not JSON; give a list of messages, or JSON text",
        ),
        ({"messages": []}, "`messages` is empty; give a list of messages"),
        ({"conversations": {"from": []}}, "`conversations` is of type dict; give a list of messages"),
        ({"messages": [USER, 3]}, "message 2 is not an object with role and content"),
        (
            {"messages": [USER, ANSWER, {"content": "a"}]},
            r"message 3 has the role of type NoneType; known roles are",
        ),
        ({"messages": [{**USER, "role": "usr"}]}, "message 1 has the role 'usr'; known roles are system, developer"),
        ({"messages": [{**USER, "role": DEEP}]}, "known roles are"),
        ({"messages": [USER, {"role": "assistant"}]}, r"message 2 \(assistant\) has no text as content"),
        ({"messages": [USER, ANSWER, {**USER, "content": " \n"}]}, r"message 3 \(user\) has no text as content"),
        ({"messages": [{**USER, "content": None}]}, r"message 1 \(user\) has no text"),
        ({"messages": [{**USER, "content": 3}]}, r"message 1 \(user\) has no text as content, but a value of type int"),
        ({"messages": [USER, {"role": "tool", "content": 3}, ANSWER]}, r"message 2 \(tool\) has no text"),
        ({"messages": [{**USER, "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
        ({"messages": [{**USER, "content": ["a"]}]}, "a part without a type"),
        ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "a text part without text"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [ANSWER]}, "begins with the assistant"),
        ({"messages": [{**USER, "role": "system"}, ANSWER, USER, ANSWER]}, "begins with the assistant"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "every assistant turn is excluded"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "a key `weight` that is neither true nor false, 1 nor 0"),
        ({"messages": [USER, {**ANSWER, "train": "no"}]}, "neither true nor false"),
        ({"messages": [USER, {**ANSWER, "loss": "no"}]}, "a key `loss` that is neither true nor false"),
        ({"messages": [USER, {**ANSWER, "train_detail": [{"begin_offset": 0}]}]}, "has the key `train_detail`, and"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a", "train": False}]}]},
            "contains a part with the key `train`",
        ),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"a": 1}}, "`chat_template_kwargs` is not supported"),
        ({"messages": [USER, {**ANSWER, "tool_calls": {}}]}, "tool_calls that are not a list"),
        ({"messages": [USER, {**ANSWER, "tool_calls": ["look"]}]}, "without a function name"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"arguments": {}}}]}]}, "without a function name"),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "a", "arguments": "{"}}]}, "neither an object nor"),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "a", "arguments": "[1]"}}]}, "neither an object nor"),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "a", "args": {}}}]}, "without `arguments`.* `args`"),
        (
            {"messages": [USER, {**ANSWER, "function_call": {"name": "a", "input": {}, "parameters": {}}}]},
            "both `parameters` and `input`",
        ),
        (
            {"messages": [USER, {**ANSWER, "reasoning_content": {"text": "a"}}]},
            "a key `reasoning_content` that is neither",
        ),
        ({"messages": [USER, {**ANSWER, "thinking": [{"type": "image"}]}]}, "in its key `thinking`, contains a part"),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "a", "arguments": {"a": DEEP}}}]}, "too deeply"),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "a"}, "tool_calls": [CALL]}]}, "keep one of them"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "a", "arguments": {"a": b"x"}}]}]}, "type bytes"),
        ({"messages": [USER, ANSWER], "tools": "[{"}, "`tools` is neither a list of objects"),
        ({"messages": [USER, ANSWER], "tools": ["look"]}, "`tools` is neither a list of objects"),
        (
            {"messages": [{**USER, "role": "system"}, USER, ANSWER], "system": "a"},
            "both a key `system` and a system message",
        ),
        ({"messages": [USER, ANSWER], "system": 3}, "`system` has no text"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "message 1 is from 'alien'; known senders are human"),
        ({"conversations": [{"from": None, "value": "a"}]}, "message 1 has no key `from`"),
        ({"conversations": [{"from": "human"}]}, r"message 1 \(user\) has no text as content"),
        ({"conversations": [{"from": "function_call", "value": "look"}]}, "not JSON with a name and arguments"),
        ({"instruction": "", "output": "a"}, "`instruction` has no text"),
        ({"instruction": "a", "output": " "}, "`output` has no text"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "not a list of pairs"),
        ({"instruction": "a", "input": 0, "output": "b"}, "`input` has no text"),
        ({"instruction": "a", "input": False, "output": "b"}, "`input` has no text"),
        ({"prompt": "a", "completion": ""}, "`completion` has no text"),
        ({"prompt": "", "completion": "a"}, "`prompt` has no text"),
        ({"prompt": [USER], "completion": "a"}, "must both be texts or both be lists"),
        ({"prompt": [USER, ANSWER], "completion": [USER]}, "every assistant turn is excluded"),
        ({"text": "\n"}, "`text` has no text"),
        ({"text": ["a"]}, "`text` has no text, but a value of type list"),
    ],
)
def test_row_that_cannot_be_trained_is_refused_with_the_reason(row: Any, reason: str):
    with pytest.raises(BadRow, match=reason) as error:
        convert(row, "auto")
    assert not str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("format", "key"),
    [
        ("messages", "messages"),
        ("sharegpt", "conversations"),
        ("alpaca", "instruction"),
        ("prompt-completion", "prompt"),
        ("text", "text"),
    ],
)
def test_row_without_the_keys_of_the_named_format_is_refused_naming_the_key(format: str, key: str):
    with pytest.raises(BadRow, match=f"the key `{key}`, required by the format {format}, is missing; the row has"):
        convert({"a": 1}, format)


PLACES = {
    "content": lambda bad: [{**USER, "content": bad}, ANSWER],
    "part": lambda bad: [{**USER, "content": [{"type": "text", "text": bad}]}, ANSWER],
    "reasoning": lambda bad: [USER, {**ANSWER, "reasoning_content": bad}],
    "tool name": lambda bad: [USER, {**ANSWER, "tool_calls": [{"name": bad, "arguments": {}}]}],
    "argument": lambda bad: [USER, {**ANSWER, "tool_calls": [{"name": "a", "arguments": {"a": [{"b": bad}]}}]}],
    "argument's key": lambda bad: [USER, {**ANSWER, "tool_calls": [{"name": "a", "arguments": {bad: 1}}]}],
    "call's id": lambda bad: [USER, {**ANSWER, "tool_calls": [{**CALL, "id": bad}]}],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("character", "reason"),
    [("\0", "a NUL character"), ("\ud83d", "unpaired surrogate"), ("\U000f0000", "private"), ("\U0010ffff", "private")],
)
def test_characters_that_no_text_holds_are_refused_wherever_they_would_be_rendered(
    place: str, character: str, reason: str
):
    with pytest.raises(BadRow, match=rf"^message \d \(\w+\) contains .*{reason}"):
        example(*PLACES[place](f"a{character}木"))
    example(*PLACES[place]("a木🌲\ue000\U000effff\x01\uffff"))


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a\0"},
        {"prompt": "\ud800", "completion": "a"},
        {"instruction": "a", "output": "\U000f0000"},
        {"instruction": "a\0", "output": "b"},
        {"messages": [USER, ANSWER], "tools": [{"name": "\0"}]},
        {"messages": [USER, ANSWER], "system": "a\0"},
    ],
)
def test_characters_that_no_text_holds_are_refused_in_every_format(row: dict[str, Any]):
    with pytest.raises(BadRow, match=r"contains (a NUL character|the character U\+(D800, an unpaired|F0000, for pri))"):
        convert(row, "auto")


@pytest.mark.parametrize("row", [{"text": "icon \U000f0411"}, {"prompt": "\U0010fffd", "completion": "\U000f0000"}])
def test_plain_texts_may_have_characters_for_private_use(row: dict[str, Any]):
    found = convert(row, "auto")
    assert (found.prompt, found.completion) == (row.get("prompt", ""), row.get("text", row.get("completion")))
    assert convert_prompt(row).prompt == row.get("prompt", row.get("text"))


TEXT = st.text(
    st.characters(max_codepoint=0xEFFFF, exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20
).filter(str.strip)
ARGUMENTS = st.dictionaries(
    TEXT, st.recursive(st.none() | st.booleans() | st.integers() | TEXT, lambda inner: st.lists(inner, max_size=3))
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXT)})
        if draw(st.booleans()):
            function = {"name": draw(TEXT), "arguments": draw(ARGUMENTS)}
            calls = [{"type": "function", "function": function}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "content": draw(st.just("") | TEXT)})
        messages.append({"role": "assistant", "content": draw(TEXT)})
    return messages


SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def as_sharegpt(message: dict[str, Any]) -> dict[str, str]:
    for call in message.get("tool_calls", []):
        return {"from": "function_call", "value": json.dumps(call["function"])}
    return {"from": SPEAKERS[message["role"]], "value": message["content"]}


@given(messages=conversations())
@settings(max_examples=200, deadline=None)
def test_canonical_messages_convert_to_themselves_and_equal_their_sharegpt_form(messages: list[dict[str, Any]]):
    converted = convert({"messages": messages}, "auto")
    assert converted == Example(messages)
    assert convert({"conversations": [as_sharegpt(message) for message in messages]}, "auto") == converted


@given(texts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), system=st.just("") | TEXT, input=TEXT)
@settings(max_examples=100, deadline=None)
def test_alpaca_and_messages_forms_of_a_conversation_give_the_same(
    texts: list[tuple[str, str]], system: str, input: str
):
    *history, (instruction, output) = texts
    row = {"instruction": instruction, "input": input, "output": output, "history": [list(pair) for pair in history]}
    turns = [*history, (f"{instruction}\n\n{input}", output)]
    messages = [m for user, answer in turns for m in ({**USER, "content": user}, {**ANSWER, "content": answer})]
    first = [{"role": "system", "content": system}] if system else []
    assert convert({**row, "system": system}, "auto") == convert({"messages": [*first, *messages]}, "auto")


WORDS = ["role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "weight", "train", "text"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*WORDS, *SPEAKERS]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=20,
)
KEYS = ["messages", "conversations", "tools", "functions", "system", "prompt", "completion", "text"]
ALPACA_KEYS = ["instruction", "input", "output", "history"]


def test_of_many_keys_twelve_are_named_and_the_others_counted():
    with pytest.raises(BadRow, match=r"has the keys '0', .*, '11' and 3 more$"):
        convert({str(number): 1 for number in range(15)}, "text")


@pytest.mark.slow
@given(
    row=JSON
    | st.dictionaries(st.sampled_from([*KEYS, *ALPACA_KEYS, "chosen", "rejected"]), JSON | st.lists(JSON, max_size=4)),
    format=st.sampled_from([*FORMATS, "auto"]),
)
@settings(max_examples=250, deadline=None)
def test_any_json_value_gives_an_example_or_a_reason(row: Any, format: str):
    try:
        found, reason = convert(row, format), ""
    except BadRow as error:
        found, reason = None, str(error)
    if found is None:
        assert re.fullmatch(r"[^\n]+[^.\n]", reason)
        reason.encode()
    else:
        assert found.messages or found.completion.strip()


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real material that lies beside some checkouts")
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gsm8k_train_1500", 1500),
        ("gsm8k_test_200", 200),
        ("japanese_multiturn_80", 80),
        ("tool_calls_150", 150),
    ],
)
def test_real_rows_convert_to_themselves(name: str, rows: int):
    found = list(read(Source(str(SHARED / "data" / f"{name}.jsonl"))))
    assert len(found) == rows
    for record in found:
        assert isinstance(record, Record)
        converted = convert(record.value, "auto")
        assert converted.messages == record.value["messages"]
        assert converted.tools == (record.value.get("tools") or None)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real material that lies beside some checkouts")
def test_real_preference_pairs_are_refused():
    found = list(read(Source(str(SHARED / "data" / "preference_200.jsonl"))))
    assert len(found) == 200
    for record in found:
        assert isinstance(record, Record)
        with pytest.raises(BadRow, match="preference pair"):
            convert(record.value, "auto")


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_question_that_is_a_text_under_a_key_for_messages_is_refused(key: str):
    row = {key: "What is 2+2?", "chosen": "4", "rejected": "5"}
    said = f"`{key}` is a text, but not JSON; give a list of messages, or call it prompt"
    for convert_row in (convert_compared, convert_pair):
        with pytest.raises(BadRow, match=said):
            convert_row(row)
    with pytest.raises(BadRow, match=f"`{key}` is"):
        convert_prompt(row)
