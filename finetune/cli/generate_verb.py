"""``finetune generate``: the answer to a prompt, or to every row of a file."""

import argparse
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from finetune.cli.terminal import harmless, say
from finetune.data.prompt_texts import Prompt
from finetune.errors import InputError, refuse_if_any
from finetune.generation.manner import Manner
from finetune.generation.prompts import prompt_of, read_prompts
from finetune.generation.speaker import Answer, Speaker
from finetune.generation.speaker_loading import Request, Unloaded, columns_of, read_speakers
from finetune.output.run_reading import finite
from finetune.scoring.task_rows import shortened

_ANSWERS = ("answer", "base_answer")
"""Keys of the answers to a row: that of the model, and that of the one that it was trained from."""
ESCAPED = "backslashreplace"
"""How what UTF-8 has no bytes for is written: as a string of JSON has it too."""
_OWN = "own_"
"""Before the name of a row's own key that has the name of one of these."""


def manner_of(options: argparse.Namespace) -> Manner:
    """How to answer, by the options that both verbs have."""
    return Manner(options.max_new_tokens, options.temperature, options.top_p, options.seed)


def unloaded(path: str, options: argparse.Namespace) -> Unloaded:
    """The model that a path names, by the options of all verbs that ask one; says what to know of it.

    Raises:
        InputError: as ``read_speakers``.
    """
    found = read_speakers(
        Request(
            path,
            base_model=options.base_model,
            bits=options.bits,
            chat_template=options.chat_template,
            compares=options.compare,
            trust_remote_code=options.trust_remote_code,
        )
    )
    for note in found.notes:
        print(note, file=sys.stderr)
    return found


def speakers_of(options: argparse.Namespace) -> list[Speaker]:
    """Who is to answer, by the options that both verbs have; says so where a GPU is too small for them."""
    speakers = unloaded(options.model, options).load()
    if torch.cuda.is_available() and any(speaker.model.device.type == "cpu" for speaker in speakers):
        print("The GPU has no room for the model; the CPU answers, slowly. --bits 4 takes less.", file=sys.stderr)
    return speakers


def generate(options: argparse.Namespace) -> int:
    """Run the verb; returns the exit code.

    Raises:
        InputError: for wrong input, before weights load where that can be known.
    """
    refuse_if_any(_contradictions(options))
    manner = manner_of(options)
    if options.prompts is None:
        utf8(options.system or "", "--system")
        read_any_bytes()
        text = utf8(sys.stdin.read() if options.prompt == "-" else options.prompt, "The prompt")
        return _answer_one(prompt_of(text, system=options.system, plain=options.plain), options, manner)
    prompts = read_prompts(options.prompts, columns_of(options.model))
    refuse_if_any(shortened(lost_keys(prompts, _ANSWERS[: 1 + options.compare]), "kept as they are"))
    output = None if options.output is None else Path(options.output)
    if output is not None and output.exists():
        raise InputError(f"--output {output} already exists; choose another file. Nothing was written.")
    with opened(output) as file:
        speakers = speakers_of(options)
        asked = [speaker.prompt_tokens(prompts) for speaker in speakers]  # all of them, before the first is answered
        begins = range(0, len(prompts), options.batch_size)
        shown = Console(stderr=True)
        for begin in track(begins, "Answering", console=shown, transient=True, disable=not shown.is_terminal):
            batch = slice(begin, begin + options.batch_size)
            answers = [speaker.answers(tokens[batch], manner, number=begin) for speaker, tokens in zip(speakers, asked)]
            for prompt, *said in zip(prompts[batch], *answers):
                write_line(file, beside(prompt.record, _named(said)))
    if output is not None:
        print(f"{len(prompts):,} rows with their answers are in {output}")
    return 0


