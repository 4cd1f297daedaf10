"""How to spread a model over GPUs: every layout's speed and peak of memory, measured beside what the planner said.

  python -m benchmarks.layouts --model Llama-3.2-1B --row_tokens 4096 32768      # over all GPUs of this machine
  python -m benchmarks.layouts --model OLMoE-1B-7B --only fsdp2 "ep 4" "ep 8"    # a mixture, and its experts shared
  python -m benchmarks.layouts --processes 4 --only fsdp2 "cp 2"                 # without a GPU: a tiny model
  python -m benchmarks.layouts --report                                          # table and chart of what is recorded

A layout is a strategy, how many processes share each row, each layer or its experts, and whether activations are
recomputed; each is tried with rows of each length. Predictions are made before the first run. A run has processes of
its own, random weights and four steps, and leaves a line in benchmarks/results/layouts.jsonl at once. No run begins
once ``--minutes`` are over, and none whose plan does not fit. Without a GPU, processes share the cores: their speeds
say that a layout runs, and nothing on GPUs, for which the predictions are (``--gpus``).
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from finetune.config.compatibility import expert_problems, heads_problems, refusal, scaling_problems, stage_problems
from finetune.config.strategy_names import SIZES, STRATEGIES
from finetune.distributed import native_precision
from finetune.errors import InputError
from finetune.hardware import cores
from finetune.hardware.cards import parse_gpus
from finetune.output.run_files import environment
from finetune.planner.question import METHODS
from finetune.trace.placement import world_sizes_problem
from finetune.trace.setting import Setting

from .plan_accuracy import NoGpu, answered, elsewhere, look, predictions_of
from .plan_cases import MODELS, Case
from .plan_runs import KINDS, Bench

RESULTS = Path(__file__).parent / "results" / "layouts.jsonl"
GPUS = "8xH100"
"""That the predictions are for where there is no GPU."""
ON_DISK = "_nvme"
Record = dict[str, Any]
SAME = ("model", "processes", "method", "row_tokens", "rows")
"""Of layouts that are compared."""


def layouts(
    model: str, processes: int, row_tokens: Sequence[int], rows: int, method: str, *, precision: str = "bf16"
) -> list[Case]:
    """Every layout on so many processes with rows of each length.

    Args:
        rows: of an optimizer step.

    Raises:
        InputError: if the rows cannot be dealt to so many processes.
    """
    if rows % processes:
        raise InputError(f"{rows} rows cannot be dealt to {processes} processes; take a multiple of {processes}.")
    adapter, bits = METHODS[method]
    divisors = [size for size in range(2, processes + 1) if processes % size == 0]
    base = Setting("single", processes, bits, adapter, precision=precision, layout="flat")
    spread = []
    for strategy in STRATEGIES:
        fields = [size.field for size in SIZES.get(strategy, ())]
        sizes: list[dict[str, Any]] = [dict(zip(fields, each)) for each in product(divisors, repeat=len(fields))]
        spread += [replace(base, strategy=strategy, **each) for each in sizes]
    found = []
    for setting in (each for each in spread if _is_possible(model, each)):
        ways = [
            replace(
                setting,
                row_tokens=length,
                activation_checkpointing=recomputes,
                accumulation=rows // setting.data_processes,
            )
            for length in row_tokens
            for recomputes in (False, True)
        ]
        found += [Case(model, way, way.row_tokens) for way in ways]
    return found


def _is_possible(model: str, setting: Setting) -> bool:
    """Whether a run would take a strategy and its size, on GPUs and links alone."""
    config = MODELS[model]
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    return not (
        setting.strategy.endswith(ON_DISK)
        or world_sizes_problem(setting.strategy, setting.world_size, setting.sizes)
        or refusal(setting.cell)
        or heads_problems(setting.strategy, setting.context, *heads)
        or heads[0] % setting.tensor
        or stage_problems(setting.strategy, model, config["num_hidden_layers"], setting.stages)
        or expert_problems(model, config.get("num_experts", 0), setting.experts)
        or scaling_problems(setting.strategy, precision=setting.precision)
    )


def record(
    foretold: dict[Case, Record], measure: Callable[[Case], Record], known: Record, results: Path, *, until: float
) -> list[Record]:
    """Measure layouts, and write a line after each.

    Args:
        measure: runs a case, or raises RuntimeError.
        known: hardware and versions.
        until: no run begins after that, on the clock of ``time.monotonic``.
    """
    found = []
    results.parent.mkdir(parents=True, exist_ok=True)
    for case, predicted in foretold.items():
        measured: Record | None = None
        if time.monotonic() > until:
            print(f"The time is over: {case.name} and those after it are not run.", flush=True)
            break
        if not known["gpus"] or predicted["verdict"] != "does not fit":
            try:
                measured = {
                    key: figure for key, figure in measure(case).items() if known["gpus"] or not _is_memory(key)
                }
            except RuntimeError as error:
                measured = {"outcome": "failed", "why": str(error)}
        setting = case.setting
        line = {
            "model": case.model,
            "processes": setting.world_size,
            "method": setting.method.text,
            "row_tokens": setting.row_tokens,
            "rows": case.global_batch_size,
            "layout": setting.launched,
            "recomputed": setting.activation_checkpointing,
            "predicted": predicted,
            "measured": measured,
            "setting": asdict(setting),
            **known,
        }
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        found.append(line)
        print(f"{case.name}: {_outcome(line)}", flush=True)
    return found


def _is_memory(key: str) -> bool:
    """Whether a figure is of a GPU's memory."""
    return key.endswith(("_gib", "_gib_at_start"))


