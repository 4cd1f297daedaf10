"""``finetune train``: a recipe on this machine's GPUs, started as the accelerate command that it prints would."""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.cli.hub_first import ask_for_run
from finetune.cli.planning.launch_command import in_lines
from finetune.cli.planning.strategy_file import strategy_named
from finetune.config.command_line import parse
from finetune.config.recipe_classes import class_of, script_of
from finetune.config.sections import Run
from finetune.config.strategy_names import SIZES
from finetune.errors import InputError
from finetune.hardware import cores
from finetune.output.run_reading import finite, read_run
from finetune.shipped import shipped_files

if TYPE_CHECKING:
    from finetune.distributed.launcher import StrategyFile


class Chosen(NamedTuple):
    """A strategy that was not asked for by name."""

    strategy: str
    why: str
    mixed_precision: str | None = None
    """None for that of its file."""
    sizes: tuple[int, ...] | None = None
    """Of those that ``config.strategy_names.SIZES`` names; None for that of its file."""


def train(options: argparse.Namespace) -> int:
    """Run the verb; returns the recipe's exit code.

    Raises:
        InputError: for wrong input that can be known before processes start.
        SystemExit: after ``--print_config``.
    """
    arguments = ["--config", options.config, *options.others]
    script, folder = _script(options, arguments)
    named = None if options.strategy is None else _path_of(options.strategy)
    if options.size is not None and named is None:
        raise InputError(f"--size {_as_given(options.size)} is that of a strategy; name it with --strategy.")
    if options.recipe is None and not options.print_command:
        ask_for_run(arguments)

    from finetune.distributed.launcher import StrategyFile, gpu_count, launch, strategy_of_rehearsal  # seconds

    gpus = gpu_count()
    processes = _processes(options, gpus)
    if named is None and gpus:
        chosen = _recommended(options, arguments, processes)
    else:
        chosen = Chosen(strategy_of_rehearsal(processes), "because there is no GPU to plan for")
    file = StrategyFile.read(named or _path_of(chosen.strategy))
    precision = options.mixed_precision or (named is None and chosen.mixed_precision) or file.precision_here()
    sizes = _size_flags(file, chosen.sizes if options.size is None else options.size, processes)
    threads = max(1, cores.usable() // processes)
    words = [["accelerate", "launch"], ["--config_file", str(file.path)]]
    if "OMP_NUM_THREADS" not in os.environ:
        words[0].insert(0, f"OMP_NUM_THREADS={threads}")
    if file.communicates or processes > 1:
        words += [["--num_processes", str(processes)], ["--main_process_port", "0"]]
    words += sizes
    if precision != file.mixed_precision:
        words.append(["--mixed_precision", precision])
    words += [[str(script)], *_in_groups(arguments)]
    if options.print_command and options.json:
        told: dict[str, Any] = {
            "strategy": named or chosen.strategy,
            "why": None if named else chosen.why,
            "processes": processes,
        }
        told |= {"mixed_precision": precision, "command": [word for group in words for word in group]}
        print(json.dumps(told, indent=2, default=str))
        return 0
    if named is None:
        print(f"Strategy {chosen.strategy}, {chosen.why}.")
    print(in_lines(words), flush=True)
    if options.print_command:
        return 0
    exit_code = launch(file, processes, precision, threads, script, arguments, flags=[*chain(*sizes)])
    if options.json:
        print(json.dumps(finite({"exit_code": exit_code} | _outcome(folder, exit_code))))
    return exit_code


def _outcome(folder: Path | None, exit_code: int) -> dict[str, Any]:
    """What a run has left in its output folder."""
    if folder is None:
        return {}
    record = read_run(folder) if exit_code == 0 else {}
    return {"output_dir": str(folder), "eval_loss": record.get("eval_loss")}


def _script(options: argparse.Namespace, arguments: Sequence[str]) -> tuple[Path, Path | None]:
    """The recipe: the user's own, else ours in the current folder, else the one that came with the package. And the
    output folder of its run, which is not known of the user's own."""
    named = {word.partition("=")[0] for word in options.others}
    if "--config" in named or options.config.startswith("--"):
        raise InputError("Give the configuration first, without --config: finetune train FILE [--section.key VALUE].")
    if options.recipe is None:
        if not Path(options.config).is_file():
            raise InputError(
                f"{options.config} is not a file; give the configuration first, for example "
                "recipes/configs/sample.yaml, which finetune init DIR unpacks."
            )
        run: Run = parse(class_of(arguments), arguments)
        return _ours(script_of(run)), Path(run.train.output_dir)
    recipe: Path = options.recipe
    if not recipe.is_file():
        raise InputError(f"--recipe: there is no file {recipe}; give a Python file, as recipes/sft.py is one.")
    return recipe, None


def _ours(name: str) -> Path:
    """A file of ours, of which a copy in the current folder counts more."""
    return Path(name) if Path(name).is_file() else shipped_files() / name


def _path_of(strategy: str) -> Path:
    """The strategy file that a path or a name stands for.

    Raises:
        InputError: if there is none.
    """
    for path in (Path(strategy), Path(f"accelerate_configs/{strategy}.yaml")):
        if path.is_file():
            return path
    return _ours(f"accelerate_configs/{strategy_named(strategy)}.yaml")


def _processes(options: argparse.Namespace, gpus: int) -> int:
    asked = options.gpus if options.gpus is not None else options.processes
    flag = "--gpus" if options.gpus is not None else "--processes"
    if asked is None:
        return gpus or 1
    if asked < 1:
        raise InputError(f"{flag} {asked}: must be at least 1; change it, or leave it out.")
    if options.gpus is not None and not gpus:
        raise InputError(
            f"--gpus {asked}: no GPU was found; see finetune doctor, or use --processes {asked} to rehearse on the CPU."
        )
    if gpus and asked > gpus:
        raise InputError(f"{flag} {asked}: this machine has {gpus} GPU{'s' * (gpus > 1)}; give at most {gpus}.")
    return asked


def _as_given(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _size_flags(file: "StrategyFile", asked: tuple[int, ...] | None, processes: int) -> list[list[str]]:
    """What ``accelerate launch`` is told of how many processes do together what a strategy is for.

    Args:
        asked: None for what the file says.
    """
    if asked is None:
        return []
    given = _as_given(asked)
    if not file.sizes:
        named = ", ".join(SIZES)
        raise InputError(f"--size {given} is for the strategy files {named}; leave it out, as {file.path} has no size.")
    if len(asked) != len(file.sizes):
        what = " and ".join(size.what for size in file.sizes)
        raise InputError(
            f"--size {given}: {file.path} has a number of {what}; give --size {_as_given((2,) * len(file.sizes))}, for "
            "example, or leave it out."
        )
    if min(asked) < 2:
        raise InputError(f"--size {given}: must be at least 2; change it, or leave it out.")
    if processes % math.prod(asked):
        started = f"{processes} process{'es' if processes > 1 else ''}"
        raise InputError(f"--size {given}: {started} cannot be divided into groups of it; change one of the two.")
    return [[f"--{size.key}", str(number)] for size, number in zip(file.sizes, asked, strict=True)]


def _recommended(options: argparse.Namespace, arguments: Sequence[str], gpus: int) -> Chosen:
    """The planner's choice for GPUs of this machine; weights and optimizer stay those of the configuration.

    In a process of its own, whose CUDA context does not stay on the GPU.
    """
    given = [] if options.mixed_precision is None else ["--mixed-precision", options.mixed_precision]
    kind = class_of(arguments)
    known = [
        group for group in _in_groups(arguments) if options.recipe is None or not _is_of_own_section(group[0], kind)
    ]
    command = [sys.executable, "-m", "finetune.cli", "plan", "--gpus", str(gpus), "--json", *given, *chain(*known)]
    if options.recipe is None:
        run: Run = parse(kind, arguments)
        command += ["--train.weights", run.train.weights, "--train.optimizer", run.train.optimizer]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise InputError("No strategy could be recommended, for the reason above; change it, or give --strategy NAME.")
    answer = json.loads(done.stdout)
    if answer["recommended"] is None:
        raise InputError(
            f"By the plan nothing fits on {gpus} of these GPUs; run finetune plan --config {options.config} to see "
            "what would, or give --strategy NAME --train.plan_check off to try it."
        )
    bf16 = answer["machines"]["gpu"]["bf16"]
    why = f"by the plan: {answer['reason'].partition('. ')[0]}"
    row = answer["rows"][answer["recommended"]]
    sizes = tuple(row[size.field] for size in SIZES.get(row["strategy"], ()))
    return Chosen(row["strategy"], why, None if bf16 else "fp16", sizes or None)


def _is_of_own_section(flag: str, kind: type[Run]) -> bool:
    """Whether a flag is that of a section that only a recipe of the user's own has."""
    section, _, key = flag.removeprefix("--").partition("=")[0].partition(".")
    return key != "" and section not in kind.model_fields


def _in_groups(arguments: Sequence[str]) -> list[list[str]]:
    """Flags with their values, which stay on one line."""
    groups: list[list[str]] = []
    for word in arguments:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups
