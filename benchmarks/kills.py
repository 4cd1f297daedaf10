"""Runs that are killed a hundred times, and end as the runs that nobody disturbed.

  python -m benchmarks.kills

Signals of every kind come to ranks and launchers of real runs at instants that are drawn from a seed: while a run
starts, in a step, while a checkpoint is written, while it is completed. In further runs a process kills itself before
each single change that saving makes to files. What is checked after every kill and at the end of each run stands in
tests/killing.py; the first thing that is not as it should be ends the script. Some runs are taken up each time under
another strategy and another number of processes; their numbers may differ from the undisturbed run's by 1e-5, all
others not by a bit.

The result is written to benchmarks/results/kills.json. Needs Linux, DeepSpeed, and no GPU: the runs are rehearsals.
Limits: the machine itself is never switched off; that files reach the disk before they are counted on is not seen here.
"""

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.output import run_files

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))  # the tests' tiny model, and their driver

import tiny  # noqa: E402
from killing import ENDING, SAVING, STARTING, STEPPING, Killed, Trial, in_turn, undisturbed  # noqa: E402
from launching import LaunchServer  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "kills.json"
FULL: tuple[str, ...] = ()
LORA = ("--adapter.type", "lora", "--adapter.rank", "4", "--adapter.dropout", "0.3")
LAUNCHES = [
    ("single", 1, LORA),
    ("ddp", 2, LORA),
    ("fsdp2", 2, FULL),
    ("zero2", 2, LORA),
    ("zero3", 2, FULL),
    ("fsdp2", 4, LORA),
]
AT_EACH_CHANGE = [("single", 1, 0, 15), ("ddp", 2, 0, 18), ("fsdp2", 2, 1, 4)]
"""Strategy, processes, the rank that kills itself, and the changes to files before which it does, from the first."""
PHASES = (STARTING, STEPPING, SAVING, ENDING)
IN_A_RUN = 6
"""Kills that one run gets."""
LEAST = 100
ELSEWHERE_TOLERANCE = 1e-5


