"""The assistant's turns: found for four families of templates, and compared with a search in the rendered text."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chat_templates import (
    CHATML,
    FAMILIES,
    QWEN3,
    TOKENIZERS,
    WITH_TOOLS,
    conversation,
    conversation_with_tools,
    encode,
    encode_value,
    tokenizer_for,
    tools,
    trained_text,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from finetune.data.chat_template import ChatTemplate
from finetune.data.encoding import Encoder, Settings
from finetune.data.formats import convert
from finetune.data.templates import DATE, Template
from finetune.errors import BadRow

SHARED = Path(__file__).parents[2] / "shared"
PLAIN = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
CALL = {"id": "call12345", "type": "function", "function": {"name": "find", "arguments": {"x": 1}}}


def check_against_search(family: str, messages: Any, definitions: Any) -> None:
    """Each answer is trained once: behind its generation prompt, what the family's pattern finds at the text's end.

    Where one text has all answers, its tokens are the template's own.
    """
    tokenizer = TOKENIZERS[family]
    rows = encode_value(tokenizer, {"messages": messages, "tools": definitions})
    trained: list[tuple[str, str]] = []
    for row in rows:
        before = [tokenizer.decode(row.tokens[:first]) for first, _ in row.spans]
        trained += zip(before, trained_text(tokenizer, row), strict=True)
    render = partial(tokenizer.apply_chat_template, tools=definitions, tokenize=False)
    expected: list[tuple[str, str]] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            whole = render(messages[: i + 1])
            *_, found = re.findall(FAMILIES[family].answer, whole, flags=re.DOTALL)
            space = " " if whole[whole.rindex(found) - 1] == " " else ""  # which Mistral's template leaves to the model
            expected.append((render(messages[:i], add_generation_prompt=True), space + found))
    assert sorted(trained, key=lambda turn: len(turn[0])) == expected
    if len(rows) == 1:
        assert rows[0].tokens.tolist() == tokenizer(render(messages), add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversation())
def test_trained_tokens_are_the_answers_and_the_ends_of_their_turns(family: str, messages: Any):
    check_against_search(family, messages, None)


@pytest.mark.parametrize("family", WITH_TOOLS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_trained_tokens_are_the_answers_and_calls_and_the_ends_of_their_turns(family: str, data: st.DataObject):
    check_against_search(family, data.draw(conversation_with_tools(FAMILIES[family])), data.draw(tools))


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real material that lies beside some checkouts")
@pytest.mark.parametrize("name", ["llama-3.2", "qwen2.5"])
@pytest.mark.parametrize("file", ["gsm8k_train_1500", "gsm8k_test_200", "japanese_multiturn_80", "tool_calls_150"])
def test_real_templates_and_rows_train_what_a_search_finds(name: str, file: str):
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    is_llama = name.startswith("llama")
    head = re.escape("<|start_header_id|>assistant<|end_header_id|>\n\n" if is_llama else "<|im_start|>assistant\n")
    pattern = f"{head}(.*?{re.escape('<|eot_id|>' if is_llama else '<|im_end|>')})"
    values = [json.loads(line) for line in (SHARED / "data" / f"{file}.jsonl").open(encoding="utf-8")]
    encoder = Encoder(tokenizer, Settings(train_on="assistant", max_length=10**6))
    results = encoder.encode([("test", convert(value, "auto")) for value in values])
    assert len(results) >= 80
    for value, (row,) in zip(values, results):
        rendered = ChatTemplate(Template.of(tokenizer)).text(value["messages"], value.get("tools"))
        found = re.findall(pattern, rendered, flags=re.DOTALL)
        assert trained_text(tokenizer, row) == found
        assert len(found) == sum(m["role"] == "assistant" for m in value["messages"])


def marked(before: str, inside: str, behind: str) -> str:
    """A template with generation marks around a part of the assistant's turn."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        + f"{{{{ {before} }}}}{{% generation %}}{{{{ {inside} }}}}{{% endgeneration %}}{{{{ {behind} }}}}"
        + "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )


