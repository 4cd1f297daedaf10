"""Chat templates by name: the texts of the real families, the right tokens trained, and generation that stops."""

import json
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
from chat_templates import ZEPHYR, encode, tokenizer_for, trained_text
from template_families import TALKS, tokenizer_of, tokenizer_with
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from finetune.data import named_templates
from finetune.data.named_templates import NAMED
from finetune.errors import BadRow, InputError
from recipes import sft

PLAIN = ("single turn", "several turns", "Japanese and emoji", "white space at both ends", "50 turns")
FAMILIES = {
    "chatml": "qwen2.5",
    "gemma": "gemma-3",
    "llama3": "llama-3.1",
    "mistral": "mistral-7b-v0.3",
    "phi3": "phi-3.5",
}
ENDS = {name: each.end or "</s>" for name, each in NAMED.items()}


def text_of(tokenizer: Any, messages: list[dict[str, Any]], prompt: bool = False) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


def reference(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the family's own template."""
    return tokenizer_for(ZEPHYR) if name == "zephyr" else tokenizer_of(FAMILIES[name])


def base_model(name: str, *, begins: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer without a chat template that knows the special tokens of a named one.

    Args:
        begins: its texts begin with a BOS.
    """
    tokenizer = tokenizer_with("", NAMED[name].specials, "</s>", "<s>")
    tokenizer.chat_template = None
    if begins:
        post = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = post
    return tokenizer


def named(name: str, **how: Any) -> PreTrainedTokenizerFast:
    tokenizer = base_model(name, **how)
    named_templates.use(tokenizer, name)
    return tokenizer


@pytest.mark.parametrize("talk", [*PLAIN, "system"])
@pytest.mark.parametrize("name", NAMED)
def test_a_named_template_writes_what_its_familys_own_writes(name: str, talk: str):
    own, theirs = named(name), reference(name)
    messages = TALKS[talk].messages
    if name == "mistral" and talk == "system":  # v0.3 writes the system's words where a question ends all
        messages = messages[:2]
    if name == "chatml" and talk != "system":  # Qwen2.5 has a system prompt of its own
        messages = [{"role": "system", "content": "instruction0."}, *messages]
    for asked in (False, True):
        spoken = messages[:-1] if asked and messages[-1]["role"] == "assistant" else messages
        expected = text_of(theirs, spoken, asked)
        if name == "llama3":  # 3.1 begins with a system turn that holds a date
            head = "<|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n"
            system = messages[0]["content"] if talk == "system" else ""
            assert head + system + "<|eot_id|>" in expected
            kept = head.replace("Today: 26 Jul 2024\n\n", "") + system + "<|eot_id|>" if system else ""
            expected = expected.replace(head + system + "<|eot_id|>", kept)
        begin = theirs.bos_token if theirs.bos_token and expected.startswith(theirs.bos_token) else ""
        end = theirs.eos_token if name == "phi3" and not asked else ""  # of a text that is not to go on
        assert begin + text_of(own, spoken, asked) + end == expected


@pytest.mark.parametrize("talk", [*PLAIN, "system"])
@pytest.mark.parametrize("name", NAMED)
def test_the_words_of_each_answer_and_the_end_of_its_turn_are_trained(name: str, talk: str):
    tokenizer = named(name, begins=True)
    messages = TALKS[talk].messages
    row = encode(tokenizer, messages)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    trims = name in ("gemma", "llama3", "mistral")
    words = [(" " if name == "mistral" else "") + (each.strip() if trims else each) for each in answers]
    assert trained_text(tokenizer, row) == [each + ENDS[name] for each in words]
    assert tokenizer.decode(row.tokens) == text_of(tokenizer, messages)


@pytest.mark.parametrize("name", NAMED)
def test_roles_and_calls_that_a_named_template_does_not_write_are_refused(name: str):
    tokenizer = named(name)
    for talk in ("developer", "tools without a call", "a call"):
        with pytest.raises(BadRow, match=r"the chat template (rejects|leaves out|does not go on)"):
            encode(tokenizer, TALKS[talk].messages, tools=TALKS[talk].tools)


@pytest.mark.parametrize("name", NAMED)
def test_texts_begin_with_a_bos_where_the_tokenizer_begins_so(name: str):
    messages = TALKS["single turn"].messages
    with_bos, without = text_of(named(name, begins=True), messages), text_of(named(name), messages)
    assert with_bos == "<s>" + without
    assert "<s>" not in without


def test_a_template_whose_tokens_the_tokenizer_lacks_is_refused_with_those_that_work():
    tokenizer = base_model("llama3")
    with pytest.raises(InputError) as error:
        named_templates.use(tokenizer, "gemma")
    assert "needs the special tokens <start_of_turn>, <end_of_turn>, which the tokenizer" in str(error.value)
    assert "set it to chatml, llama3, mistral or zephyr, which need none that it lacks" in str(error.value)
    assert tokenizer.chat_template is None
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="mistral needs the special tokens an end-of-sequence token, which the"):
        named_templates.use(tokenizer, "mistral")


def test_a_new_token_never_gets_the_id_of_another():
    vocabulary = {"</s>": 0, "a": 1, "b": 3}  # 2 is missing
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    with pytest.raises(
        InputError, match=r"would give the new token <\|im_start\|> the id 3, which is that of 'b': ids"
    ):
        named_templates.use(tokenizer, "chatml", adds_tokens=True)
    assert tokenizer.chat_template is None


def test_a_name_that_is_nearly_one_is_refused_with_it():
    (problem,) = named_templates.problems("chat_ml")
    assert "no template of that name; did you mean chatml? Give a Jinja file, or one of chatml, gemma" in problem
    assert [named_templates.problems(name) for name in (None, *NAMED)] == [[]] * (1 + len(NAMED))


def test_a_run_by_a_named_template_leaves_a_model_that_stops_where_its_turns_end(
    tmp_path: Path, conversations: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    folder = tiny.build_model_folder(tmp_path / "model")
    tokenizer = tokenizer_with("", (), "<|endoftext|>")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "config.json").read_text())
    ended = tokenizer.eos_token_id
    assert ended != 1 == tokenizer.convert_tokens_to_ids("<|im_end|>")
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ended}))
    sft.main(
        scenarios.configuration(folder, conversations, tmp_path / "out", data__chat_template="chatml", train__steps=1)
    )
    final = tmp_path / "out" / "final"
    assert GenerationConfig.from_pretrained(final).eos_token_id == [ended, 1]
    saved = AutoTokenizer.from_pretrained(final)
    assert saved.eos_token == "<|im_end|>"
    assert saved.chat_template == named("chatml").chat_template