def newest(records: Sequence[Record]) -> list[Record]:
    """The last record of each layout."""
    return list({tuple(line[key] for key in (*SAME, "layout", "recomputed")): line for line in records}.values())


def groups(records: Sequence[Record]) -> list[list[Record]]:
    """Layouts that can be compared: of the same model and rows, the fastest first."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for line in newest(records):
        found.setdefault(tuple(line[key] for key in SAME), []).append(line)
    return [sorted(each, key=speed, reverse=True) for each in found.values()]


def speed(line: Record) -> float:
    """Measured tokens a second; 0 for a layout that did not run."""
    measured = line["measured"] or {}
    found: float = measured.get("tokens_per_second", 0.0)
    return found


def report(records: Sequence[Record], chart: Path) -> None:
    """Tables in the terminal, and a chart."""
    console = Console(width=80)
    for lines in groups(records):
        first = lines[0]
        title = f"{first['model']}, {first['method']}, {first['rows']} rows of {first['row_tokens']:,} tokens"
        where = first["gpus"][0] if first["gpus"] else f"CPU ({first['cpus']} cores)"
        console.print(f"{title}, {first['processes']} processes on {where}; planned for {first['predicted_for']}")
        table = Table("layout", "recomputed", "planned tokens/s", "measured", "planned GiB", "measured", box=None)
        for line in lines:
            planned, measured = line["predicted"], line["measured"] or {}
            told = planned["tokens_per_second"]
            peak = measured.get("allocated_gib")
            table.add_row(
                line["layout"],
                "all" if line["recomputed"] else "none",
                f"{told:,.0f}" if told else "",
                _outcome(line),
                f"{planned['peak_gib']:.1f}",
                f"{peak:.1f}" if peak else "",
            )
        console.print(table)
        console.print()
    draw(records, chart)


def draw(records: Sequence[Record], path: Path) -> None:
    """Bars of speed as shares of the fastest, planned beside measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    every = groups(records)
    height = sum(1.2 + 0.35 * len(lines) for lines in every)
    sizes = {"height_ratios": [2 + len(lines) for lines in every]}
    figure, axes = plt.subplots(
        len(every), 1, figsize=(8, height), layout="constrained", gridspec_kw=sizes, squeeze=False
    )
    for axis, lines in zip(axes.flat, every):
        shown = lines[::-1]
        names = [f"{line['layout']}{', recomputed' if line['recomputed'] else ''}" for line in shown]
        for offset, what, color in ((0.2, "measured", "tab:blue"), (-0.2, "planned", "lightgray")):
            speeds = [
                speed(line) if what == "measured" else line["predicted"]["tokens_per_second"] or 0.0 for line in shown
            ]
            best = max([*speeds, 1e-9])
            places = [place + offset for place in range(len(shown))]
            axis.barh(places, [each / best for each in speeds], height=0.38, color=color, label=what)
        axis.set_yticks(range(len(shown)), names)
        axis.set_title(f"{lines[0]['model']}, {lines[0]['method']}, rows of {lines[0]['row_tokens']:,} tokens")
        axis.set_xlabel("tokens a second, as a share of the fastest")
        axis.legend(loc="lower right")
    figure.savefig(path)
    plt.close(figure)