MARKED = {
    "end of turn outside": marked("''", "m.content", "'<|im_end|>\n'"),
    "end of turn inside": marked("''", "m.content + '<|im_end|>'", "'\n'"),
    "newline inside": marked("''", "m.content + '<|im_end|>\n'", "''"),
    "white space control": marked("''", "m.content", "'<|im_end|>\n'").replace(
        "{% generation %}", "{%- generation -%}\n"
    ),
    "in a macro": "{% macro turn(m) %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ turn(m) }}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}",
}


@pytest.mark.parametrize("template", MARKED.values(), ids=MARKED)
@settings(max_examples=60, deadline=None)
@given(messages=conversation())
def test_marks_of_the_template_are_taken_with_the_end_of_the_turn(template: str, messages: Any):
    tokenizer = tokenizer_for(template)
    row = encode(tokenizer, messages)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(row.tokens) == rendered
    assert trained_text(tokenizer, row) == re.findall(FAMILIES["chatml"].answer, rendered, flags=re.DOTALL)


def test_template_may_mark_what_it_makes_of_an_answer():
    tokenizer = tokenizer_for(marked("''", "'<think></think>' + m.content + '.<|im_end|>'", "''"))
    assert trained_text(tokenizer, encode(tokenizer, PLAIN)) == ["<think></think>c d.<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [
        marked("m.content", "'<|im_end|>'", "''"),
        marked("''", "m.content | upper", "'<|im_end|>'"),
        marked("''", "m.content", "'<|im_end|>'") + "{% generation %}<|im_end|>{% endgeneration %}",
        "{% generation %}" + CHATML + "{% endgeneration %}",
    ],
)
def test_wrong_marks_are_refused(template: str):
    with pytest.raises(BadRow, match="fix its generation marks"):
        encode(tokenizer_for(template), PLAIN + PLAIN)


def test_marked_turn_without_an_end_is_refused():
    with pytest.raises(BadRow, match="would not learn to stop"):
        encode(tokenizer_for(marked("''", "m.content", "'\n'")), PLAIN)


def test_marks_of_threads_do_not_mix_though_their_encoders_differ():
    tokenizer = tokenizer_for(MARKED["end of turn outside"])
    examples = [
        ("", convert({"messages": [PLAIN[0], {"role": "assistant", "content": "c d " * i}]}, "messages"))
        for i in range(1, 100)
    ]

    def spans(train_on: str) -> list[Any]:
        encoder = Encoder(tokenizer, Settings(train_on=train_on, max_length=10**6))
        return [row.spans for (row,) in encoder.encode(examples)]

    alone = spans("assistant")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(spans, ["assistant", "all"] * 8))
    finally:
        sys.setswitchinterval(interval)
    assert together[::2] == [alone] * 8


@pytest.mark.parametrize("family", FAMILIES)
def test_one_encoder_gives_the_same_rows_on_eight_threads(family: str):
    messages = [[*PLAIN * (i % 3 + 1)] for i in range(60)]
    examples = [("", convert({"messages": m}, "messages")) for m in messages]
    shared = Encoder(TOKENIZERS[family], Settings(train_on="assistant", max_length=10**6))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: shared.encode(examples), range(8)))
    alone = Encoder(TOKENIZERS[family], Settings(train_on="assistant", max_length=10**6)).encode(examples)
    rows = [[(row.tokens.tolist(), row.spans) for (row,) in result] for result in [alone, *results]]
    assert rows == rows[:1] * 9


@pytest.mark.parametrize("format", ["'%d %b %Y'", "'%-d %-m %F'", '"%Y-%m-%d %H:%M:%S, %A"', "f"])
def test_date_of_today_is_not_rendered(format: str):
    template = "{% set f = '%B %d' %}{{ strftime_now(" + format + ") }}{{ strftime_now is defined }}" + CHATML
    written = DATE.strftime({"f": "%B %d"}.get(format, format[1:-1]))
    rendered = ChatTemplate(Template.of(tokenizer_for(template))).text(PLAIN, None)
    assert rendered == written + "True" + ChatTemplate(Template.of(tokenizer_for(CHATML))).text(PLAIN, None)
    assert datetime.now().strftime("%Y-%m-%d") not in rendered


