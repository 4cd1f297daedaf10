"""The planner's predictions beside real runs of the recipe on this machine's GPUs: peak of memory, speed, and verdict.

  python -m benchmarks.plan_accuracy

Each run has processes of its own, a model with random weights, rows of exact lengths, and four steps. All predictions
are written down before the first run, by the planner as it is. It traces the steps of all runs for that, in one to two
minutes on two cores, and remembers the traces for the runs, which predict again. Runs at the edge of the GPU's memory
are among them, also beyond it, so that a verdict can be wrong either way.

The runs that say most come first, no run begins once ``--minutes`` are over, and ``results/plan_accuracy.json`` is
written after each, so that half of it is of use; a run that is repeated takes the place of its former result. A bound
that is broken ends the script with a sentence.

``--list`` prints the runs with their predictions, for ``--gpus`` that need not be here; ``--table`` prints what is
recorded; ``--rehearse`` sends one tiny run through the same processes on the CPU, with made-up memory.
Limits: the peak is that of the whole run, loading included; reading data and saving are not in the speed.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from finetune.errors import InputError
from finetune.hardware.cards import Machines, lookup, parse_gpus
from finetune.output.run_files import environment
from finetune.planner import Model
from finetune.planner.judged_rows import judged
from finetune.planner.question import question_about
from finetune.units import GIB

from .plan_cases import REHEARSED, Case, asked, cases
from .plan_results import broken_bounds, table
from .plan_runs import KINDS, Bench

RESULTS = Path(__file__).parent / "results" / "plan_accuracy.json"
GPU_OF_A_LIST = "1xH200"
MINUTES = 7.0
"""In which runs begin, tracing included: of 8, with what the last run takes."""
Measure = Callable[[Case], dict[str, Any]]
Predictions = dict[Case, dict[str, Any]]


def predict(case: Case, machines: Machines, model: Model) -> dict[str, Any]:
    """What the planner says of a run."""
    used = Machines(machines.gpu, case.setting.world_size)
    question = question_about(model, case.setting, used, mean_document_tokens=case.document_tokens)
    row = judged(question, case.setting)
    return {
        "peak_gib": row.memory.peak / GIB,
        "parts_gib": {name: size / GIB for name, size in row.memory.parts.items()},
        "needed_gib": row.gpu.bytes / GIB,
        "verdict": row.gpu.verdict,
        "tokens_per_second": None if row.time.stand_in else row.time.tokens_per_second,
    }


def predictions(machines: Machines, only: Sequence[str] = (), *, rehearses: bool = False) -> dict[Case, dict[str, Any]]:
    """The runs whose name holds one of these texts, with what the planner says of each.

    Raises:
        InputError: if there are none.
    """
    every = [REHEARSED] if rehearses else cases(machines)
    chosen = [case for case in every if not only or any(text in case.name for text in only)]
    if not chosen:
        raise InputError(f"No run's name holds {' or '.join(only)}; see --list.")
    return predictions_of(chosen, machines)


def predictions_of(chosen: Sequence[Case], machines: Machines) -> dict[Case, dict[str, Any]]:
    """What the planner says of runs."""
    found = {}
    for case in chosen:
        with asked(case.model, case.setting.row_tokens) as model:
            found[case] = predict(case, machines, model)
    return found


def _without_gpus() -> None:
    """In a process that has not used them: it is forked for each trace, which CUDA would not survive."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from finetune.models import loading
    from finetune.trace.serving import import_the_rest

    loading.quiet()
    import_the_rest()


def elsewhere(function: Callable[..., Predictions], *arguments: Any, **others: Any) -> Predictions:
    """What a function returns, called in a process of its own that uses no GPU."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_without_gpus) as pool:
        return pool.submit(function, *arguments, **others).result()


class NoGpu(InputError):
    """There is none on this machine."""


def seen_here() -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Names and bytes of this machine's GPUs, and its versions."""
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(gpu.name, gpu.total_memory) for gpu in gpus], environment() | {"cuda": torch.version.cuda}