class Field:
    """Where the runs take place: the server, the model, the rows, and the undisturbed runs."""

    def __init__(self, folder: Path) -> None:
        os.environ |= {"FINETUNE_DATA_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        model = tiny.build_model_folder(folder / "model")
        rows = tiny.write_conversations(folder / "train.jsonl", rows=80)
        self.folder, self.numbers = folder, itertools.count()
        self.settings = [
            "--model.path",
            str(model),
            "--model.random_weights",
            "true",
            "--data.train",
            str(rows),
            "--data.max_length",
            "64",
        ]
        self.sources = [row.source for row in tiny.read_rows(rows, tiny.build_tokenizer())]
        self.server = LaunchServer(folder / "server.log")
        self.references = {
            settings: undisturbed(self.server, folder / name, [*self.settings, *settings], self.sources)
            for name, settings in (("full", FULL), ("lora", LORA))
        }

    def trial(self, settings: tuple[str, ...]) -> Trial:
        folder = self.folder / f"trial-{next(self.numbers)}"
        return Trial(self.server, folder, [*self.settings, *settings], self.sources)


def kill_at_random(field: Field, kills: int, draw: random.Random) -> list[dict[str, Any]]:
    """Runs that get signals at random instants, each under one launch, until there were so many kills."""
    records: list[dict[str, Any]] = []
    orders = {processes: in_turn(draw, processes) for _, processes, _ in LAUNCHES}
    for strategy, processes, settings in itertools.cycle(LAUNCHES):
        if len(records) >= kills:
            return records
        reference, trial = field.references[settings](strategy, processes), field.trial(settings)
        trial.starting_seconds, trial.step_seconds = reference.starting_seconds, reference.step_seconds
        for _ in range(IN_A_RUN):
            keep(records, killed := trial.kill(strategy, processes, next(orders[processes])))
            if killed is None:  # it came to its end
                break
        trial.finish(strategy, processes)
        trial.check(reference)
    raise AssertionError("a cycle has no end")


def kill_elsewhere(field: Field, runs: int, draw: random.Random) -> list[dict[str, Any]]:
    """Runs that are taken up under another launch after every kill."""
    records: list[dict[str, Any]] = []
    orders = {processes: in_turn(draw, processes) for _, processes, _ in LAUNCHES}
    for _ in range(runs):
        reference, trial = field.references[FULL]("single", 1), field.trial(FULL)
        for strategy, processes, _ in draw.sample(LAUNCHES, IN_A_RUN):
            keep(records, killed := trial.kill(strategy, processes, next(orders[processes])))
            if killed is None:
                break
        trial.finish("single", 1)
        trial.check(reference, tolerance=ELSEWHERE_TOLERANCE)
    return records


def kill_at_each_change(field: Field) -> list[dict[str, Any]]:
    """Runs in which a process kills itself before the first change to files of checkpoints, then the second, ..."""
    records: list[dict[str, Any]] = []
    for strategy, processes, rank, changes in AT_EACH_CHANGE:
        reference, trial = field.references[LORA](strategy, processes), field.trial(LORA)
        for number in range(1, changes + 1):
            keep(records, trial.kill_before_change(strategy, processes, rank, number))
        trial.finish(strategy, processes)
        trial.check(reference)
    return records


def keep(records: list[dict[str, Any]], killed: Killed | None) -> None:
    if killed is not None:
        records.append(asdict(killed))
        after = f"step {killed.last_step}, gone after {killed.gone_seconds:.2f} s with code {killed.code}"
        where = f"{killed.strategy} x {killed.processes}"
        print(f"{killed.kill}, {killed.phase}, {where}: {after}, goes on after {killed.resumes_after}", flush=True)


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: kills of each kind in each phase, and the longest time until no process was left."""
    lines = [f"| kill | {' | '.join(PHASES)} | all | gone after, s |", "|---|" + "---|" * (len(PHASES) + 2)]
    for kind in [*dict.fromkeys(record["kill"] for record in records), "all"]:
        own = [record for record in records if kind in (record["kill"], "all")]
        counts = Counter(record["phase"] for record in own)
        cells = " | ".join(str(counts[phase]) for phase in PHASES)
        lines.append(f"| {kind} | {cells} | {len(own)} | {max(r['gone_seconds'] for r in own):.1f} |")
    return "\n".join(lines)


def by_launch(records: list[dict[str, Any]]) -> dict[str, int]:
    return dict(Counter(f"{record['strategy']} x {record['processes']}" for record in records))


def problems(kills: int) -> list[str]:
    if sys.platform != "linux":
        return ["The kills need Linux, where processes see each other's end; measure there."]
    return [] if kills > 0 else [f"--kills {kills}: give at least 1."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=LEAST, help="by signals, at random instants; others come on top")
    parser.add_argument("--runs-elsewhere", type=int, default=3, help="taken up under another launch after each kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if found := problems(args.kills):
        sys.exit("\n".join(f"error: {each}" for each in found))
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        field = Field(Path(temporary))
        try:
            random_kills = kill_at_random(field, args.kills, draw)
            elsewhere = kill_elsewhere(field, args.runs_elsewhere, draw)
            at_changes = kill_at_each_change(field)
        finally:
            field.server.stop()
        runs = next(field.numbers)
    records = random_kills + elsewhere + at_changes
    measured = {
        "environment": run_files.environment(),
        "setup": {"seed": args.seed, "runs": runs},
        "kills": {"by signals": len(random_kills), "elsewhere": len(elsewhere), "at each change": len(at_changes)},
        "launches": by_launch(records),
        "runs": records,
    }
    RESULTS.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(f"{len(records)} kills in {runs} runs, none of which ended otherwise than undisturbed.\n{table(records)}")


if __name__ == "__main__":
    main()