# How a template may write the turns around an answer, and what it then trains; None where it must be refused.
TURN = "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ ANSWER }}{% endif %}"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
STRANGE = {
    "upper case": (LOOP.replace("ANSWER", "m.content | upper + '</s>'"), None),
    "no answer": (LOOP.replace("ANSWER", "'</s>'"), None),
    "no end": (LOOP.replace("ANSWER", "m.content"), None),
    "reversed": (LOOP.replace("in messages", "in messages | reverse").replace("ANSWER", "m.content + '</s>'"), None),
    "cut": (LOOP.replace("ANSWER", "m.content[:2] + '</s>'"), None),
    "escaped": (LOOP.replace("ANSWER", "m.content | tojson + '</s>'"), None),
    "twice": (LOOP.replace("ANSWER", "m.content + m.content + '</s>'"), ["c\ndc\nd</s>", "ee</s>"]),
    "two ends": (LOOP.replace("ANSWER", "m.content + '<|eot|></s>'"), ["c\nd<|eot|></s>", "e<|eot|></s>"]),
    "a word before the end": (LOOP.replace("ANSWER", "m.content + '</a></s>\n'"), ["c\nd</a></s>", "e</a></s>"]),
    "the question in the answer": (
        LOOP.replace("{% for", "{% set q = messages[0].content %}{% for").replace("ANSWER", "q + m.content + '</s>'"),
        ["ac\nd</s>", "ae</s>"],
    ),
    "a name from the content": (
        LOOP.replace("ANSWER", "'<|head|>' + m.content[:1] + '<|/head|>' + m.content + '</s>'"),
        ["<|head|>c<|/head|>c\nd</s>", "<|head|>e<|/head|>e</s>"],
    ),
    "end only behind the last": (LOOP.replace("ANSWER", "m.content + '\n'") + "</s>", None),
}


@pytest.mark.parametrize(("template", "expected"), STRANGE.values(), ids=STRANGE)
def test_strange_template_is_masked_rightly_or_refused(template: str, expected: list[str] | None):
    tokenizer = tokenizer_for(template)
    contents = ["a", "c\nd", "b", "e"]
    messages = [{"role": role, "content": c} for role, c in zip(["user", "assistant"] * 2, contents)]
    if expected is None:
        with pytest.raises(BadRow, match=r"does not write the words|does not go on|would not learn to stop"):
            encode(tokenizer, messages)
    else:
        assert trained_text(tokenizer, encode(tokenizer, messages)) == expected


# Texts that look like what stands around them: parts of the templates without special tokens, and each other
LOOKALIKE = [
    "a",
    "\n",
    " ",
    "user\n",
    "assistant\n",
    "assistant: ",
    "user: ",
    "\n\n",
    "</a>",
    "a\n",
    "\na",
    "[",
    "{",
    '"',
]
# without special tokens but at the end of a turn, where a content is harder to tell from its surroundings
BARER = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ USER + '\n' }}{% else %}{{ ANSWER + '</s>' }}"
    "{% endif %}{% endfor %}"
)
BARE = BARER.replace("USER", "'user: ' + USER").replace("ANSWER", "'assistant: ' + ANSWER")


@pytest.mark.parametrize("template", [BARE, BARER])
@pytest.mark.parametrize("user", ["m.content", "m.content | trim"])
@pytest.mark.parametrize("answer", ["m.content", "m.content | trim"])
@example(contents=["a\n", "\na"])
@given(
    contents=st.lists(st.lists(st.sampled_from(LOOKALIKE), min_size=1, max_size=4).map("".join), min_size=2, max_size=6)
)
@settings(max_examples=100, deadline=None)
def test_contents_that_look_like_the_template_do_not_shift_the_turns(
    template: str, user: str, answer: str, contents: list[str]
):
    contents = [content if content.strip() else content + "x" for content in contents[: len(contents) // 2 * 2]]
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    tokenizer = tokenizer_for(template.replace("USER", user).replace("ANSWER", answer))
    (rendering,) = ChatTemplate(Template.of(tokenizer)).render(messages, None)
    rendered, turns = rendering.text, rendering.turns.values()
    answers = [content.strip() if "trim" in answer else content for content in contents[1::2]]
    head = "assistant: " if template == BARE else ""  # which it leaves to the model: it has no generation prompt
    assert [rendered[first:end] for first, end in turns] == [head + words + "</s>" for words in answers]


def test_question_is_not_trained_where_only_the_header_of_the_next_answer_is_special():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'user: ' + m.content + '\n<|head|>' }}"
        "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}</s>"
    )
    named = [*PLAIN, {"role": "user", "content": "e", "name": "Ann"}, PLAIN[1]]
    with pytest.raises(BadRow, match="does not go on with message 4"):
        encode(tokenizer_for(template), named)