def look() -> tuple[Machines, dict[str, Any]]:
    """``seen_here``, by a process of its own, which leaves nothing on the GPUs.

    Raises:
        InputError: if there are none.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        gpus, versions = pool.submit(seen_here).result()
    if not gpus:
        raise NoGpu(
            "There is no GPU here to hold the planner against; --list shows what would be run, and --rehearse runs a "
            "tiny model on the CPU."
        )
    return Machines(lookup(*gpus[0]), len(gpus)), versions


def record(
    foretold: Mapping[Case, dict[str, Any]],
    machines: Machines,
    results: Path,
    measure: Measure,
    known: dict[str, Any],
    *,
    until: float = math.inf,
) -> dict[str, Any]:
    """Write down all predictions, then measure, and write after each run.

    Args:
        foretold: the runs, with their predictions.
        known: hardware and versions, for the records.
        measure: runs a case, or raises RuntimeError.
        until: no run begins after that, on the clock of ``time.monotonic``.

    Returns:
        The records of these runs, by name. The file keeps those of others.
    """
    recorded = json.loads(results.read_text())["runs"] if results.exists() else {}
    where = {
        "predicted_for": machines.text,
        "memory_gib": machines.gpu.memory_gib,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        **known,
    }
    runs = {
        case.name: {
            "setting": {"model": case.model, "document_tokens": case.document_tokens, **asdict(case.setting)},
            "predicted": predicted,
            "measured": None,
            "environment": where,
        }
        for case, predicted in foretold.items()
    }
    _write(results, recorded | runs)
    for case in foretold:
        if time.monotonic() > until:
            print(f"The time is over: {case.name} and those after it are not run.", flush=True)
            break
        try:
            runs[case.name]["measured"] = measure(case)
        except RuntimeError as error:
            runs[case.name]["measured"] = {"outcome": "failed", "why": str(error)}
        _write(results, recorded | runs)
        print(table({case.name: runs[case.name]}).splitlines()[2], flush=True)
    return runs


def _write(results: Path, runs: dict[str, Any]) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    temporary = results.with_suffix(".tmp")
    temporary.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(results)


def list_of(foretold: Mapping[Case, dict[str, Any]]) -> str:
    """The runs with their predictions, in columns."""
    width = max(len(case.name) for case in foretold)
    lines = [f"{'run':<{width}}  peak GiB  needed  tokens/s  verdict"]
    for case, found in foretold.items():
        speed = f"{found['tokens_per_second']:,.0f}" if found["tokens_per_second"] else ""
        columns = f"{found['peak_gib']:8.2f}  {found['needed_gib']:6.1f}  {speed:>8}  {found['verdict']}"
        lines.append(f"{case.name:<{width}}  {columns}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit code is 1 if a bound is broken, and 2 for what can be put right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="runs whose name holds it")
    parser.add_argument("--list", action="store_true", help="print the runs and their predictions")
    parser.add_argument("--gpus", help="that the list is for (default: 1xH200)")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    parser.add_argument("--rehearse", action="store_true", help="one tiny run on the CPU")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"in which runs begin (default: {MINUTES:g})")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return answered(_answer, parser.parse_args(arguments))


def answered(answer: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """The exit code of a command: 2, with its problems on the screen, for what can be put right."""
    try:
        return answer(options)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2


def _answer(options: argparse.Namespace) -> int:
    if options.table:
        if not options.results.exists():
            raise InputError(f"Nothing is recorded in {options.results}; run without --table on a machine with a GPU.")
        print(table(json.loads(options.results.read_text())["runs"]))
        return 0
    if options.rehearse and options.results == RESULTS:
        raise InputError("A rehearsal measures nothing; name another file for its result with --results.")
    until = time.monotonic() + 60 * options.minutes
    if options.list or options.rehearse:
        machines, known = parse_gpus(options.gpus or GPU_OF_A_LIST), environment()
        foretold = predictions(machines, options.only, rehearses=options.rehearse)
    else:
        machines, known = look()
        foretold = elsewhere(predictions, machines, options.only)
    if options.list:
        print(list_of(foretold))
        return 0
    made_up = dict.fromkeys(KINDS, round(foretold[REHEARSED]["peak_gib"] * GIB)) if options.rehearse else None
    with (
        tempfile.TemporaryDirectory() as folder,
        Bench(Path(folder), list(foretold), memory_for_rehearsal=made_up) as bench,
    ):
        runs = record(foretold, machines, options.results, bench.measure, known, until=until)
    print(table(runs))
    broken = broken_bounds(runs)
    if all(run["measured"] is None for run in runs.values()):
        broken.append(f"No run began within {options.minutes:g} minutes, which the planning took; give more --minutes.")
    print("\n".join(broken), file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
