"""Chat templates of twenty families: what is trained in conversations of every kind, against their own marks."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import chat_templates
import pytest
from chat_templates import turns_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from template_families import (
    FAMILIES,
    LEFT_OUT,
    OWN_ROWS,
    REASONING,
    SYSTEM,
    TALKS,
    TOOLS,
    TRAINED,
    Answer,
    Talk,
    kind_of,
    left_out,
    marked_template,
    outcome,
    rows_of,
    talk_for,
    tokenizer_of,
    truth,
    with_answers,
)

from finetune.data.chat_template import Rendering
from finetune.data.encoding import Row
from finetune.data.template_process import TemplateProcess
from finetune.data.templates import Template
from finetune.errors import BadRow

PLAIN = ("single turn", "several turns", "Japanese and emoji", "white space at both ends", "50 turns")
NEEDS = {"system": SYSTEM, "a call": TOOLS, "calls over several turns": TOOLS}
NEEDS |= {"reasoning": REASONING, "reasoning in several turns": REASONING}


def rows_or_none(name: str, talk: Talk) -> list[Row] | None:
    """The rows of a conversation, also where something is left out of it; None if it is refused, for a known reason."""
    try:
        return rows_of(name, talk, on_dropped="warn")
    except BadRow as reason:
        kind_of(reason)
        return None


def check_rows(rows: list[Row], expected: list[Answer]) -> None:
    """Every answer is trained once, as generated, in no more rows than needed, whose ids are the template's own."""
    assert sorted(turns_of(rows)) == sorted((answer.before, answer.generated) for answer in expected)
    behind = {(*answer.before, *answer.generated): answer.behind for answer in expected}
    for row in rows:
        end = row.spans[-1][1]
        assert row.tokens[end:].tolist() == behind[tuple(row.tokens[:end].tolist())]
    for row in rows:
        until = row.tokens[: row.spans[-1][1]].tolist()
        assert [other.tokens[: len(until)].tolist() == until for other in rows].count(True) == 1


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_the_templates_own_and_what_is_trained_is_what_its_marks_say(name: str, talk: str):
    said = talk_for(name, talk)
    if rows := rows_or_none(name, said):
        check_rows(rows, truth(name, said))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_trains_the_conversations_that_its_template_knows_and_no_others(name: str):
    assert {talk: outcome(name, talk) in (TRAINED, OWN_ROWS) for talk in (*PLAIN, *NEEDS)} == {
        talk: talk in PLAIN or NEEDS[talk] in FAMILIES[name].knows for talk in (*PLAIN, *NEEDS)
    }


# What the template leaves out


def check_left_out(name: str, talk: Talk, rows: list[Row]) -> None:
    """Each row says what it lacks of the conversation."""
    for row, answers in with_answers(rows, talk):
        assert set(row.dropped) == left_out(talk, tokenizer_of(name).decode(row.tokens), answers)


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_search_does_not_find_in_a_row_is_noted_and_refused_by_default(name: str, talk: str):
    said = talk_for(name, talk)
    if rows := rows_or_none(name, said):
        check_left_out(name, said, rows)
        assert (outcome(name, talk) == LEFT_OUT) == any(row.dropped for row in rows)


# One rule for all rows of a template


@pytest.mark.parametrize("name", FAMILIES)
def test_what_stands_between_generation_prompt_and_words_is_trained_alike_in_every_row(name: str):
    plain, reasoned = set(), set()
    for talk in TALKS.keys() - {"white space at both ends", "reasoning in the content"}:
        said = talk_for(name, talk)
        answers = [message for message in said.messages if message["role"] == "assistant"]
        rows = rows_or_none(name, said) or []
        for answer, (_, trained) in zip(answers, turns_of(rows)):
            if "tool_calls" in answer:
                continue
            text = tokenizer_of(name).decode(trained)
            thought = answer.get(FAMILIES[name].reasoning_key)
            before = text.partition(answer["content"])[0]
            if thought and thought in text:
                reasoned.add(before.replace(thought, "", 1))
            elif not thought and before_is_asked(said, answer):
                plain.add(before)
    assert len(plain) == 1
    assert len(reasoned) == (REASONING in FAMILIES[name].knows)


def before_is_asked(talk: Talk, answer: dict[str, Any]) -> bool:
    """Whether an answer follows a question: behind the result of a tool, some templates write no header."""
    return bool(talk.messages[talk.messages.index(answer) - 1]["role"] == "user")


# Random conversations


def random_talk(data: st.DataObject, name: str) -> Talk:
    family = FAMILIES[name]
    if TOOLS not in family.knows or data.draw(st.booleans()):
        return Talk(data.draw(chat_templates.conversation()))
    like = chat_templates.Family("", "", "", family.calls_at_once, family.words_beside_calls)
    definitions = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": PARAMETERS}}]
    return Talk(data.draw(chat_templates.conversation_with_tools(like)), definitions)


PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}}


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_conversation_trains_exactly_what_the_model_would_have_to_generate(name: str, data: st.DataObject):
    talk = random_talk(data, name)
    if rows := rows_or_none(name, talk):
        check_rows(rows, truth(name, talk))


# The checks themselves

SPECIAL = {name: Template.of(tokenizer_of(name)).special for name in ("gpt-oss", "command-r7b", "qwen3", "llama-3.1")}
Bug = Callable[[list[Rendering], re.Pattern[str]], list[Rendering]]


def spans_changed(change: Callable[[str, int, int, re.Pattern[str]], tuple[int, int]]) -> Bug:
    def changed(found: list[Rendering], special: re.Pattern[str]) -> list[Rendering]:
        return [
            replace(each, turns={i: change(each.text, *turn, special) for i, turn in each.turns.items()})
            for each in found
        ]

    return changed


def _behind_first_special(text: str, first: int, end: int, special: re.Pattern[str]) -> tuple[int, int]:
    found = special.search(text, first, end)
    assert found
    return first, found.end()


def _before_last_special(text: str, first: int, end: int, special: re.Pattern[str]) -> tuple[int, int]:
    return first, [found.start() for found in special.finditer(text, first, end)][-1]


def _with_header(text: str, first: int, end: int, special: re.Pattern[str]) -> tuple[int, int]:
    return [found.end() for found in special.finditer(text, 0, first)][-2], end


BUGS: dict[str, tuple[str, str, Bug]] = {
    "begins behind a header that the model writes": (
        "gpt-oss",
        "single turn",
        spans_changed(lambda text, first, end, _: (text.index("<|message|>", first) + len("<|message|>"), end)),
    ),
    "begins behind an empty block of reasoning": (
        "qwen3",
        "single turn",
        spans_changed(lambda text, first, end, _: (text.index("</think>\n\n", first) + len("</think>\n\n"), end)),
    ),
    "begins with a header that the prompt has written": ("llama-3.1", "single turn", spans_changed(_with_header)),
    "stops before the token that ends the turn": ("llama-3.1", "several turns", spans_changed(_before_last_special)),
    "stops at the first special token": ("command-r7b", "a call", spans_changed(_behind_first_special)),
    "stops at the first of a header's special tokens": ("gpt-oss", "a call", spans_changed(_behind_first_special)),
    "goes on behind the end of the turn": (
        "qwen3",
        "single turn",
        spans_changed(lambda text, first, end, _: (first, end + 1)),
    ),
    "trains the last answer alone": (
        "llama-3.1",
        "several turns",
        lambda found, _: [replace(each, turns=dict([max(each.turns.items())])) for each in found],
    ),
    "has no rows for answers that lose their reasoning": (
        "qwen3",
        "reasoning in several turns",
        lambda found, _: found[-1:],
    ),
    "writes what stands behind the last answer otherwise": (
        "qwen3",
        "several turns",
        lambda found, _: [replace(each, text=each.text + "\n") for each in found],
    ),
}


def with_bug(monkeypatch: pytest.MonkeyPatch, name: str, bug: Bug) -> None:
    """Renderings as a rule with this bug would find them."""
    render = TemplateProcess.render

    def changed(process: TemplateProcess, conversations: Any) -> Any:
        found = render(process, conversations)
        return [each if isinstance(each, BadRow) else bug(each, SPECIAL[name]) for each in found]

    monkeypatch.setattr(TemplateProcess, "render", changed)


@pytest.mark.parametrize("bug", BUGS)
def test_wrong_rule_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch):
    name, talk, change = BUGS[bug]
    said = talk_for(name, talk)
    check_rows(rows_of(name, said), truth(name, said))
    with_bug(monkeypatch, name, change)
    with pytest.raises(AssertionError):
        check_rows(rows_of(name, said), truth(name, said))


def test_silence_about_what_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    name, talk = "llama-3.1", talk_for("llama-3.1", "words beside a call")
    with_bug(monkeypatch, name, lambda found, _: [replace(each, dropped=()) for each in found])
    with pytest.raises(AssertionError):
        check_left_out(name, talk, rows_of(name, talk))


def test_refusal_for_an_unknown_reason_is_noticed():
    with pytest.raises(AssertionError, match="out of paper"):
        kind_of(BadRow("out of paper"))


@pytest.mark.parametrize("name", FAMILIES)
def test_template_is_tested_without_its_marks_and_begins_with_what_is_peculiar(name: str):
    template = Template.of(tokenizer_of(name))
    assert template.ready(with_tools=False)[1] is None
    assert replace(template, plain=marked_template(name)).ready(with_tools=False)[1] is not None
    assert re.match(rf"\{{#- {re.escape(FAMILIES[name].title)}: .+\. -#\}}\n", marked_template(name))