@pytest.mark.parametrize("written", ["c.function.arguments", "(c.function.arguments | string)"])
@pytest.mark.parametrize("said", ["I look.", "I look for {'x': True, 'y': None}."])
def test_arguments_are_json_where_a_template_writes_them_as_they_come(written: str, said: str):
    call = "{% for c in m.tool_calls %}{{ '<call>' + c.function.name }} {{ ARGUMENTS }}{% endfor %}"
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% if m.tool_calls %}CALL{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ).replace("CALL", call.replace("ARGUMENTS", written))
    arguments = {"x": True, "y": None}
    asked = {"role": "assistant", "content": said, "tool_calls": [{"name": "find", "arguments": arguments}]}
    tokenizer = tokenizer_for(template)
    (row,) = encode_value(tokenizer, {"messages": [PLAIN[0], asked, {"role": "tool", "content": "1"}, PLAIN[1]]})
    assert trained_text(tokenizer, row) == [f"{said}<call>find {json.dumps(arguments)}<|im_end|>", "c d<|im_end|>"]


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_arguments_stay_as_they_are_where_only_a_question_has_them_as_python_writes_them(family: str):
    asked = {"role": "user", "content": "Find {'x': 1}."}
    talk = [asked, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    (row,) = encode_value(TOKENIZERS[family], {"messages": talk})
    assert TOKENIZERS[family].decode(row.tokens) == TOKENIZERS[family].apply_chat_template(talk, tokenize=False)


SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER_WITH_CALL = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"x": {}}}}}
LEFT_OUT: dict[str, tuple[str, dict[str, Any], str]] = {
    "tool calls": (CHATML, {"messages": [PLAIN[0], {**ANSWER_WITH_CALL, "content": ""}, PLAIN[1]]}, "tool calls"),
    "words beside a call": (
        FAMILIES["llama3"].template,
        {"messages": [PLAIN[0], ANSWER_WITH_CALL]},
        "the words of the assistant beside a tool call",
    ),
    "tools": (CHATML, {"messages": PLAIN, "tools": [TOOL]}, "the definitions of tools"),
    "tools of the model's own": (
        CHATML,
        {"messages": PLAIN, "tools": [{"type": "web_search"}]},
        "the definitions of tools",
    ),
    "tools that are called": (
        FAMILIES["zephyr"].template.replace(
            "m['content']", "(m.tool_calls | tojson if m.tool_calls else m['content'])"
        ),
        {"messages": [PLAIN[0], {**ANSWER_WITH_CALL, "content": ""}, PLAIN[1]], "tools": [TOOL]},
        "the definitions of tools",
    ),
    "reasoning": (
        CHATML,
        {"messages": [PLAIN[0], {**PLAIN[1], "reasoning_content": "because"}]},
        "reasoning",
    ),
    "the system's words": (
        "{% for m in messages if m.role != 'system' %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}",
        {"messages": [SYSTEM, *PLAIN]},
        "the words of the system",
    ),
    "the developer's words": (
        "{% for m in messages if m.role != 'developer' %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}",
        {"messages": [{**SYSTEM, "role": "developer"}, *PLAIN]},
        "the words of the developer",
    ),
}


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize(("template", "value", "what"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_the_template_leaves_out_is_refused_or_noted(
    template: str, value: dict[str, Any], what: str, train_on: str
):
    tokenizer = tokenizer_for(template)
    with pytest.raises(BadRow, match=f"the chat template leaves out {what}; .* or set data.on_dropped to warn"):
        encode_value(tokenizer, value, train_on=train_on)
    (row,) = encode_value(tokenizer, value, train_on=train_on, on_dropped="warn")
    assert row.dropped == (what,)


@pytest.mark.parametrize("reasons", [[None, "because"], [None, None], ["once", "twice"]])
def test_answers_that_lose_their_reasoning_once_another_follows_are_each_trained_as_they_are_generated(
    reasons: list[str | None],
):
    messages: list[dict[str, Any]] = []
    for i, reason in enumerate(reasons):
        answer = {"role": "assistant", "content": f"answer {i}", "reasoning_content": reason}
        messages += [{"role": "user", "content": f"question {i}"}, answer]
    rows = encode_value(TOKENIZER_WITH_REASONING, {"messages": messages})
    assert [trained_text(TOKENIZER_WITH_REASONING, row) for row in rows] == [
        [f"<think>\n{reason or ''}\n</think>\n\nanswer {i}<|im_end|>"] for i, reason in enumerate(reasons)
    ]
    assert "<think>" not in TOKENIZER_WITH_REASONING.decode(rows[1].tokens[: rows[1].spans[0][0]])


TOKENIZER_WITH_REASONING = tokenizer_for(QWEN3)


@pytest.mark.parametrize("reason", [None, "because"])
def test_reasoning_is_read_and_not_trained_where_that_is_asked_for(reason: str | None):
    value = {"messages": [PLAIN[0], {**PLAIN[1], "reasoning_content": reason}]}
    (with_it,), (without,) = (
        encode_value(TOKENIZER_WITH_REASONING, value, train_think=train_think) for train_think in ("auto", "never")
    )
    assert without.tokens.tolist() == with_it.tokens.tolist()
    assert trained_text(TOKENIZER_WITH_REASONING, with_it) == [f"<think>\n{reason or ''}\n</think>\n\nc d<|im_end|>"]
    assert trained_text(TOKENIZER_WITH_REASONING, without) == ["c d<|im_end|>"]


def test_reasoning_that_the_generation_prompt_has_opened_is_not_trained_either():
    thought = "('<think>\\nwell\\n</think>\\n\\n' if message['role'] == 'assistant' else '')"
    opened = CHATML.replace("message['content']", f"{thought} + message['content']")
    opened = opened.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    tokenizer = tokenizer_for(opened)
    assert trained_text(tokenizer, encode(tokenizer, PLAIN)) == ["well\n</think>\n\nc d<|im_end|>"]
    assert trained_text(tokenizer, encode(tokenizer, PLAIN, train_think="never")) == ["c d<|im_end|>"]


@pytest.mark.parametrize("thought", ["<think>hm</think>\n\n", "<think>\nhm\n</think>\n\n", "<think> hm</think>"])
def test_block_of_reasoning_that_the_generation_prompt_has_opened_is_trained_once(thought: str):
    tokenizer = tokenizer_for(CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}"))
    row = encode(tokenizer, [PLAIN[0], {"role": "assistant", "content": f"{thought}Yes."}])
    expected = thought.removeprefix("<think>").lstrip() + "Yes.<|im_end|>"
    assert trained_text(tokenizer, row) == [expected]
    assert tokenizer.decode(row.tokens).count("<think>") == 1


@pytest.mark.parametrize("answer", ["Use <think> for that.", "<think> is a tag.", "Say <think>, then </think> x"])
def test_end_of_a_turn_is_trained_though_the_words_hold_tags_of_reasoning(answer: str):
    tokenizer = tokenizer_for(CHATML.replace("<|im_end|>", "<|end|>").replace("<|im_start|>", "<|eot|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|eot|>"]})
    row = encode(tokenizer, [PLAIN[0], {"role": "assistant", "content": answer}], train_think="never")
    assert trained_text(tokenizer, row)[-1].endswith("<|end|>")


@pytest.mark.parametrize(
    ("variable", "thinks"), [("enable_thinking", "true"), ("thinking", "true"), ("reasoning_effort", "'high'")]
)
def test_template_is_told_to_reason_where_the_answer_does(variable: str, thinks: str):
    prompt = f"<|im_start|>assistant\n<think>{{% if {variable} != {thinks} %}}</think>{{% endif %}}"
    tokenizer = tokenizer_for(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )
    assert trained_text(tokenizer, encode(tokenizer, PLAIN)) == ["c d<|im_end|>"]
    reasoned = [PLAIN[0], {**PLAIN[1], "reasoning_content": "because"}]
    assert trained_text(tokenizer, encode(tokenizer, reasoned)) == ["because</think>c d<|im_end|>"]


def test_template_without_an_end_of_turn_token_is_refused():
    tokenizer = tokenizer_for("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    with pytest.raises(BadRow, match="would not learn to stop"):
        encode(tokenizer, PLAIN)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("raise_exception('roles must alternate')", "roles must alternate"),
        ("messages[0].content.index('#')", "substring not found"),
        ("messages[0].content + 1", "can only concatenate"),
        ("1 // 0", "division"),
        ("messages[0].nothing.more", "no attribute 'nothing'"),
        ("messages[9].content.x", "no element 9"),
    ],
)
def test_template_that_fails_on_a_conversation_is_a_bad_row_with_its_words(expression: str, reason: str):
    with pytest.raises(BadRow, match=f"rejects the conversation .*{reason}"):
        encode(tokenizer_for("{{ " + expression + " }}" + CHATML), PLAIN)


