"""The assistant's turns: found for four families of templates, and compared with a search in the rendered text."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
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
    tokenizer_for,
    tools,
    trained_text,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from finetune.data.chat_template import DATE, ChatTemplate, Template
from finetune.data.encoding import Encoder
from finetune.data.formats import convert
from finetune.errors import BadRow

SHARED = Path(__file__).parents[2] / "shared"
PLAIN = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
CALL = {"id": "call12345", "type": "function", "function": {"name": "find", "arguments": {"x": 1}}}


def check_against_search(family: str, messages: Any, definitions: Any) -> None:
    """The row holds the rendered text, and trains what the family's pattern finds in it, and nothing else."""
    tokenizer = TOKENIZERS[family]
    row = encode(tokenizer, messages, tools=definitions)
    rendered = tokenizer.apply_chat_template(messages, tools=definitions, tokenize=False)
    found = re.findall(FAMILIES[family].answer, rendered, flags=re.DOTALL)
    assert len(found) == sum(m["role"] == "assistant" for m in messages)
    assert row.tokens.tolist() == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    # the space before an answer of Mistral's template belongs to the answer's first token, or to none
    starts = [" " if family == "mistral" else ""] * len(found)
    trained = trained_text(tokenizer, row)
    assert all(t in (f, start + f) for t, f, start in zip(trained, found, starts, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversation())
def test_trained_tokens_are_the_answers_and_the_ends_of_their_turns(family: str, messages: Any):
    check_against_search(family, messages, None)


@pytest.mark.parametrize("family", WITH_TOOLS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    encoder = Encoder(tokenizer, train_on="assistant", max_length=10**6)
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
        encoder = Encoder(tokenizer, train_on=train_on, max_length=10**6)
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
    shared = Encoder(TOKENIZERS[family], train_on="assistant", max_length=10**6)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: shared.encode(examples), range(8)))
    alone = Encoder(TOKENIZERS[family], train_on="assistant", max_length=10**6).encode(examples)
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
        ["c\nd</s>", "e</s>"],
    ),
    "a name from the content": (
        LOOP.replace("ANSWER", "'<|head|>' + m.content[:1] + '<|/head|>' + m.content + '</s>'"),
        ["<|head|>c<|/head|>c\nd</s>", "<|head|>e<|/head|>e</s>"],
    ),
    "end only behind the last": (LOOP.replace("ANSWER", "m.content + '\n'") + "</s>", ["c\nd\n[INST]", "e\n</s>"]),
}


@pytest.mark.parametrize(("template", "expected"), STRANGE.values(), ids=STRANGE)
def test_strange_template_is_masked_rightly_or_refused(template: str, expected: list[str] | None):
    tokenizer = tokenizer_for(template)
    contents = ["a", "c\nd", "b", "e"]
    messages = [{"role": role, "content": c} for role, c in zip(["user", "assistant"] * 2, contents)]
    if expected is None:
        with pytest.raises(BadRow, match=r"cannot be located|would not learn to stop"):
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
    rendered, turns = ChatTemplate(Template.of(tokenizer)).render(messages, None)
    answers = [content.strip() if "trim" in answer else content for content in contents[1::2]]
    assert [rendered[first:end] for first, end in turns] == [words + "</s>" for words in answers]


def test_question_is_not_trained_where_only_the_header_of_the_next_answer_is_special():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'user: ' + m.content + '\n<|head|>' }}"
        "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}</s>"
    )
    named = [*PLAIN, {"role": "user", "content": "e", "name": "Ann"}, PLAIN[1]]
    with pytest.raises(BadRow, match="would not learn to stop"):
        encode(tokenizer_for(template), named)


def test_template_that_leaves_out_tool_calls_is_refused():
    messages = [PLAIN[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, PLAIN[1]]
    with pytest.raises(BadRow, match="cannot be located"):
        encode(TOKENIZERS["chatml"], messages)


def test_template_that_leaves_out_the_words_beside_a_call_is_refused():
    messages = [PLAIN[0], {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}]
    with pytest.raises(BadRow, match="cannot be located"):
        encode(TOKENIZERS["llama3"], messages)


@pytest.mark.parametrize("reasons", [[None, "because"], [None, None], ["once", "twice"]])
def test_template_with_reasoning_in_the_last_turn_only_keeps_every_turn_trained(reasons: list[str | None]):
    messages: list[dict[str, Any]] = []
    for i, reason in enumerate(reasons):
        answer = {"role": "assistant", "content": f"answer {i}", "reasoning_content": reason}
        messages += [{"role": "user", "content": f"question {i}"}, answer]
    first, last = trained_text(TOKENIZER_WITH_REASONING, encode(TOKENIZER_WITH_REASONING, messages))
    assert first == "answer 0<|im_end|>"
    thought = f"<think>\n{reasons[1]}\n</think>\n\n" if reasons[1] else ""
    assert last == f"{thought}answer 1<|im_end|>"


TOKENIZER_WITH_REASONING = tokenizer_for(QWEN3)


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
    tokenizer = tokenizer_for({"default": CHATML, "tool_use": "tools " + CHATML})
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
        row = encode(tokenizer, messages, tools=definitions)
    except BadRow:
        return
    assert example.messages is not None
    answers = [message for message in example.messages if message["role"] == "assistant"]
    assert all(
        message["content"].strip() in stretch
        for message, stretch in zip(answers, trained_text(tokenizer, row), strict=True)
    )
    ends = [int(row.tokens[end - 1]) for _, end in row.spans]
    assert {*ends} <= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
