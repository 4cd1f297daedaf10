"""Chat templates in the style of four families, tokenizers that know their special tokens, and conversations for them.

Each family comes with a pattern that finds what the assistant wrote in a rendered text: it knows nothing of messages.
"""

from dataclasses import dataclass
from typing import Any

import tiny
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from finetune.data.encoding import Encoder, Row, Settings
from finetune.data.formats import convert
from finetune.errors import BadRow

CHATML = tiny.CHATML
LLAMA3 = """{{- '<s>' -}}
{%- for m in messages -%}
  {%- if m.tool_calls is defined -%}
    {%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
    {{- '<|head|>assistant<|/head|>\n\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' -}}
    {{- m.tool_calls[0].function.arguments | tojson -}}{{- '}<|eot|>' -}}
  {%- elif m.role == 'tool' -%}
    {{- '<|head|>ipython<|/head|>\n\n' + m.content | tojson + '<|eot|>' -}}
  {%- else -%}
    {{- '<|head|>' + m.role + '<|/head|>\n\n' -}}
    {%- if tools and loop.first -%}{{- 'Functions:\n' + tools | tojson(indent=4) + '\n\n' -}}{%- endif -%}
    {{- m.content | trim + '<|eot|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|head|>assistant<|/head|>\n\n' -}}{%- endif -%}
"""
# the system's words and the tools stand before the last user's, and results without their call are refused
MISTRAL = """{%- set ns = namespace(system='', users=[], turn=0) -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{%- set ns.system = m.content + '\n\n' -%}{%- endif -%}
  {%- if m.role == 'user' -%}{%- set ns.users = ns.users + [loop.index0] -%}{%- endif -%}
  {%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) -%}
    {%- if (m.role == 'user') != (ns.turn % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
    {%- set ns.turn = ns.turn + 1 -%}
  {%- endif -%}
{%- endfor -%}
{{- '<s>' -}}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {%- set last = loop.index0 == ns.users[-1] -%}
    {%- if tools and last -%}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
    {{- '[INST] ' + (ns.system if last else '') + m.content + '[/INST]' -}}
  {%- elif m.tool_calls is defined -%}
    {{- '[TOOL_CALLS] [' -}}
    {%- for call in m.tool_calls -%}
      {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') -}}
    {%- endfor -%}
    {{- ']</s>' -}}
  {%- elif m.role == 'tool' -%}
    {{- '[TOOL_RESULTS] {"content": ' + m.content + '}[/TOOL_RESULTS]' -}}
  {%- elif m.role == 'assistant' -%}
    {{- ' ' + m.content | trim + '</s>' -}}
  {%- endif -%}
{%- endfor -%}
"""
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
QWEN = """{%- if tools -%}
  {{- '<|im_start|>system\n# Tools\n' -}}
  {%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- else -%}
    {{- '<|im_start|>' + m.role -}}
    {%- if m.content or not m.tool_calls -%}{{- '\n' + m.content -}}{%- endif -%}
    {%- for call in m.tool_calls or [] -%}
      {{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
# earlier turns lose their reasoning, and the last has a block for it, empty where there is none
QWEN3 = """{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\n' -}}
  {%- if m.role == 'assistant' and loop.last -%}
    {{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' -}}
  {%- endif -%}
  {{- m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Family:
    """A template, and how its renderings are read."""

    template: str
    answer: str
    """Pattern whose only group is a turn of the assistant, with the token that ends it."""
    end: str
    """The token that ends a turn."""
    calls_at_once: int = 0
    """Tool calls that an assistant's message may hold."""
    words_beside_calls: bool = False
    """Whether such a message may have content too."""


FAMILIES = {
    "chatml": Family(CHATML, r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", "<|im_end|>"),
    "llama3": Family(LLAMA3, r"<\|head\|>assistant<\|/head\|>\n\n(.*?<\|eot\|>)", "<|eot|>", 1),
    "mistral": Family(
        MISTRAL,
        r"(?:\[/INST\]|\[/TOOL_RESULTS\])(?!\[TOOL_RESULTS\])(?:(?=\[TOOL)| )(.*?</s>)",
        "</s>",
        3,
    ),
    "zephyr": Family(ZEPHYR, r"<\|assistant\|>\n(.*?</s>)", "</s>"),
    "qwen": Family(QWEN, r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", "<|im_end|>", 3, words_beside_calls=True),
}
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.calls_at_once]
SPECIAL = [
    *("<s>", "</s>", "<|head|>", "<|/head|>", "<|eot|>", "[INST]", "[/INST]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
]


def tokenizer_for(template: Any) -> PreTrainedTokenizerFast:
    tokenizer = tiny.build_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


TOKENIZERS = {name: tokenizer_for(family.template) for name, family in FAMILIES.items()}

text = st.text(
    alphabet=st.one_of(
        st.sampled_from("abc XYZ 123 .,!?\n\täß\"'\\{}<|>"),
        st.sampled_from("日本語のテキスト。、"),
        st.sampled_from("🎉👩‍💻❤️"),
    ),
    min_size=1,
    max_size=30,
).filter(lambda s: s.strip() != "")
value = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | text,
    lambda values: st.lists(values, max_size=2) | st.dictionaries(text, values, max_size=2),
    max_leaves=4,
)


@st.composite
def conversation(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        thought = draw(st.sampled_from(["", "", "<think>\n\n</think>\n\n"]))
        messages.append({"role": "user", "content": draw(text)})
        messages.append({"role": "assistant", "content": thought + draw(text)})
    return messages


@st.composite
def conversation_with_tools(draw: st.DrawFn, family: Family) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(text)})
        for _ in range(draw(st.integers(0, 2))):
            calls = [
                {
                    "id": f"call{draw(st.integers(0, 99999)):05}",
                    "type": "function",
                    "function": {
                        "name": draw(st.sampled_from(["find", "find_all", "検索"])),
                        "arguments": draw(st.dictionaries(text, value, max_size=2)),
                    },
                }
                for _ in range(draw(st.integers(1, family.calls_at_once)))
            ]
            words = draw(st.just("") | text) if family.words_beside_calls else ""
            messages.append({"role": "assistant", "content": words, "tool_calls": calls})
            messages += [{"role": "tool", "content": draw(st.just("") | text)} for _ in calls]
        messages.append({"role": "assistant", "content": draw(text)})
    return messages


tools = st.lists(st.fixed_dictionaries({"name": text, "description": text}), min_size=1, max_size=2).map(
    lambda functions: [{"type": "function", "function": function} for function in functions]
)


def encode(tokenizer: Any, messages: Any, *, tools: Any = None, **settings: Any) -> Row:
    """The row of a conversation whose answers share one.

    Raises:
        BadRow: that refuses it.
    """
    (row,) = encode_value(tokenizer, {"messages": messages, "tools": tools}, **settings)
    return row


def encode_value(tokenizer: Any, value: dict[str, Any], **settings: Any) -> list[Row]:
    """The rows of a record of any format.

    Args:
        settings: fields of ``Settings``.

    Raises:
        BadRow: that refuses it.
    """
    encoder = Encoder(tokenizer, Settings(**{"max_length": 10**6} | settings))
    (result,) = encoder.encode([("test:1", convert(value, "auto"))])
    if isinstance(result, BadRow):
        raise result
    return result


def turns_of(rows: list[Row]) -> list[tuple[list[int], list[int]]]:
    """The tokens before each trained stretch of some rows, and its own, in the order of the conversation."""
    found = [(row.tokens[:first].tolist(), row.tokens[first:end].tolist()) for row in rows for first, end in row.spans]
    return sorted(found, key=lambda turn: len(turn[0]))


def trained_text(tokenizer: Any, row: Row) -> list[str]:
    """The trained stretches of a row, decoded."""
    return [tokenizer.decode(row.tokens[first:end].tolist()) for first, end in row.spans]
