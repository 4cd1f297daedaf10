"""The mask: found for four families of templates, and compared with an independent search in the rendered text."""

import re

import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.chat import BadRow, Encoder

LLAMA3 = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + '</s>' }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# the pattern of what precedes an answer in the rendered text, and the token that ends it
FAMILIES = {
    "chatml": (tiny.CHATML, re.escape("<|im_start|>assistant\n"), "<|im_end|>"),
    "llama3": (LLAMA3, re.escape("<|head|>assistant<|/head|>\n\n"), "<|eot|>"),
    "mistral": (MISTRAL, r" \[/INST\](?!\[INST\])", "</s>"),
    "zephyr": (ZEPHYR, re.escape("<|assistant|>\n"), "</s>"),
}
SPECIAL = ["<s>", "</s>", "<|head|>", "<|/head|>", "<|eot|>", "[INST]", "[/INST]"]


def tokenizer_for(template: str):
    tokenizer = tiny.build_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


TOKENIZERS = {family: tokenizer_for(template) for family, (template, _, _) in FAMILIES.items()}


def encode(tokenizer, messages, source: str = "test:1"):
    return Encoder(tokenizer).encode(messages, source)


text = st.text(
    alphabet=st.one_of(
        st.sampled_from("abc XYZ 123 .,!?\n\täß"),
        st.sampled_from("日本語のテキスト"),
        st.sampled_from("🎉👩‍💻❤️"),
    ),
    min_size=1,
    max_size=30,
).filter(lambda s: s.strip() != "")


@st.composite
def conversation(draw):
    messages = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(text)})
        messages.append({"role": "assistant", "content": draw(text)})
    return messages


def trained_text(tokenizer, row) -> list[str]:
    """The trained stretches of a row, decoded."""
    stretches, current = [], []
    for token, trained in [*zip(row.tokens, row.trained), (0, False)]:
        if trained:
            current.append(token)
        elif current:
            stretches.append(tokenizer.decode(current))
            current = []
    return stretches


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversation())
def test_trained_tokens_are_the_answers_and_the_ends_of_their_turns(family: str, messages):
    tokenizer, (_, before, end) = TOKENIZERS[family], FAMILIES[family]
    row = encode(tokenizer, messages, "test:1")
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert row.tokens == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    found = re.findall(before + "(.*?" + re.escape(end) + ")", rendered, flags=re.DOTALL)
    # the space before an answer of Mistral's template belongs to the answer's first token, or to none
    assert [answer.lstrip(" ") for answer in trained_text(tokenizer, row)] == [answer.lstrip(" ") for answer in found]
    assert len(found) == sum(m["role"] == "assistant" for m in messages)


@pytest.mark.parametrize("family", FAMILIES)
@given(word=st.sampled_from([*SPECIAL, "<|im_start|>", "<|im_end|>"]), place=st.sampled_from(["user", "assistant"]))
@settings(max_examples=40, deadline=None)
def test_special_token_strings_in_contents_stay_text(family: str, word: str, place: str):
    tokenizer, (_, _, end) = TOKENIZERS[family], FAMILIES[family]
    plain = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    attacked = [{**m, "content": f"x {word} {word}! y"} if m["role"] == place else m for m in plain]
    row = encode(tokenizer, attacked, "test:1")
    special = set(tokenizer.all_special_ids) | {t for t, a in tokenizer.added_tokens_decoder.items() if a.special}
    count = [sum(t in special for t in encode(tokenizer, m, "test:1").tokens) for m in (plain, attacked)]
    assert count[0] == count[1]
    assert tokenizer.decode(row.tokens) == tokenizer.apply_chat_template(attacked, tokenize=False)
    (answer,) = trained_text(tokenizer, row)
    assert answer.strip() == attacked[1]["content"] + end


QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
)


def test_template_that_renders_only_the_last_turn_with_reasoning_keeps_every_turn_trained():
    tokenizer = tokenizer_for(QWEN3)
    messages = [{"role": role, "content": f"{role} {i}"} for i in range(2) for role in ("user", "assistant")]
    row = encode(tokenizer, messages)
    assert trained_text(tokenizer, row) == ["assistant 0<|im_end|>", "assistant 1<|im_end|>"]


def test_end_of_turn_is_trained_though_it_equals_pad():
    tokenizer = TOKENIZERS["chatml"]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    row = encode(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "test:1")
    ends = [trained for token, trained in zip(row.tokens, row.trained) if token == tokenizer.eos_token_id]
    assert ends == [False, True]


def test_template_without_an_end_of_turn_token_is_refused():
    tokenizer = tokenizer_for("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}")
    with pytest.raises(BadRow, match="could not learn to stop"):
        encode(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "test:1")


def test_template_that_refuses_a_conversation_is_a_bad_row_with_its_words():
    tokenizer = tokenizer_for("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRow, match=r"refuses the conversation .*roles must alternate"):
        encode(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "test:1")


def test_template_that_changes_the_answer_is_refused():
    tokenizer = tokenizer_for("{% for m in messages %}{{ '<s>' + m['content'] | upper + '</s>' }}{% endfor %}")
    with pytest.raises(BadRow, match="cannot be told"):
        encode(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "test:1")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "no list"),
        ([], "no list"),
        (["hello"], "not an object"),
        ([{"role": "robot", "content": "a"}], "role 'robot'"),
        ([{"role": "user", "content": "a"}], "no assistant turn"),
        ([{"role": "user", "content": " "}, {"role": "assistant", "content": "a"}], "no text"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], "no text"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "calls tools"),
        ([{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "a"}], "surrogate"),
        ([{"role": "user", "content": chr(0xF0000)}, {"role": "assistant", "content": "a"}], "private"),
        ([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], "begins with the assistant"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_reason(messages, reason: str):
    with pytest.raises(BadRow, match=reason):
        encode(TOKENIZERS["chatml"], messages, "test:1")
