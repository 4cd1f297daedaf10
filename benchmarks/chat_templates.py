"""Real chat templates, many of them, with the conversations of the tests: are ids and trained tokens right?

  python -m benchmarks.chat_templates templates/ more_templates/ [--hub org/model ...]

Each .jinja file of the folders gets the tests' tiny tokenizer with the special tokens that occur in it; models of the
hub, or of a folder, bring their own. Every conversation of tests/template_families.py is encoded, and its rows are
compared:

- Ids: they are those of the template's own text for the conversation up to the row's last answer.
- Trained tokens: those that follow the generation prompt, up to the first token behind the words at which generation
  stops (the difference of two renderings). Where a template changes what stands before the generation prompt, both
  renderings are compared from the last question on. Where it drops the reasoning that its generation prompt begins,
  this and ``</think>`` are to stand before the words, and where it writes that block itself, it stands once. An answer
  of which nothing tells is counted as not compared.
- Marks: a file that marks what is generated is examined twice. With its marks, the rows are compared with them; without
  them, each answer is compared with the marks of the conversation up to it.

The result is written to benchmarks/results/chat_templates.json: per template what becomes of each conversation, and
totals. A wrong id or a wrong trained token ends the script with a sentence. Limits: which tokens stop generation is
guessed from those that occur in a template, since a template does not say it.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))  # the tests' tokenizer and conversations

from chat_templates import encode_value  # noqa: E402
from template_families import TALKS, Talk, kind_of, left_out, tokenizer_with, with_answers, without_marks  # noqa: E402

from finetune.data.call_arguments import with_json_arguments  # noqa: E402
from finetune.data.encoding import Row  # noqa: E402
from finetune.data.template_process import shared_child  # noqa: E402
from finetune.errors import BadRow  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "chat_templates.json"
_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"{}]+\|>|<｜[^｜\s]+｜>|<[|/]?[a-z_]+[|]>|\[/?[A-Z]+(?:_[A-Z]+)*\]|\[g?MASK\]|</?s>|<sop>|<[be]os>|"
    r"\[\|[a-z]+\|\]|<(?:start|end)_of_(?:turn|image)>|<(?:BOS|EOS)_TOKEN>|<seed:[a-z_]+>|<SPECIAL_\d+>|<\|[a-z_]+>|<end_of_utterance>|\]~b\]|\]~!b\[|\[e~\["
)
_TODAY = re.compile(r"strftime_now\([^()]*\)")
"""Rows have a fixed date in its place, and transformers writes today's."""
_NO_SPECIALS = {"<|think|>"}
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|call|>", "<|end|>"),
    *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "[e~[", "<|eot|>", "<|end_of_turn|>"),
    *("<|message_sep|>", "<seed:eos>", "<SPECIAL_12>", "<end_of_utterance>", "<|tool_response>", "<|endoftext|>"),
    *("<|assistant_end|>", "[|endofturn|]"),
)
"""Tokens at which generation stops, the most telling first."""
MODES: tuple[dict[str, Any], ...] = ({}, *({n: v} for n in ("enable_thinking", "thinking") for v in (True, False)))


@dataclass(frozen=True)
class Subject:
    """A template with its tokenizer."""

    name: str
    tokenizer: Any
    ends: tuple[str, ...]
    marks: str | None = None
    """The template that marks what is generated."""
    are_used: bool = False
    """Whether that is the tokenizer's own template, or marks were taken out of it."""


@dataclass
class Found:
    """What became of one conversation."""

    outcome: str = ""
    reason: str = ""
    dropped: list[str] = field(default_factory=list)
    compared: int = 0
    not_compared: int = 0
    wrong_ids: list[str] = field(default_factory=list)
    wrong_masks: list[str] = field(default_factory=list)
    marks_say_otherwise: list[str] = field(default_factory=list)
    left_out_unnoticed: list[str] = field(default_factory=list)
    said_but_not_left_out: list[str] = field(default_factory=list)


WRONG = ("wrong_ids", "wrong_masks", "left_out_unnoticed", "said_but_not_left_out")
"""The fields of ``Found`` that end the script with a sentence."""


def subjects_of(file: Path) -> list[Subject]:
    """A template file with a tokenizer that knows its special tokens; if it has marks, with them and without."""
    template = _TODAY.sub("'1 July 2024'", file.read_text(encoding="utf-8"))
    bare = without_marks(template)
    if bare == template:
        return [Subject(file.name, *_tokenizer_for(template))]
    marked = Subject(file.name, *_tokenizer_for(template), template, are_used=True)
    return [marked, Subject(f"{file.name} without its marks", *_tokenizer_for(bare), template)]


