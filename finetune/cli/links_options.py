"""Options of the verb ``links``. Imports nothing that is slow."""

import argparse
from pathlib import Path
from typing import Any


def add_links(verbs: Any) -> None:
    """The verb that measures how fast GPUs reach one another."""
    links = verbs.add_parser(
        "links",
        help="measure the links between the GPUs of this machine, or of a launch on several",
        description="Measure all-reduce, all-gather, reduce-scatter and exchanges between neighbours over sizes, "
        "inside machines and between them, and find processes that are slower than the others. Starts a process for "
        "each GPU of this machine; of several machines, start it on each as a launcher's program: torchrun --nnodes 2 "
        "--nproc_per_node 8 --node_rank RANK --master_addr ADDRESS --master_port 29500 -m finetune.cli links. Takes "
        "half a minute.",
        epilog="finetune plan --links FILE takes what was measured in place of data sheets.",
    )
    processes = links.add_mutually_exclusive_group()
    processes.add_argument("--gpus", metavar="N", type=int, help="GPUs to measure; default: all of this machine")
    processes.add_argument("--processes", metavar="N", type=int, help="processes without a GPU, for a rehearsal")
    links.add_argument("--output", metavar="FILE", type=Path, help="JSON file to write, for finetune plan --links")
    links.add_argument("--json", action="store_true", help="print the same instead of tables")
    links.add_argument(
        "--seconds", metavar="S", type=float, default=0.2, help="for each size of each operation; default: 0.2"
    )
    links.set_defaults(run=_links)


def _links(options: argparse.Namespace) -> int:
    from finetune.cli.links_verb import links

    return links(options)
