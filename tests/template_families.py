"""Twenty chat templates in the style of popular families, tokenizers for them, and conversations to lay against them.

The templates stand in tests/data/chat_templates. Each marks what the model generates (``{% generation %}``): the marks
are the truth that the tests compare with, and they are taken out of the template that is tested. Where a template does
not write what the model generates, as DeepSeek R1's, it does so for the truth alone, when ``as_generated`` is set.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tiny
from chat_templates import encode_value, turns_of
from transformers import PreTrainedTokenizerFast

from finetune.data.call_arguments import with_json_arguments
from finetune.data.encoding import Row
from finetune.errors import BadRow

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
SYSTEM, TOOLS, REASONING = "system", "tools", "reasoning"


@dataclass(frozen=True)
class Family:
    """A template's family: what its tokenizer and its model are like."""

    title: str
    """The name as people know it."""
    end: str
    """The tokenizer's end-of-sequence token."""
    specials: tuple[str, ...] = ()
    """Special tokens beside the first and the last."""
    begin: str | None = None
    stops: tuple[str, ...] = ()
    """Tokens at which generation stops, beside ``end``: the ``eos_token_id`` of generation_config.json."""
    knows: tuple[str, ...] = (SYSTEM,)
    """Which of system messages, calls of tools, and reasoning under a key of its own the template writes."""
    reasoning_key: str = "reasoning_content"
    calls_at_once: int = 2
    words_beside_calls: bool = True
    calls_as_text: bool = False
    """Whether it expects the arguments of calls as JSON text."""
    mode: str | None = None
    """The variable that tells its generation prompt whether the model is to reason, where answers differ in that."""


_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")
_DEEPSEEK += ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>")
_BRACKETS = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
_BRACKETS += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_KIMI = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>")
_KIMI += ("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_COHERE = ("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_THINKING|>")
_COHERE += ("<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>")
_COHERE += ("<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>")
_CHATML, _GEMMA = ("<|im_start|>",), ("<start_of_turn>",)
_ALL = (SYSTEM, TOOLS, REASONING)

FAMILIES = {
    "llama-3.1": Family(
        "Llama 3.1",
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>", "<|eom_id|>"),
        "<|begin_of_text|>",
        ("<|end_of_text|>", "<|eom_id|>"),
        (SYSTEM, TOOLS),
        calls_at_once=1,
        words_beside_calls=False,
    ),
    "qwen2.5": Family("Qwen2.5", "<|im_end|>", _CHATML, knows=(SYSTEM, TOOLS)),
    "qwen3": Family("Qwen3", "<|im_end|>", _CHATML, knows=_ALL),
    "qwen3.5": Family("Qwen3.5", "<|im_end|>", _CHATML, knows=_ALL),
    "gemma-2": Family("Gemma 2", "<eos>", (*_GEMMA, "<end_of_turn>"), "<bos>", ("<end_of_turn>",), ()),
    "gemma-3": Family("Gemma 3", "<eos>", (*_GEMMA, "<end_of_turn>"), "<bos>", ("<end_of_turn>",)),
    "mistral-7b-v0.3": Family(
        "Mistral 7B v0.3", "</s>", _BRACKETS, "<s>", knows=(SYSTEM, TOOLS), words_beside_calls=False
    ),
    "ministral-3": Family(
        "Ministral 3",
        "</s>",
        (*_BRACKETS, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]"),
        "<s>",
        knows=(SYSTEM, TOOLS),
    ),
    "phi-3.5": Family(
        "Phi-3.5", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), stops=("<|end|>",)
    ),
    "phi-4": Family("Phi-4", "<|im_end|>", ("<|im_start|>", "<|im_sep|>")),
    "deepseek-v3.1": Family(
        "DeepSeek V3.1",
        "<｜end▁of▁sentence｜>",
        _DEEPSEEK,
        "<｜begin▁of▁sentence｜>",
        knows=(SYSTEM,),
        calls_as_text=True,
    ),
    "deepseek-r1": Family(
        "DeepSeek R1",
        "<｜end▁of▁sentence｜>",
        (*_DEEPSEEK, "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        "<｜begin▁of▁sentence｜>",
        knows=(SYSTEM, REASONING),
        calls_as_text=True,
    ),
    "gpt-oss": Family(
        "gpt-oss",
        "<|return|>",
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"),
        stops=("<|call|>",),
        knows=_ALL,
        reasoning_key="thinking",
        calls_at_once=1,
    ),
    "glm-4.5": Family(
        "GLM-4.5",
        "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        stops=("<|user|>", "<|observation|>"),
        knows=_ALL,
    ),
    "kimi-k2": Family("Kimi K2", "<|im_end|>", _KIMI, knows=(SYSTEM, TOOLS)),
    "command-r7b": Family(
        "Command R7B", "<|END_OF_TURN_TOKEN|>", _COHERE, "<BOS_TOKEN>", knows=(SYSTEM, TOOLS), words_beside_calls=False
    ),
    "granite-3.3": Family("Granite 3.3", "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>")),
    "smollm3": Family("SmolLM3", "<|im_end|>", _CHATML),
    "olmo-2": Family("OLMo 2", "<|endoftext|>", begin="<|endoftext|>"),
    "nemotron-3-nano": Family("Nemotron 3 Nano", "<|im_end|>", _CHATML, knows=_ALL, mode="enable_thinking"),
}