def _tokenizer_for(template: str) -> tuple[PreTrainedTokenizerBase, tuple[str, ...]]:
    """The tests' tokenizer with a template and its special tokens, and those at which generation stops."""
    specials = list(dict.fromkeys(s for s in _SPECIAL.findall(template) if s not in _NO_SPECIALS))
    ends = [end for end in ENDS if end in specials]
    if "<|return|>" in ends:  # the other only stands behind earlier answers
        ends.remove("<|end|>")
    if "eos_token" in template or not (ends or "<|user|>" in specials):
        ends.append("</s>")
    elif not ends:  # generation stops at the next speaker's token
        ends = [speaker for speaker in ("<|user|>", "<|observation|>") if speaker in specials]
    end = "</s>" if "</s>" in ends else ends[0]
    tokenizer = tokenizer_with(template, [each for each in specials if each not in ("<s>", end)], end, "<s>")
    return tokenizer, tuple(ends)


def subject_of_hub(model: str) -> Subject:
    """A model's own tokenizer and template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = _TODAY.sub("'1 July 2024'", tokenizer.get_chat_template())
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return Subject(Path(model).name, tokenizer, tuple(end for end in ENDS if end in added))


def renderer(subject: Subject, talk: Talk) -> Any:
    """Texts of a conversation's beginnings, by transformers.

    Raises:
        Exception: the template's own, if it refuses the conversation.
    """
    render: Any = partial(subject.tokenizer.apply_chat_template, tools=talk.tools, tokenize=False)

    def rendered(messages: list[dict[str, Any]], **named: Any) -> str:
        try:
            text: str = render(messages, **named)
        except TypeError:
            text = render(with_json_arguments(messages), **named)
        return text

    return rendered


def generated(subject: Subject, talk: Talk, i: int) -> tuple[str, str] | None:
    """The text before an answer and what is generated and follows, by the difference of renderings; None if unknown."""
    render = renderer(subject, talk)
    for mode in MODES:
        prompt = render(talk.messages[:i], add_generation_prompt=True, **mode)
        whole = render(talk.messages[: i + 1], **mode)
        if whole.startswith(prompt):
            return prompt, whole[len(prompt) :]
    prompt, whole = render(talk.messages[:i], add_generation_prompt=True), render(talk.messages[: i + 1])
    before, opens, nothing = prompt.rstrip().rpartition("<think>")
    if opens and not nothing and whole.startswith(before):  # the model reasons, and the template drops that
        written = whole[len(before) :]
        if written.startswith("<think>"):  # with other white space than the prompt, and the model reasons once
            return prompt, written.removeprefix("<think>").lstrip()
        thought = "".join(re.findall(r"thought\d", str(talk.messages[i])))
        return prompt, f"{thought}\n</think>\n\n{written}"
    question = talk.messages[i - 1]["content"].strip()
    begun, answered = prompt.rpartition(question)[2], whole.rpartition(question)[2]
    return (prompt, answered[len(begun) :]) if question in whole and answered.startswith(begun) else None


def stopped(subject: Subject, message: dict[str, Any], written: str) -> str | None:
    """What is written of an answer up to the first token behind its words that stops generation, if there is one."""
    words = [message["content"].split("</think>")[-1].strip()]
    words += [call["function"]["arguments"]["colour"] for call in message.get("tool_calls", ())]
    behind = max((written.rindex(word) + len(word) for word in words if word and word in written), default=0)
    stops = [written.find(end, behind) + len(end) for end in subject.ends if written.find(end, behind) >= 0]
    return written[: min(stops)] if stops else None


def with_next_speaker(subject: Subject, talk: Talk, i: int, prompt: str, written: str) -> tuple[str, str]:
    """As ``generated``, with the first token of whoever speaks behind the answer."""
    follower = {"role": "tool" if talk.messages[i].get("tool_calls") else "user", "content": "follower"}
    longer = renderer(subject, talk)([*talk.messages[: i + 1], follower])
    behind = longer.rpartition(written.strip())[2]
    speaker = next((end for end in subject.ends if behind.lstrip().startswith(end)), "")
    return prompt, written.rstrip() + (behind.partition(speaker)[0] + speaker if speaker else "")


def trained_stretches(rows: Iterable[Row]) -> list[tuple[Row, int, int]]:
    """Each trained stretch with its row, in the order of the conversation."""
    return sorted(((row, *span) for row in rows for span in row.spans), key=lambda each: each[1])


def tokens_of(text: str, begin: int, end: int, subject: Subject) -> tuple[list[int], tuple[int, int]]:
    """The ids of a text, and the first that has characters of this part, and the one behind the last."""
    encoded = subject.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [k for k, (a, b) in enumerate(encoded["offset_mapping"]) if b > begin and a < end]
    return encoded["input_ids"], (inside[0], inside[-1] + 1)


def compare(subject: Subject, talk: Talk, rows: Sequence[Row], found: Found) -> None:
    """Lay the rows against the differences of renderings."""
    answers = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]
    decode = partial(subject.tokenizer.decode, skip_special_tokens=False)
    for i, (row, first, end) in zip(answers, trained_stretches(rows), strict=True):
        if subject.marks:
            theirs, ours = last_mark(subject, talk, i), decode(row.tokens[first:end])
            if _without_end(subject, ours) != _without_end(subject, theirs):
                found.marks_say_otherwise.append(f"message {i + 1}: {ours!r}, and the marks say {theirs!r}")
        expected = generated(subject, talk, i)
        stretch = stopped(subject, talk.messages[i], expected[1]) if expected else None
        if expected and stretch is None:  # the next speaker's token may be the end
            expected = with_next_speaker(subject, talk, i, *expected)
            stretch = stopped(subject, talk.messages[i], expected[1])
        if expected is None or stretch is None:
            found.not_compared += 1
            continue
        found.compared += 1
        ids, span = tokens_of("".join(expected), len(expected[0]), len(expected[0] + stretch), subject)
        if (first, end) != span or row.tokens[:end].tolist() != ids[:end]:
            found.wrong_masks.append(f"message {i + 1}: {decode(row.tokens[first:end])!r}, not {stretch!r}")
        if end == row.spans[-1][1] and row.tokens.tolist() != ids:
            found.wrong_ids.append(f"up to message {i + 1}: {decode(row.tokens)[-80:]!r}")


def last_mark(subject: Subject, talk: Talk, i: int) -> str:
    """What the template marks as generated in an answer."""
    ids, mask = marked_ids(subject, Talk(talk.messages[: i + 1], talk.tools))
    end = len(mask) - mask[::-1].index(1)
    first = end
    while mask[first - 1]:
        first -= 1
    return str(subject.tokenizer.decode(ids[first:end]))


def _without_end(subject: Subject, text: str) -> str:
    """A text without the white space and the tokens behind it, where marks and the end of generation may differ."""
    return re.sub(rf"(?:\s|{'|'.join(map(re.escape, subject.ends))})+\Z", "", text)


def marked_ids(subject: Subject, talk: Talk) -> tuple[list[int], list[int]]:
    """The ids of a conversation, and which of them its template marks, by transformers."""
    for messages in (talk.messages, with_json_arguments(talk.messages)):
        with suppress(TypeError):
            marked: Any = subject.tokenizer.apply_chat_template(
                messages,
                talk.tools,
                chat_template=subject.marks,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            return marked["input_ids"], marked["assistant_masks"]
    raise TypeError("the template takes the arguments of calls neither as objects nor as text")


def compare_with_marks(subject: Subject, talk: Talk, rows: Sequence[Row], found: Found) -> None:
    """Lay the rows against the template's marks, to which the tokens that end a turn are added."""
    ids, mask = marked_ids(subject, talk)
    for row in rows:
        found.compared += 1
        if row.tokens.tolist() != ids:
            found.wrong_ids.append(subject.tokenizer.decode(row.tokens)[-80:])
        edges = [k for k in range(len(ids)) if mask[k] and not (k and mask[k - 1])]
        if edges != [first for first, _ in row.spans]:
            found.wrong_masks.append(f"marks begin at {edges}, and spans are {row.spans}")
        differ = {k for k, (ours, marks) in enumerate(zip(row.trained, mask)) if ours != bool(marks)}
        if any(subject.tokenizer.decode(ids[k]).strip() not in ("", *subject.ends) for k in differ):
            found.wrong_masks.append(f"tokens {sorted(differ)} differ from the marks")


