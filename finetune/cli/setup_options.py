"""Options of the verbs ``init`` and ``doctor``, which come before a first run. Imports nothing that is slow."""

import argparse
from pathlib import Path
from typing import Any


def add_init(verbs: Any) -> None:
    """The verb that makes a folder to work in."""
    init = verbs.add_parser(
        "init",
        help="copy recipes, strategy files, sample configurations and notebooks to a folder",
        description="Copy recipes, strategy files, sample configurations with their data, notebooks, the tested "
        "versions of libraries and a README to a folder. Existing files are never touched.",
    )
    init.add_argument("folder", metavar="DIR", type=Path, help="folder to create, or to add to")
    init.add_argument("--json", action="store_true", help="print what was copied and what was kept as JSON")
    init.set_defaults(run=_init)


def add_doctor(verbs: Any) -> None:
    """The verb that looks at this machine."""
    doctor = verbs.add_parser(
        "doctor",
        help="check whether training can start on this machine: libraries, GPUs, memory, disk, hub",
        description="Check versions of libraries, GPUs and their links, quantisation, cores, memory, disk and access "
        "to the hub, and say what to do. Takes some seconds. The exit code is 1 if training cannot start.",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=_doctor)


def _init(options: argparse.Namespace) -> int:
    from finetune.cli.init_verb import init

    return init(options.folder, as_json=options.json)


def _doctor(options: argparse.Namespace) -> int:
    from finetune.cli.doctor_verb import doctor

    return doctor(as_json=options.json)