def tokenizer_with(
    template: str, specials: Sequence[str], end: str, begin: str | None = None
) -> PreTrainedTokenizerFast:
    """The tests' tokenizer with these special tokens and this template."""
    tokenizer = tiny.build_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    tokenizer.add_special_tokens({"eos_token": end} | ({"bos_token": begin} if begin else {}))
    return tokenizer


def marked_template(name: str) -> str:
    """A family's template, with the marks of what the model generates."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def without_marks(template: str) -> str:
    """The same template with blocks in place of its marks that do nothing; white space around them stays as it is."""
    return _GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", template)


@lru_cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A family's tokenizer, whose template has no marks."""
    family = FAMILIES[name]
    return tokenizer_with(without_marks(marked_template(name)), family.specials, family.end, family.begin)


# Conversations. Each word of theirs stands in one message alone, so that a search finds what is left out.


@dataclass(frozen=True)
class Talk:
    """A conversation, and the tools that it may call."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None

    def with_reasoning_under(self, key: str) -> "Talk":
        messages = [{key if k == "reasoning_content" else k: v for k, v in each.items()} for each in self.messages]
        return Talk(messages, self.tools)


def _said(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def _turns(first: int, last: int) -> list[dict[str, Any]]:
    numbers = range(first, last + 1)
    return [turn for i in numbers for turn in (_said("user", f"question{i}."), _said("assistant", f"answer{i}."))]


def _call(number: int, words: str = "", **others: Any) -> list[dict[str, Any]]:
    """An answer that calls a tool, and its result."""
    function = {"name": "find_stone", "arguments": {"colour": f"shade{number}", "count": number}}
    call = {"id": f"call{number:05}", "type": "function", "function": function}
    return [_said("assistant", words, tool_calls=[call], **others), _said("tool", f"result{number}")]


def _reasoned(number: int) -> list[dict[str, Any]]:
    thought = f"thought{number}"
    return [_said("user", f"question{number}."), _said("assistant", f"answer{number}.", reasoning_content=thought)]


_TOOL = {
    "name": "find_stone",
    "description": "Finds stones.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["colour"],
    },
}
DEFINITIONS = [{"type": "function", "function": _TOOL}]
_SYSTEM, _FIRST = _said("system", "instruction0."), _said("user", "question1.")

TALKS = {
    "single turn": Talk(_turns(1, 1)),
    "several turns": Talk(_turns(1, 3)),
    "Japanese and emoji": Talk([_said("user", "赤い石は？👩‍💻"), _said("assistant", "🎉はい、赤です❤️"), *_turns(2, 2)]),
    "white space at both ends": Talk(
        [_said("user", " \n question1. \n"), _said("assistant", "\n\n  answer1.\n "), *_turns(2, 2)]
    ),
    "50 turns": Talk(_turns(1, 50)),
    "system": Talk([_SYSTEM, *_turns(1, 2)]),
    "system in the middle": Talk([*_turns(1, 1), _SYSTEM, *_turns(2, 2)]),
    "developer": Talk([_said("developer", "instruction0."), *_turns(1, 1)]),
    "tools without a call": Talk(_turns(1, 1), DEFINITIONS),
    "a call": Talk([_FIRST, *_call(1), _said("assistant", "answer1.")], DEFINITIONS),
    "calls over several turns": Talk(
        [
            *(_FIRST, *_call(1), _said("assistant", "answer1."), *_turns(2, 2)),
            *(_said("user", "question3."), *_call(3), *_call(4), _said("assistant", "answer3.")),
        ],
        DEFINITIONS,
    ),
    "words beside a call": Talk([_FIRST, *_call(1, "announcement1."), _said("assistant", "answer1.")], DEFINITIONS),
    "reasoning in the content": Talk(
        [_FIRST, _said("assistant", "<think>\nthought1\n</think>\n\nanswer1."), *_turns(2, 2)]
    ),
    "reasoning": Talk([*_turns(1, 1), *_reasoned(2)]),
    "reasoning in several turns": Talk([*_reasoned(1), *_reasoned(2), *_reasoned(3)]),
    "reasoning before a call": Talk(
        [_FIRST, *_call(1, reasoning_content="thought1"), _said("assistant", "answer1.")], DEFINITIONS
    ),
}


def talk_for(name: str, talk: str) -> Talk:
    """A conversation, with its reasoning under the key that the family's template reads."""
    return TALKS[talk].with_reasoning_under(FAMILIES[name].reasoning_key)