def test_template_that_refuses_only_what_turns_are_found_with_still_trains():
    short = (
        "{% for m in messages %}{% if m.content | length < 2 %}{{ raise_exception('short') }}{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_for(short + CHATML)
    assert trained_text(tokenizer, encode(tokenizer, PLAIN)) == ["c d<|im_end|>"]


def test_tokenizer_with_several_templates_and_no_default_is_refused():
    with pytest.raises(BadRow, match="several chat templates and no default"):
        encode(tokenizer_for({"tool_use": CHATML}), PLAIN)


def test_template_for_tools_is_taken_where_there_are_tools():
    tokenizer = tokenizer_for({"default": CHATML, "tool_use": "tools {{ tools | tojson }}" + CHATML})
    definitions = [{"type": "function", "function": {"name": "find"}}]
    rendered = [tokenizer.decode(encode(tokenizer, PLAIN, tools=given).tokens) for given in (None, definitions)]
    assert [text.startswith("tools ") for text in rendered] == [False, True]


def test_conversation_of_more_messages_than_there_are_marks_is_refused():
    with pytest.raises(BadRow, match="66,000 messages"):
        ChatTemplate(Template.of(TOKENIZERS["chatml"])).render(PLAIN * 33_000, None)


anything = st.sampled_from(
    ["a", " ", "\n", "<|im_end|>", "</s>", "<think>", "</think>", "{{ x }}", "{%", "日", "\u0301", '"']
)
words = st.lists(anything, min_size=1, max_size=4).map("".join)
any_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "assistant", "tool"]), "content": words},
    optional={
        "name": words,
        "reasoning_content": words,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"name": words, "arguments": st.dictionaries(words, words | st.floats())}), max_size=2
        ),
    },
)
ANY_TEMPLATE = [*(family.template for family in FAMILIES.values()), QWEN3, *MARKED.values(), BARE]


@pytest.mark.parametrize("template", ANY_TEMPLATE)
@given(messages=st.lists(any_message, min_size=1, max_size=5), definitions=st.none() | tools)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_conversation_gives_turns_with_their_words_and_an_end_or_a_reason(
    template: str, messages: Any, definitions: Any
):
    tokenizer = tokenizer_for(template)
    try:
        messages = [PLAIN[0], *messages, PLAIN[1]]
        example = convert({"messages": messages, "tools": definitions}, "messages")
        rows = encode_value(tokenizer, {"messages": messages, "tools": definitions})
    except BadRow:
        return
    assert example.messages is not None
    answers = [message for message in example.messages if message["role"] == "assistant"]
    turns = sorted((first, text) for row in rows for (first, _), text in zip(row.spans, trained_text(tokenizer, row)))
    said = [re.sub(r"<think>\s*</think>", "", message["content"]).strip() for message in answers]  # which loses nothing
    assert all(words in text for words, (_, text) in zip(said, turns, strict=True))
    ends = {int(row.tokens[end - 1]) for row in rows for _, end in row.spans}
    assert ends <= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