def _contradictions(options: argparse.Namespace) -> list[str]:
    of_a_file, of_a_prompt = options.prompts is not None, options.prompt is not None
    found = {
        "Give one of both: a prompt, or a file of prompts with --prompts.": of_a_file == of_a_prompt,
        "--output is for the answers to a file; add --prompts.": options.output is not None and not of_a_file,
        "--json is for one prompt; the answers to a file are JSON already, leave it out.": options.json and of_a_file,
        "--system is for one prompt; rows of a file have a system message of their own, leave it out.": (
            options.system is not None and of_a_file
        ),
        "--plain is for one prompt; rows of a file say what they are, leave it out.": options.plain and of_a_file,
        "--system belongs to a conversation, and --plain continues a text; leave one of them out.": (
            options.plain and options.system is not None and not of_a_file
        ),
        f"--batch-size {options.batch_size}: give a number from 1 on.": options.batch_size < 1,
    }
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def _answer_one(prompt: Prompt, options: argparse.Namespace, manner: Manner) -> int:
    speakers = speakers_of(options)
    asked = [speaker.prompt_tokens([prompt])[0] for speaker in speakers]
    if len(speakers) == 1 and not options.json:
        answer = speakers[0].streamed(asked[0], manner, say)
        print()
        _tell_if_cut([_cut(speakers[0], asked[0], answer, manner)])
        return 0
    answers = [speaker.answers([tokens], manner)[0] for speaker, tokens in zip(speakers, asked)]
    if options.json:
        record = prompt.record | _named(answers) | {"tokens": answers[-1].tokens, "is_cut": answers[-1].is_cut}
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return 0
    table = Table(*(escape(speaker.name) for speaker in speakers))
    table.add_row(*(escape(harmless(answer.text)) for answer in answers))
    Console().print(table)
    _tell_if_cut([_cut(*each, manner) for each in zip(speakers, asked, answers)])
    return 0


def _cut(speaker: Speaker, prompt: Sequence[int], answer: Answer, manner: Manner) -> str:
    """Why an answer did not end by itself; nothing of one that did."""
    if not answer.is_cut:
        return ""
    if speaker.positions is not None and len(prompt) + answer.tokens >= speaker.positions:
        why = f", where the {speaker.positions:,} positions of the model end; a shorter prompt leaves more"
    else:  # one that was interrupted is shorter
        why = "; --max-new-tokens N for more" if answer.tokens >= manner.max_new_tokens else ""
    return f"(cut after {answer.tokens} tokens{why})"


def _tell_if_cut(sentences: Sequence[str]) -> None:
    for sentence in filter(None, dict.fromkeys(sentences)):
        print(sentence, file=sys.stderr)


def _named(answers: Sequence[Answer]) -> dict[str, str]:
    return dict(zip(_ANSWERS, (answer.text for answer in reversed(answers))))


def lost_keys(prompts: Sequence[Prompt], names: Sequence[str]) -> list[str]:
    """Rows whose own keys have the names of answers, and of what is kept of a row beside them, as sentences."""
    return [
        f"{prompt.source}: the row has the keys `{name}` and `{_OWN}{name}`, and the former is kept under the name of "
        "the latter; rename one of them."
        for prompt in prompts
        for name in names
        if {name, _OWN + name} <= set(prompt.record)
    ]


def beside(record: dict[str, Any], answers: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its answers, or their scores; what it has under their names is kept under others."""
    own = {_OWN + name: record[name] for name in answers if name in record}
    return {**record, **own, **answers}


@contextmanager
def opened(output: Path | None, *, whole: bool = False) -> Iterator[TextIO]:
    """The file of lines of JSON to create, or standard output for none. It is removed again if nothing comes to be in
    it. Halves of pairs of surrogates, which UTF-8 has no bytes for, are written as JSON escapes them.

    Args:
        whole: remove it too if it does not become whole.

    Raises:
        InputError: if it cannot be created.
    """
    if output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors=ESCAPED)
        yield sys.stdout
        return
    try:
        file = output.open("x", encoding="utf-8", errors=ESCAPED)
    except OSError as error:
        raise InputError(f"--output {output} cannot be created ({error.strerror}); choose another file.") from error
    is_whole = False
    try:
        yield file
        is_whole = True
    finally:
        with suppress(OSError):  # of what was refused before, and told
            file.close()
        if output.is_file() and (output.stat().st_size == 0 or (whole and not is_whole)):
            output.unlink()


def write_line(file: TextIO, row: Mapping[str, Any]) -> None:
    """Write a row as a line of JSON, which is in the file then; null for what is not finite.

    Raises:
        InputError: if the file takes no more.
    """
    try:
        print(json.dumps(finite(row), ensure_ascii=False, default=str), file=file, flush=True)  # Parquet has dates
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"{file.name} could not be written ({error.strerror}); free some space.") from error


def read_any_bytes() -> None:
    """Have standard input give what is not UTF-8 to ``utf8``, which says so; it would end reading."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def utf8(text: str, what: str) -> str:
    """A text of the command line or of standard input, as it is.

    Raises:
        InputError: if it is not UTF-8, of which no tokenizer makes tokens.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} is not UTF-8; convert it, for example with iconv -t UTF-8.") from error
    return text
