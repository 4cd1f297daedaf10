"""``finetune chat``: a conversation in the terminal."""

import argparse
import json
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from finetune.cli.generate_verb import manner_of, read_any_bytes, speakers_of, utf8
from finetune.cli.terminal import say
from finetune.errors import InputError
from finetune.generation.dialogue import Dialogue

COMMANDS = "/reset begins again, /system TEXT begins again with what the system says, /exit ends; Ctrl-C ends an answer"


def chat(options: argparse.Namespace) -> int:
    """Run the verb; returns the exit code.

    Raises:
        InputError: for wrong input, before weights load where that can be known.
    """
    as_json: bool = options.json
    with suppress(ImportError):  # lines can be edited, where Python has it
        import readline  # noqa: F401

    read_any_bytes()
    manner = manner_of(options)
    utf8(options.system or "", "--system")
    dialogues = [Dialogue(speaker, manner, options.system) for speaker in speakers_of(options)]
    for dialogue in dialogues:
        dialogue.check()
    tell = partial(print, file=sys.stderr if as_json else sys.stdout)
    tell(COMMANDS)
    while True:
        try:
            said = input("" if as_json else "> ").strip()
        except KeyboardInterrupt:
            tell()
            continue
        except EOFError:
            tell()
            return 0
        if not said:
            continue
        try:
            utf8(said, "That")
        except InputError as error:
            print(json.dumps({"error": str(error)}) if as_json else f"error: {error}", flush=True)
            continue
        command, _, rest = said.partition(" ")
        if command == "/exit":
            return 0
        if command in ("/reset", "/system"):
            for dialogue in dialogues:
                dialogue.reset(rest.strip() or None if command == "/system" else dialogue.system)
        elif command.startswith("/"):
            tell(COMMANDS)
        elif as_json:
            _answer_in_json(dialogues, said)
        else:
            _answer(dialogues, said)


def _answer_in_json(dialogues: list[Dialogue], said: str) -> None:
    for dialogue in dialogues:
        line: dict[str, Any] = {"model": dialogue.speaker.name, "user": said}
        try:
            answer = dialogue.ask(said, lambda text: None)
            line |= {"answer": answer.text, "tokens": answer.tokens, "is_cut": answer.is_cut}
        except InputError as error:
            line["error"] = str(error)
        print(json.dumps(line, ensure_ascii=False), flush=True)


def _answer(dialogues: list[Dialogue], said: str) -> None:
    for dialogue in dialogues:
        if len(dialogues) > 1:
            print(f"[{dialogue.speaker.name}]")
        try:
            answer = dialogue.ask(said, say)
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        print(" ..." if answer.is_cut else "", end="\n\n")
