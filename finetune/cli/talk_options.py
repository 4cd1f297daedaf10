"""Options of the verbs ``generate`` and ``chat``, which ask a model. Imports nothing that is slow."""

import argparse
from typing import Any

from finetune.cli.hub_first import ask_for_data, ask_for_result


def add_generate(verbs: Any) -> None:
    """The verb that answers prompts."""
    generate = verbs.add_parser(
        "generate",
        help="answer a prompt, or a file of prompts, with a run, an adapter or a model",
        description="Answer a prompt, or every row of a file. The chat template is that of the training. Answers are "
        "the most likely ones, and the same each time, unless --temperature is given.",
    )
    _add_model(generate)
    generate.add_argument("prompt", metavar="PROMPT", nargs="?", help="what to ask; - reads it from standard input")
    generate.add_argument(
        "--prompts",
        metavar="FILE",
        help="a file with a prompt in each row, in any format that training reads; a last answer is left out",
    )
    generate.add_argument(
        "--output", metavar="FILE", help="with --prompts: JSONL file to create, of the rows with their answers"
    )
    generate.add_argument("--batch-size", metavar="N", type=int, default=8, help="rows answered together; default: 8")
    generate.add_argument("--system", metavar="TEXT", help="what the system says before the prompt")
    generate.add_argument("--plain", action="store_true", help="continue the prompt as a text, without a chat template")
    generate.add_argument("--json", action="store_true", help="print the answer as JSON")
    generate.set_defaults(run=_generate, late_words="prompt")


def add_chat(verbs: Any) -> None:
    """The verb that holds a conversation."""
    chat = verbs.add_parser(
        "chat",
        help="talk to a run, an adapter or a model in the terminal",
        description="Talk to a model. /reset begins again, /system TEXT begins again with what the system says, /exit "
        "ends. Ctrl-C ends an answer.",
    )
    _add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="what the system says at the beginning")
    chat.add_argument(
        "--json",
        action="store_true",
        help="print a line of JSON for each answer, and nothing else, for a program that writes to standard input",
    )
    chat.set_defaults(run=_chat)


def _add_model(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "model",
        metavar="RUN_OR_MODEL",
        help="output folder of a run, folder of an adapter or of a model, or a model's id on the hub",
    )
    verb.add_argument(
        "--compare", action="store_true", help="let the model that it was trained from answer too, side by side"
    )
    verb.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=256, help="tokens of an answer, at most; default: 256"
    )
    verb.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="sample instead; default: 0, the most likely token"
    )
    verb.add_argument("--top-p", metavar="P", type=float, default=1.0, help="sample from the most likely tokens alone")
    verb.add_argument("--seed", metavar="N", type=int, default=0, help="of sampling; default: 0")
    verb.add_argument("--bits", type=int, choices=[4, 8], help="quantise the model")
    verb.add_argument("--base-model", metavar="PATH", help="folder of an adapter's base model, if it was moved")
    verb.add_argument("--chat-template", metavar="FILE", help="Jinja file or name, instead of the model's own template")
    trusts_code(verb)


def trusts_code(verb: argparse.ArgumentParser) -> None:
    """The option to run a model's own code: to be given each time, since what it is given for may change."""
    verb.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code that comes with the model, where transformers has none: it may do whatever you may",
    )


def _generate(options: argparse.Namespace) -> int:
    ask_for_result(options.model, options.base_model)
    ask_for_data(options.prompts)
    from finetune.cli.generate_verb import generate

    return generate(options)


def _chat(options: argparse.Namespace) -> int:
    ask_for_result(options.model, options.base_model)
    from finetune.cli.chat_verb import chat

    return chat(options)
