"""Rows: special-token strings as text, choice of turns, cutting, plain text, and tokenizers of several kinds."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
from chat_templates import (
    CHATML,
    FAMILIES,
    SPECIAL,
    TOKENIZERS,
    WITH_TOOLS,
    conversation,
    conversation_with_tools,
    encode,
    encode_value,
    text,
    tokenizer_for,
    trained_text,
    turns_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from finetune.data.encoding import Encoder, Row, Settings, TooLong
from finetune.data.encoding_workers import Encoded, encoded, records_of
from finetune.data.formats import Example, convert
from finetune.data.prompt_texts import Prompt, tokens_of
from finetune.data.sources import Source
from finetune.data.sources.text_files import TEXT_BLOCK
from finetune.data.special_edges import refuse_special_edges
from finetune.errors import BadRow

SHARED = Path(__file__).parents[2] / "shared"
PLAIN = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
ROLES = ["user", "assistant"]
ATTACKS = [*SPECIAL, "<|im_start|>", "<|im_end|>"]
PLACES = ["system", "user", "assistant", "argument", "argument's name", "name", "tool result", "description"]


def with_word(word: str, place: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation with tools, and the tools, with a word in one place."""

    def put(here: str) -> str:
        return f"x {word}{word} y{word}" if here == place else "x y"

    call = {"name": put("name"), "arguments": {put("argument's name"): [put("argument")]}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": put("system")},
        {"role": "user", "content": put("user")},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call12345", "function": call}]},
        {"role": "tool", "content": put("tool result")},
        {"role": "assistant", "content": put("assistant")},
    ]
    function = {"name": put("name"), "description": put("description"), "parameters": {"type": "object"}}
    return messages, [{"type": "function", "function": function}]