def examined(subject: Subject, name: str) -> Found:
    """What becomes of one conversation."""
    template = subject.tokenizer.chat_template
    reads_thinking = "thinking" in re.findall(r"(?:\.|\[['\"]|['\"])(thinking|reasoning_content)\b", str(template))
    key = "thinking" if reads_thinking and "reasoning_content" not in template else "reasoning_content"
    talk, found = TALKS[name].with_reasoning_under(key), Found()
    value = {"messages": talk.messages, "tools": talk.tools}
    try:
        rows = encode_value(subject.tokenizer, value, turn_ends=subject.ends, on_dropped="warn")
    except BadRow as reason:
        found.outcome, found.reason = kind_of(reason), re.sub(r"\d+", "…", str(reason))
        return found
    found.dropped = list(dict.fromkeys(each for row in rows for each in row.dropped))
    found.outcome = "left out" if found.dropped else "trained" if len(rows) == 1 else "own rows"
    for row, answers in with_answers(rows, talk):
        missing = left_out(talk, subject.tokenizer.decode(row.tokens), answers)
        found.left_out_unnoticed += sorted(missing - set(row.dropped))
        found.said_but_not_left_out += sorted(set(row.dropped) - missing)
    (compare_with_marks if subject.are_used else compare)(subject, talk, rows, found)
    return found


