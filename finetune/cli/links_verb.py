"""``finetune links``: how fast the processes of a launch reach one another."""

import argparse
import os
from pathlib import Path

from rich.console import Console

from finetune.errors import InputError
from finetune.hardware import cores
from finetune.shipped import shipped_files


def links(options: argparse.Namespace) -> int:
    """Measure in the processes of the launch that this one belongs to, or start some; returns the exit code.

    Raises:
        InputError: for wrong input.
        RunStopped: if a process does not answer.
    """
    output: Path | None = options.output
    if not 0 < options.seconds < float("inf"):
        raise InputError(f"--seconds {options.seconds:g}: must be above 0; change it, or leave it out.")
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError(f"--output {output}: there is no folder {output.absolute().parent}; create it first.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _measure(output, options.seconds, as_json=options.json)
    from finetune.distributed.launcher import StrategyFile, gpu_count, launch, strategy_of_rehearsal  # seconds

    processes = _processes(options, gpu_count())
    file = StrategyFile.read(shipped_files() / "accelerate_configs" / f"{strategy_of_rehearsal(processes)}.yaml")
    arguments = ["links", "--seconds", str(options.seconds)]
    arguments += [] if output is None else ["--output", str(output)]
    arguments += ["--json"] if options.json else []
    program = Path(__file__).with_name("__main__.py")
    return launch(file, processes, "no", max(1, cores.usable() // processes), program, arguments)


def _processes(options: argparse.Namespace, gpus: int) -> int:
    flag, asked = ("--gpus", options.gpus) if options.processes is None else ("--processes", options.processes)
    if gpus and options.processes is not None:
        raise InputError(f"--processes {asked} is for machines without a GPU, and this one has {gpus}; use --gpus.")
    several = "start it on several machines (finetune links --help)"
    if options.gpus is not None and options.gpus > gpus:
        known = {
            0: f"no GPU; use --processes {max(2, options.gpus)} to rehearse on the CPU",
            1: f"one GPU, and a link needs two processes at least; {several}",
        }
        raise InputError(f"--gpus {options.gpus}: this machine has {known.get(gpus, f'{gpus}; give at most that')}.")
    processes: int = gpus if asked is None else asked
    if processes < 2:
        what = f"{flag} {asked}" if asked is not None else "This machine has " + ("one GPU" if gpus else "no GPU")
        rehearsal = "" if gpus else "use --processes 2 to rehearse on the CPU, or "
        raise InputError(f"{what}: a link needs two processes at least; {rehearsal}{several}.")
    return processes


def _measure(output: Path | None, seconds: float, *, as_json: bool) -> int:
    from finetune.cli.links.links_table import print_links
    from finetune.cli.links.measuring import measure

    found = measure(seconds)
    if found is None:
        return 0
    written = found.model_dump_json(indent=1)
    if output is not None:
        try:
            output.write_text(written + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--output {output} cannot be written ({error.strerror or error}).") from error
    if as_json:
        print(written)
    else:
        print_links(found, Console(highlight=False, emoji=False, markup=False))
        if output is not None:
            print(f"Written to {output}, for finetune plan --links {output}.")
    return 0