@pytest.mark.parametrize("family", WITH_TOOLS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_special_token_strings_stay_text_wherever_they_stand(family: str, place: str, train_on: str):
    tokenizer, end = TOKENIZERS[family], FAMILIES[family].end
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    harmless = encode(tokenizer, *with_word("z", place)[:1], tools=with_word("z", place)[1], train_on=train_on)
    for word in ATTACKS:
        messages, definitions = with_word(word, place)
        row = encode(tokenizer, messages, tools=definitions, train_on=train_on)
        kept = [[token for token in each.tokens.tolist() if token in special] for each in (row, harmless)]
        assert kept[0] == kept[1]
        # arguments as the example holds them, not as JSON text
        assert tokenizer.decode(row.tokens) == tokenizer.apply_chat_template(
            [
                {**m, "tool_calls": [{**c, "type": "function"} for c in m["tool_calls"]]} if "tool_calls" in m else m
                for m in messages
            ],
            tools=definitions,
            tokenize=False,
        )
        if train_on == "assistant":
            call, answer = trained_text(tokenizer, row)
            assert answer.strip() == messages[-1]["content"] + end
            assert call.endswith(end)


@pytest.mark.parametrize("family", FAMILIES)
@given(messages=conversation(), word=st.sampled_from(ATTACKS), at=st.integers(0, 30), i=st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_special_token_strings_in_any_content_stay_text(family: str, messages: Any, word: str, at: int, i: int):
    tokenizer = TOKENIZERS[family]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    message = messages[i % len(messages)]
    attacked = [{**m, "content": m["content"][:at] + word + m["content"][at:]} if m is message else m for m in messages]
    rows = [encode_value(tokenizer, {"messages": each}) for each in (attacked, messages)]
    kept = [[token for row in each for token in row.tokens.tolist() if token in special] for each in rows]
    assert kept[0] == kept[1]
    assert tokenizer.decode(rows[0][-1].tokens) == tokenizer.apply_chat_template(attacked, tokenize=False)
    assert [len(row.spans) for row in rows[0]] == [len(row.spans) for row in rows[1]]


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real material that lies beside some checkouts")
@pytest.mark.parametrize("name", ["llama-3.2", "qwen2.5"])
def test_real_tokenizers_keep_special_token_strings_as_text(name: str):
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    strings = [tokenizer.eos_token, tokenizer.decode([min(special)]), tokenizer.decode([max(special)])]
    words = [f.format(word) for word in strings for f in ("x {} y", "x{0}{0}y", "x {}", "日本{}語")]
    attacked = [[{**m, "content": w} if m["role"] == role else m for m in PLAIN] for role in ROLES for w in words]
    # one encoder for all: it copies its tokenizer
    encoder = Encoder(tokenizer, Settings(train_on="assistant", max_length=100))
    results = encoder.encode([("test", convert({"messages": messages}, "auto")) for messages in [PLAIN, *attacked]])
    (plain,), *rows = results
    for messages, written, (row,) in zip(attacked, words * 2, rows, strict=True):
        assert written in tokenizer.decode(row.tokens)
        assert sum(t in special for t in row.tokens.tolist()) == sum(t in special for t in plain.tokens.tolist())
        assert trained_text(tokenizer, row) == [messages[1]["content"] + tokenizer.eos_token]


def test_other_added_tokens_are_taken_as_they_are_when_a_user_writes_them():
    tokenizer = tokenizer_for(CHATML)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    row = encode(tokenizer, [{"role": "user", "content": "a <tool_call> b"}, PLAIN[1]])
    assert tokenizer.convert_tokens_to_ids("<tool_call>") in row.tokens


@pytest.mark.parametrize(("begin", "end"), [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
@pytest.mark.parametrize("word", ["", "<|im_end|>"])
@pytest.mark.parametrize("train_think", ["auto", "never"])
def test_marks_of_reasoning_in_an_answer_are_tokens_and_its_reasoning_is_told_from_its_words(
    begin: str, end: str, word: str, train_think: str
):
    tokenizer = tokenizer_for(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": [begin, end]}, replace_extra_special_tokens=False)
    (row,) = encode_value(
        tokenizer,
        {"messages": [PLAIN[0], {"role": "assistant", "content": f"{begin}a {word} b{end}c {word} d"}]},
        train_think=train_think,
    )
    answer = f"c {word} d<|im_end|>"
    assert trained_text(tokenizer, row) == [answer if train_think == "never" else f"{begin}a {word} b{end}{answer}"]
    marks = tokenizer.convert_tokens_to_ids([begin, end])
    assert [token for token in row.tokens.tolist() if token in marks] == marks
    assert row.tokens.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2


@pytest.mark.parametrize(
    ("role", "content"),
    [
        ("system", "x <think>a</think> y"),
        ("user", "x <think>a</think> y"),
        ("assistant", "x <think> y"),
        ("assistant", "x </think> y <think>"),
    ],
)
def test_marks_of_reasoning_elsewhere_stay_text(role: str, content: str):
    tokenizer = tokenizer_for(CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    talk = [{"role": "system", "content": "s"}, *PLAIN]
    row = encode(tokenizer, [{**m, "content": content} if m["role"] == role else m for m in talk])
    assert content in tokenizer.decode(row.tokens)
    assert not set(tokenizer.convert_tokens_to_ids(["<think>", "</think>"])) & set(row.tokens.tolist())


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversation(), data=st.data())
def test_last_and_untrained_turns_choose_among_the_turns(family: str, messages: Any, data: st.DataObject):
    tokenizer = TOKENIZERS[family]
    every = turns_of(encode_value(tokenizer, {"messages": messages}))
    assert turns_of([encode(tokenizer, messages, train_on="last")]) == every[-1:]
    whole = encode(tokenizer, messages, train_on="all")
    assert whole.spans == [(1, len(whole.tokens))]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    trained = sorted(data.draw(st.sets(st.sampled_from(range(len(answers))), min_size=1)))
    weighed = [
        {**m, "weight": int(answers.index(i) in trained)} if m["role"] == "assistant" else m
        for i, m in enumerate(messages)
    ]
    rows = encode_value(tokenizer, {"messages": weighed})
    assert turns_of(rows) == [every[k] for k in trained]
    chosen = encode(tokenizer, weighed, train_on="last")
    assert turns_of([chosen]) == [every[trained[-1]]]
    assert chosen.prompt_tokens == len(every[trained[-1]][0])
    assert rows[-1].question == chosen.question
    assert chosen.question == messages[answers[trained[-1]] - 1]["content"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_prompt_is_what_the_template_renders_before_the_last_answer(family: str, data: st.DataObject):
    tokenizer, has_tools = TOKENIZERS[family], family in WITH_TOOLS
    messages = data.draw(conversation_with_tools(FAMILIES[family]) if has_tools else conversation())
    row = encode_value(tokenizer, {"messages": messages})[-1]
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(row.tokens[: row.prompt_tokens]) == prompt


@pytest.mark.parametrize("family", FAMILIES)
@given(messages=conversation(), train_on=st.sampled_from(["assistant", "last", "all"]))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_cut_row_is_the_beginning_of_the_whole_row_at_every_length(family: str, messages: Any, train_on: str):
    whole = encode_value(TOKENIZERS[family], {"messages": messages}, train_on=train_on)[-1]
    for length in range(1, len(whole.tokens) + 2):
        cut = encode_value(TOKENIZERS[family], {"messages": messages}, train_on=train_on, max_length=length)[-1]
        assert cut.tokens.tolist() == whole.tokens[:length].tolist()
        assert cut.trained == whole.trained[:length]
        assert all(0 < first < end <= len(cut.tokens) for first, end in cut.spans)
        assert cut.prompt_tokens == (whole.prompt_tokens if whole.prompt_tokens < length else 0)
        assert cut.uncut_tokens == len(whole.tokens)


@pytest.mark.parametrize("value", [{"messages": PLAIN * 2}, {"prompt": "a b", "completion": "c d e f g"}])
def test_long_rows_lose_their_end_or_their_beginning_or_are_left_out(value: Any):
    tokenizer = TOKENIZERS["chatml"]
    (whole,) = encode_value(tokenizer, value)
    for length in range(2, len(whole.tokens)):
        (row,) = encode_value(tokenizer, value, max_length=length, too_long="keep_end")
        assert row.tokens.tolist() == whole.tokens[-length:].tolist()
        assert row.trained == [False, *whole.trained[-length + 1 :]]
        assert row.uncut_tokens == len(whole.tokens)
        with pytest.raises(TooLong, match=rf"^it has {len(whole.tokens)} tokens, more than data.max_length {length}$"):
            encode_value(tokenizer, value, max_length=length, too_long="drop")
        with pytest.raises(BadRow, match=r"tokens, more than data.max_length \d+; see data.too_long"):
            encode_value(tokenizer, value, max_length=length, too_long="error")
    for too_long in ("cut", "keep_end", "drop", "error"):
        (row,) = encode_value(tokenizer, value, max_length=len(whole.tokens), too_long=too_long)
        assert row.tokens.tolist() == whole.tokens.tolist()
    assert len(encode_value(tokenizer, {"text": "a b c d e f g"}, max_length=4, too_long="error")) > 1


def test_end_of_turn_is_trained_though_it_equals_pad():
    tokenizer = TOKENIZERS["chatml"]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    row = encode(tokenizer, PLAIN)
    ends = [trained for token, trained in zip(row.tokens.tolist(), row.trained) if token == tokenizer.eos_token_id]
    assert ends == [False, True]


def test_space_that_the_header_swallows_does_not_train_the_header():
    tokenizer = tiny.build_tokenizer(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    tokens = [AddedToken(f"<|{name}|>", rstrip=True, special=True) for name in ("user", "assistant", "end")]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    row = encode(tokenizer, [PLAIN[0], {"role": "assistant", "content": "\n c d"}])
    assert trained_text(tokenizer, row) == ["c d<|end|>"]


def beginning(template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a BOS before each text."""
    tokenizer = tokenizer_for(template)
    tokenizer.bos_token = "<s>"
    bos = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    assert tokenizer("a")["input_ids"][0] == bos
    return tokenizer


def test_a_text_is_asked_without_the_end_that_a_tokenizer_writes_behind_texts():
    tokenizer = beginning()
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {tokenizer.eos_token}",
        special_tokens=[("<s>", tokenizer.bos_token_id), (tokenizer.eos_token, end)],
    )
    assert tokenizer("a b")["input_ids"][-1] == end
    asked = Prompt.of_user("test:1", "a b", is_plain=True)
    found = tokens_of(tokenizer, asked, "a b")
    assert found == tokenizer("a b")["input_ids"][:-1]
    (row,) = encode_value(tokenizer, {"prompt": "a b", "completion": " c"})
    assert row.tokens.tolist()[: len(found)] == found


def test_bos_of_the_template_is_not_doubled_by_the_tokenizer():
    tokenizer = beginning(FAMILIES["llama3"].template)
    row = encode(tokenizer, PLAIN)
    assert [token for token in row.tokens if token == tokenizer.bos_token_id] == [tokenizer.bos_token_id]
    assert tokenizer.decode(row.tokens) == tokenizer.apply_chat_template(PLAIN, tokenize=False)


@given(prompt=text, completion=text, begins=st.booleans(), train_on=st.sampled_from(["assistant", "last", "all"]))
@settings(max_examples=100, deadline=None)
def test_completion_is_trained_with_eos_after_one_bos(prompt: str, completion: str, begins: bool, train_on: str):
    tokenizer = beginning() if begins else TOKENIZERS["zephyr"]
    (row,) = encode_value(tokenizer, {"prompt": prompt, "completion": completion}, train_on=train_on)
    start = "<s>" if begins else ""
    assert tokenizer.decode(row.tokens) == start + prompt + completion + tokenizer.eos_token
    eos = [token == tokenizer.eos_token_id for token in row.tokens.tolist()]
    assert eos == [False] * (len(eos) - 1) + [True]
    ((first, end),) = row.spans
    assert end == len(row.tokens)
    if train_on == "all":
        assert first == 1
    else:
        trained = tokenizer.decode(row.tokens[first:end])
        assert trained.endswith(completion + tokenizer.eos_token)
        # the first token may begin in the prompt, if the tokenizer joins them
        joined = tokenizer.decode(row.tokens[first + 1 : end])
        assert trained == completion + tokenizer.eos_token or len(joined) < len(completion + tokenizer.eos_token)
        assert row.prompt_tokens == first


@given(
    words=text.map(lambda t: t * 7),
    begins=st.booleans(),
    ends=st.booleans(),
    length=st.integers(2, 40),
    train_on=st.sampled_from(["assistant", "last", "all"]),
)
@settings(max_examples=100, deadline=None)
def test_rows_of_a_long_text_train_each_token_once(words: str, begins: bool, ends: bool, length: int, train_on: str):
    tokenizer = beginning() if begins else TOKENIZERS["zephyr"]
    encoder = Encoder(tokenizer, Settings(max_length=length, train_on=train_on))
    (rows,) = encoder.encode([("test:1", Example(None, completion=words, ends=ends))])
    assert not isinstance(rows, BadRow)
    whole = tokenizer(words)["input_ids"] + [tokenizer.eos_token_id] * ends
    assert [t for row in rows for f, e in row.spans for t in row.tokens[f:e].tolist()] == whole[1:]
    assert rows[0].tokens[0] == whole[0]
    assert all(before.tokens[-1] == after.tokens[0] for before, after in pairwise(rows))
    assert all(len(row.tokens) == length for row in rows[:-1])
    assert len(rows[-1].tokens) <= length


def rows_of(file: Path, tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    settings = Settings(max_length=10**6)
    (batch,) = encoded(records_of([Source(str(file))]), Encoder(tokenizer, settings), settings)
    assert not batch.refused
    return batch.rows


def test_only_the_first_block_of_a_long_file_begins_with_the_token_of_a_text(tmp_path: Path):
    words = "the tree walks\n" * (2 * TEXT_BLOCK // 15)
    (tmp_path / "long.txt").write_text(words)
    tokenizer = beginning()
    rows = rows_of(tmp_path / "long.txt", tokenizer)
    assert len(rows) == 2
    tokens = [token for row in rows for token in row.tokens.tolist()]
    assert tokenizer.decode(tokens) == f"<s>{words}<|im_end|>"


def test_row_of_a_file_of_rows_ends_whatever_its_keys_are(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "ends": false}')
    tokenizer = beginning()
    assert [tokenizer.decode(row.tokens) for row in rows_of(tmp_path / "rows.jsonl", tokenizer)] == ["<s>a<|im_end|>"]


def test_special_token_strings_in_plain_text_stay_text():
    tokenizer = beginning()
    (row,) = encode_value(tokenizer, {"text": "<s>a</s> b <|im_end|>"})
    assert tokenizer.decode(row.tokens) == "<s><s>a</s> b <|im_end|><|im_end|>"
    special = [token for token in row.tokens.tolist() if token in tokenizer.all_special_ids]
    assert special == [tokenizer.bos_token_id, tokenizer.eos_token_id]


EDGES = {
    "rendered": ({"text": "<|im_start|>user\nhi<|im_end|>\n"}, r"begins with <\|im_start\|>"),
    "BOS": ({"text": " <s>a b"}, "begins with <s>"),
    "EOS": ({"prompt": "a", "completion": " b</s>\n"}, "ends with </s>"),
}


@pytest.mark.parametrize(("value", "reason"), EDGES.values(), ids=EDGES)
def test_plain_texts_with_special_tokens_at_their_edges_are_refused_unless_that_is_meant(
    value: dict[str, Any], reason: str, tmp_path: Path
):
    (tmp_path / "rows.jsonl").write_text(json.dumps(value))
    tokenizer = beginning()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "</s>"]})

    def batch_of(how: Settings) -> Encoded:
        (batch,) = encoded(records_of([Source(str(tmp_path / "rows.jsonl"))]), Encoder(tokenizer, how), how)
        return batch

    refused = batch_of(Settings(max_length=100))
    assert re.search(f"{reason}, which is a special token", refused.refused[0].line.reason)
    assert not refused.rows
    (row,) = batch_of(Settings(max_length=100, on_dropped="warn")).rows
    assert sum(token in tokenizer.all_special_ids for token in row.tokens.tolist()) == 2


@pytest.mark.parametrize(
    ("words", "begins", "ends"), [("a </s> b", True, True), ("</s> b", False, True), ("a </s>", True, False)]
)
def test_special_tokens_within_a_text_and_at_the_edges_of_its_blocks_are_characters(
    words: str, begins: bool, ends: bool
):
    refuse_special_edges(Example(None, completion=words, begins=begins, ends=ends), ["</s>"])
    with pytest.raises(BadRow):
        refuse_special_edges(Example(None, completion=f"</s>{words}</s>", begins=begins, ends=ends), ["</s>"])


def test_tokenizer_without_eos_is_refused_for_plain_text():
    tokenizer = tiny.build_tokenizer(None)
    tokenizer.eos_token = None
    with pytest.raises(BadRow, match="no end-of-sequence token"):
        encode_value(tokenizer, {"text": "a"})


def test_tokenizer_without_a_chat_template_is_refused_for_conversations():
    with pytest.raises(BadRow, match="no chat template"):
        encode(tiny.build_tokenizer(None), PLAIN)


CORPUS = ["the tree walks and a river sings, user assistant system 日本語のテキスト。 123 abc"] * 4


def fast(backend: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *SPECIAL]})
    tokenizer.chat_template = template
    return tokenizer


def sentencepiece_bpe(template: str) -> PreTrainedTokenizerFast:
    """As Llama 2's: a space before the text, bytes for what it does not know."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = sorted({*"".join(CORPUS), "▁"} - {" "})
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "</s>", *pieces, *characters])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(backend, template)


def metaspace_unigram(template: str, *, byte_fallback: bool) -> PreTrainedTokenizerFast:
    """As T5's or ALBERT's, where characters out of the vocabulary are lost, or bytes."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    if byte_fallback:
        learnt = [("<unk>", 0.0), ("</s>", 0.0), *((piece, -10.0) for piece in pieces)]
        learnt += [
            (piece, -2.0 - i / 100) for i, piece in enumerate(sorted({*backend.get_vocab()} - {"<unk>", "</s>"}))
        ]
        backend.model = models.Unigram(learnt, 0, byte_fallback=True)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        backend.decoder = decoders.Metaspace()
    return fast(backend, template)


def trimmed_bpe(template: str) -> PreTrainedTokenizerFast:
    """Byte-level, whose offsets leave out the spaces, as RoBERTa's."""
    tokenizer = tokenizer_for(template)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert tokenizer.backend_tokenizer.encode("a b").offsets[-1] == (2, 3)
    return tokenizer


KINDS = {
    "sentencepiece bpe": sentencepiece_bpe,
    "unigram with bytes": lambda template: metaspace_unigram(template, byte_fallback=True),
    "trimmed offsets": trimmed_bpe,
}
BY_KIND = {
    (kind, family): build(FAMILIES[family].template)
    for kind, build in KINDS.items()
    for family in ("chatml", "mistral")
}


def squeezed(words: str) -> str:
    """Without white space, and in one form: tokenizers of these kinds keep neither."""
    return "".join(normalizers.NFKC().normalize_str(words).split())


@pytest.mark.parametrize(("kind", "family"), BY_KIND)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversation())
def test_other_kinds_of_tokenizers_train_the_answers_and_the_ends_of_their_turns(kind: str, family: str, messages: Any):
    tokenizer, end = BY_KIND[kind, family], FAMILIES[family].end
    turns = [turn for _, turn in turns_of(encode_value(tokenizer, {"messages": messages}))]
    answers = [squeezed(message["content"]) + end for message in messages if message["role"] == "assistant"]
    assert [squeezed(tokenizer.decode(turn)) for turn in turns] == answers
    ends = [turn[-1] for turn in turns]
    assert ends == [tokenizer.convert_tokens_to_ids(end)] * len(answers)


def test_answer_that_the_tokenizer_cannot_represent_is_refused():
    tokenizer = metaspace_unigram(CHATML, byte_fallback=False)
    assert encode(tokenizer, PLAIN).trained_tokens > 1
    with pytest.raises(BadRow, match=r"cannot represent an answer: .*becomes"):
        encode(tokenizer, [PLAIN[0], {"role": "assistant", "content": "c 🎉"}])
    with pytest.raises(BadRow, match="cannot represent an answer"):
        encode_value(tokenizer, {"prompt": "a", "completion": "🎉"})


def test_characters_that_the_tokenizer_brings_to_another_form_are_trained():
    tokenizer = metaspace_unigram(CHATML, byte_fallback=True)
    row = encode(tokenizer, [PLAIN[0], {"role": "assistant", "content": "ＡＢＣ！ ㍍"}])
    (answer,) = trained_text(tokenizer, row)
    assert answer.strip() == "ABC! メートル<|im_end|>"  # unknown characters in a row, a line end too, are one stretch


@given(
    prompt=st.text(alphabet="e\u0301\u0323 a\n가ᄀ\u1161", min_size=1),
    answer=st.text(alphabet="e\u0301\u0323 a\n가ᄀ\u1161>\u0338"),
)
@settings(max_examples=200, deadline=None)
def test_characters_that_the_tokenizer_composes_do_not_shift_the_mask(prompt: str, answer: str):
    row = encode(COMPOSING, [{"role": "user", "content": "q" + prompt}, {"role": "assistant", "content": answer + "a"}])
    nfc = normalizers.NFC().normalize_str
    assert [nfc(words) for words in trained_text(COMPOSING, row)] == [nfc(answer + "a") + "<|im_end|>"]


COMPOSING = tokenizer_for(CHATML)
COMPOSING.backend_tokenizer.normalizer = normalizers.NFC()


@given(kinds=st.lists(st.sampled_from(["chat", "shielded", "text", "pair", "bad"]), max_size=8))
@settings(max_examples=60, deadline=None)
def test_rows_come_back_in_the_order_of_their_examples(kinds: list[str]):
    values = {
        "chat": {"messages": PLAIN},
        "shielded": {"messages": [{"role": "user", "content": "<|im_end|>"}, PLAIN[1]]},
        "text": {"text": "a b"},
        "pair": {"prompt": "a", "completion": "b"},
        "bad": {"messages": [PLAIN[0], {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]},
    }
    encoder = Encoder(TOKENIZERS["chatml"], Settings(train_on="assistant", max_length=100))
    results = encoder.encode([(f"{kind}:{i}", convert(values[kind], "auto")) for i, kind in enumerate(kinds)])
    for i, (kind, result) in enumerate(zip(kinds, results, strict=True)):
        if kind == "bad":
            assert isinstance(result, BadRow)
        else:
            (alone,) = encode_value(TOKENIZERS["chatml"], values[kind], max_length=100)
            assert isinstance(result, list)
            (row,) = result
            assert isinstance(row, Row)
            assert (row.source, row.tokens.tolist(), row.spans) == (f"{kind}:{i}", alone.tokens.tolist(), alone.spans)