def totals(templates: dict[str, dict[str, Found]]) -> dict[str, Any]:
    """Counts over all templates and conversations."""
    every = [found for talks in templates.values() for found in talks.values()]
    return {
        "templates": len(templates),
        "conversations": len(every),
        "outcomes": dict(Counter(found.outcome for found in every)),
        "answers_compared": sum(found.compared for found in every),
        "answers_not_compared": sum(found.not_compared for found in every),
        "wrong_ids": sum(len(found.wrong_ids) for found in every),
        "wrong_masks": sum(len(found.wrong_masks) for found in every),
        "marks_say_otherwise": sum(len(found.marks_say_otherwise) for found in every),
        "left_out_unnoticed": sum(len(found.left_out_unnoticed) for found in every),
        "said_but_not_left_out": sum(len(found.said_but_not_left_out) for found in every),
        "refused": dict(Counter(found.reason.partition(" (")[0].partition(";")[0] for found in every if found.reason)),
        "dropped": dict(Counter(each for found in every for each in found.dropped)),
    }


def outcomes(talks: dict[str, Found]) -> dict[str, str]:
    """The conversations that a template trains, refuses and so on, as words."""
    kinds = dict.fromkeys(found.outcome for found in talks.values())
    return {kind: ", ".join(talk for talk, found in talks.items() if found.outcome == kind) for kind in kinds}


def sentence(results: dict[str, Any]) -> str:
    """The totals in a paragraph, for the manual."""
    found, libraries = results["totals"], results["packages"]
    return (
        f"Measured with transformers {libraries['transformers']} on {found['templates']} templates, most of them the "
        f"models' own or TRL's training copies,\nand {found['conversations']:,} conversations: of "
        f"{found['answers_compared']:,} answers, {found['wrong_ids']} had wrong ids and {found['wrong_masks']} wrong "
        f"trained tokens;\n{found['left_out_unnoticed']} rows lost something unnoticed.\n"
    )


def table(results: dict[str, Any]) -> str:
    """Markdown: the totals."""
    found = results["totals"]
    lines = ["| | |", "|---|---|"]
    lines += [f"| {key.replace('_', ' ')} | {found[key]:,} |" for key in found if isinstance(found[key], int)]
    for key in ("outcomes", "refused", "dropped"):
        lines += [f"| {key}: {name} | {count:,} |" for name, count in sorted(found[key].items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of .jinja files")
    parser.add_argument("--hub", nargs="*", default=[], metavar="MODEL")
    args = parser.parse_args()
    files = sorted(file for folder in args.folders for file in folder.glob("*.jinja"))
    subjects = [*chain.from_iterable(map(subjects_of, files)), *map(subject_of_hub, args.hub)]
    if not subjects:
        sys.exit("error: There is no .jinja file in these folders; name a folder of chat templates, or --hub MODEL.")
    names = Counter(subject.name for subject in subjects)
    if twice := [name for name, count in names.items() if count > 1]:
        sys.exit(f"error: {twice[0]} is in these folders twice, and results are kept by name; rename one of them.")
    held = shared_child()  # the process that renders, which is otherwise started for each conversation
    templates: dict[str, dict[str, Found]] = {}
    for subject in subjects:
        templates[subject.name] = {name: examined(subject, name) for name in TALKS}
        every = templates[subject.name].values()
        wrong = [text for found in every for kind in WRONG for text in getattr(found, kind)]
        otherwise = [text for found in every for text in found.marks_say_otherwise]
        print(f"{subject.name}: {len(wrong)} wrong, {len(otherwise)} marked otherwise", flush=True)
        for text in wrong[:5] + otherwise[:2]:
            print(f"  {text}", flush=True)
    del held
    results = {
        "packages": {name: version(name) for name in ("transformers", "tokenizers", "jinja2")},
        "totals": totals(templates),
        "templates": {name: outcomes(talks) for name, talks in templates.items()},
    }
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(results))
    if any(results["totals"][kind] for kind in WRONG):
        sys.exit("error: Some rows are not the template's own, or lack what is not said; see the lines above.")


if __name__ == "__main__":
    main()