def _outcome(line: Record) -> str:
    measured = line["measured"]
    if measured is None:
        return "not run"
    return f"{speed(line):,.0f}" if measured["outcome"] == "finished" else measured["outcome"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit code is 1 if a layout failed, and 2 for what can be put right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="default: Llama-3.2-1B, without a GPU tiny")
    parser.add_argument("--method", choices=METHODS, default="full")
    parser.add_argument("--processes", type=int, help="default: one for each GPU, without a GPU 2")
    parser.add_argument("--row_tokens", type=int, nargs="+", default=[2048, 8192], metavar="N")
    parser.add_argument("--rows", type=int, help="of an optimizer step; default: as many as processes")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="LAYOUT", help='these layouts, for example: fsdp2 "cp 2"'
    )
    parser.add_argument("--gpus", default=GPUS, help=f"that predictions are for without a GPU (default: {GPUS})")
    parser.add_argument("--minutes", type=float, default=60.0, help="in which runs begin (default: 60)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="show what is recorded, and measure nothing")
    return answered(_answer, parser.parse_args(arguments))


def _answer(options: argparse.Namespace) -> int:
    chart = options.results.with_suffix(".svg")
    if options.report:
        if not options.results.exists():
            raise InputError(f"Nothing is recorded in {options.results}; run without --report.")
        report([json.loads(line) for line in options.results.read_text(encoding="utf-8").splitlines()], chart)
        print(f"The chart is in {chart}.")
        return 0
    until = time.monotonic() + 60 * options.minutes
    try:
        machines, known = look()
        gpus = [machines.gpu.name] * machines.world_size
    except NoGpu:
        machines, known, gpus = parse_gpus(options.gpus), environment(), []
    processes = options.processes or len(gpus) or 2
    asked_for = options.model or ("Llama-3.2-1B" if gpus else "tiny"), processes, options.row_tokens
    precision = "bf16" if gpus else native_precision()
    every = layouts(*asked_for, options.rows or processes, options.method, precision=precision)
    chosen = [case for case in every if not options.only or case.setting.launched in options.only]
    if not chosen:
        there = ", ".join(dict.fromkeys(case.setting.launched for case in every))
        raise InputError(f"There is no layout {' or '.join(options.only)} here; there are: {there}.")
    foretold = elsewhere(predictions_of, chosen, machines)
    known = {
        "gpus": gpus,
        "cpus": cores.usable(),
        "predicted_for": f"{processes}x{machines.gpu.name}",
        "environment": known,
    }
    nothing = None if gpus else dict.fromkeys(KINDS, 0)  # is known of memory without a GPU
    with tempfile.TemporaryDirectory() as folder, Bench(Path(folder), chosen, memory_for_rehearsal=nothing) as bench:
        found = record(foretold, bench.measure, known, options.results, until=until)
    report(found, chart)
    return int(any((line["measured"] or {}).get("outcome") == "failed" for line in found))


if __name__ == "__main__":
    sys.exit(main())