def rows_of(name: str, talk: Talk, **settings: Any) -> list[Row]:
    """The rows that a family's template makes of a conversation.

    Raises:
        BadRow: if it is refused.
    """
    value = {"messages": talk.messages, "tools": talk.tools}
    return encode_value(tokenizer_of(name), value, turn_ends=FAMILIES[name].stops, **settings)


# What becomes of a conversation

TRAINED, OWN_ROWS, LEFT_OUT, REFUSED = "trained", "own rows", "left out", "refused"
REFUSALS = {
    r"^the chat template rejects the conversation \(": REFUSED,
    r"^the chat template leaves out ": LEFT_OUT,
    r"^the chat template does not write the words of ": LEFT_OUT,
    r"^the chat template does not go on with ": REFUSED,
    r"so the model would not learn to stop; ": REFUSED,
    r"; fix its generation marks$": REFUSED,
}
"""Reasons for which a conversation is refused, and what becomes of it in a word."""


def kind_of(reason: BadRow) -> str:
    """What becomes of a conversation that is refused.

    Raises:
        AssertionError: if the reason is not a known one.
    """
    kinds = [kind for pattern, kind in REFUSALS.items() if re.search(pattern, str(reason))]
    assert len(kinds) == 1, reason
    return kinds[0]


def outcome(name: str, talk: str) -> str:
    """What becomes of a conversation with a family's template."""
    try:
        rows = rows_of(name, talk_for(name, talk))
    except BadRow as reason:
        return kind_of(reason)
    return TRAINED if len(rows) == 1 else OWN_ROWS


# What a search finds


def with_answers(rows: Sequence[Row], talk: Talk) -> list[tuple[Row, list[int]]]:
    """Each row with the indices of the answers that it trains."""
    spoken = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]
    by_place = dict(zip((len(before) for before, _ in turns_of(list(rows))), spoken, strict=True))
    return [(row, [by_place[first] for first, _ in row.spans]) for row in rows]


def left_out(talk: Talk, text: str, answers: list[int]) -> set[str]:
    """What of a conversation a search does not find in a row with these answers. Its words are in one message each."""
    found = set()
    if any(tool["function"]["description"] not in text for tool in talk.tools or ()):
        found.add("the definitions of tools")
    for i, message in enumerate(talk.messages[: answers[-1] + 1]):
        words = re.sub(r"<think>.*</think>", "", message["content"], flags=re.DOTALL).strip()
        if words not in text:
            beside = " beside a tool call" if "tool_calls" in message else ""
            found.add(f"the words of the {message['role']}{beside}")
        if any(call["function"]["arguments"]["colour"] not in text for call in message.get("tool_calls", ())):
            found.add("tool calls")
        thoughts = re.findall(r"thought\d", str(message))
        if i in answers and any(thought not in text for thought in thoughts):
            found.add("reasoning")
    return found


# The truth


@dataclass(frozen=True)
class Answer:
    """An answer in ids, as transformers finds it with the template's marks."""

    before: list[int]
    generated: list[int]
    behind: list[int]


def truth(name: str, talk: Talk) -> list[Answer]:
    """What the model generates in each answer, behind the generation prompt of the conversation before it."""
    family = FAMILIES[name]
    messages = with_json_arguments(talk.messages) if family.calls_as_text else talk.messages
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return [_answer(name, messages, i, talk.tools) for i in answers]


def _answer(name: str, messages: list[dict[str, Any]], i: int, tools: Any) -> Answer:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    inline = messages[i]["content"].rpartition("</think>")[0].partition("<think>")[2].strip()
    mode = {family.mode: bool(messages[i].get(family.reasoning_key) or inline)} if family.mode else {}
    prompt = tokenizer.apply_chat_template(messages[:i], tools, add_generation_prompt=True, tokenize=False, **mode)
    found: Any = tokenizer.apply_chat_template(
        messages[: i + 1],
        tools,
        chat_template=marked_template(name),
        return_dict=True,
        return_assistant_tokens_mask=True,
        as_generated=True,
        **mode,
    )
    ids, mask = found["input_ids"], found["assistant_masks"]
    end = len(mask) - mask[::-1].index(1)
    first = end - mask[end - 1 :: -1].index(0) if 0 in mask[:end] else 0
    before = ids[:first]
    if not tokenizer.decode(ids).startswith(prompt):  # what stands before the answer is changed by it
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return Answer(before, ids[first:end], ids[end:])
