"""Options of the verb ``train``. Imports nothing that is slow."""

import argparse
from pathlib import Path
from typing import Any


def add_train(verbs: Any) -> None:
    """The verb that starts a run."""
    train = verbs.add_parser(
        "train",
        help="train: start a recipe on the GPUs of this machine, as accelerate launch does",
        usage="finetune train CONFIG [--section.key VALUE ...] [options]",
        description="Start the recipe that a configuration is for, with a process for each GPU of this machine. First "
        "prints the accelerate command that does the same. The exit code is that of the recipe: 0 for success, 1 if "
        "the run had to stop, 2 for wrong input, 75 if it was asked to stop and has saved. Ctrl-C and SIGTERM save.",
        epilog="python recipes/sft.py --help lists the keys; each is a flag here, such as --train.epochs 2.",
        allow_abbrev=False,
    )
    train.add_argument("config", metavar="CONFIG", help="YAML file, such as recipes/configs/sample.yaml")
    train.add_argument(
        "--strategy",
        metavar="NAME_OR_FILE",
        help="a strategy file, or its name in accelerate_configs/; default: what finetune plan recommends",
    )
    train.add_argument(
        "--size",
        metavar="N",
        type=_sizes,
        help="with --strategy: how many of the GPUs are the stages of a pipeline, split each layer, share experts, or "
        "compute each row together; both where a strategy does two of these, as in 4x2: for tp_pp 4 for each layer, in "
        "2 stages, for cp_tp 4 for each row and 2 for each layer; default: what the strategy file says",
    )
    processes = train.add_mutually_exclusive_group()
    processes.add_argument("--gpus", metavar="N", type=int, help="GPUs to use; default: all of this machine")
    processes.add_argument(
        "--processes", metavar="N", type=int, help="processes, also without a GPU, for a rehearsal; default there: 1"
    )
    train.add_argument(
        "--mixed-precision",
        "--mixed_precision",
        choices=["bf16", "fp16", "no"],
        help="default: that of the strategy file; no on a CPU that has no units for bf16",
    )
    train.add_argument(
        "--recipe", metavar="FILE", type=Path, help="a recipe of your own; default: the one that CONFIG is for"
    )
    train.add_argument("--print-command", action="store_true", help="print the accelerate command, and start nothing")
    train.add_argument(
        "--json",
        action="store_true",
        help="end standard output with a line of JSON: exit code, output folder and losses of the run; with "
        "--print-command print the command and why as JSON instead",
    )
    train.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    from finetune.cli.train_verb import train

    return train(options)


def _sizes(text: str) -> tuple[int, ...]:
    """Of a strategy: 4, or 4x2 where it has two."""
    try:
        return tuple(map(int, text.split("x")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number such as 4, and no two such as 4x2") from None
