"""``finetune plan``: what fits on which GPUs, under which strategy, how fast, before anything is loaded."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from finetune.errors import refuse_if_any
from finetune.planner import picture
from finetune.planner.asked import Asked, asked, setting_alone
from finetune.planner.choose import Plan, plan
from finetune.planner.json_answer import record
from finetune.planner.machine import gpus_here
from finetune.planner.plan_tables import print_plan
from finetune.planner.written import Options
from finetune.trace.setting import Setting
from finetune.units import GIB


@dataclass(frozen=True)
class Shown:
    """How an answer is shown, and whether it is traced or probed."""

    as_json: bool = False
    all_rows: bool = False
    plot: Path | None = None
    traced_rank: int | None = None
    """Rank to trace; None for no dry run."""
    probes: bool = False


def show(arguments: Sequence[str], options: Options, shown: Shown) -> int:
    """Answer a question; the exit code is 0 if something fits, and 1 if nothing does.

    Args:
        arguments: ``--config FILE`` and flags of the recipe.

    Raises:
        InputError: for wrong input.
        RunStopped: if a dry run failed.
    """
    refuse_if_any(picture.problems(shown.plot) if shown.plot is not None else [])
    if shown.probes:
        gpus_here()
    if shown.traced_rank is not None and (alone := setting_alone(arguments, options)) is not None:
        return _show_trace_alone(*alone, shown.traced_rank, as_json=shown.as_json)
    question = asked(arguments, options)
    answer = plan(question.question)
    first = answer.rows[0]
    name = Path(question.model).stem if question.model.endswith(".json") else Path(question.model).name
    extra: dict[str, Any] = {}
    lines: list[str] = []
    if shown.traced_rank is not None:
        from finetune.planner.traced import compare

        comparison = compare(first, question.model, question.revision, shown.traced_rank)
        extra["trace"] = {**asdict(comparison), "ratio": comparison.ratio}
        lines += ["", f"Traced: {first.name}{_of_processes(shown.traced_rank, first.setting)}", *comparison.lines]
    if shown.probes:
        lines += ["", *_probe(question, answer, extra)]
    if shown.plot is not None:
        title = f"{name}: {first.name} on {question.question.machines.text}"
        picture.draw(first, shown.plot, title=title)
        lines += ["", f"Plotted the memory of {first.name} to {shown.plot}."]
    if shown.as_json:
        print(json.dumps(record(answer, model=question.model, notes=question.notes) | extra, indent=2))
    else:
        console = Console(highlight=False, emoji=False, markup=False)
        print_plan(answer, console, model=name, notes=question.notes, shows_all=shown.all_rows)
        for line in lines:
            console.print(line, soft_wrap=True)
    return 0 if answer.recommendation is not None else 1


def _probe(question: Asked, answer: Plan, extra: dict[str, Any]) -> list[str]:
    """Two real steps on this machine's GPU."""
    from finetune.planner.probed import lines_of, probe_row, record_of, row_to_probe

    row = row_to_probe(answer.rows, question.question, gpus_here())
    found = probe_row(row, question.question, question.model, question.revision)
    extra["probe"] = record_of(row, found)
    return lines_of(row, found)


def _of_processes(rank: int, setting: Setting) -> str:
    return f", as rank {rank} of {setting.world_size}" if setting.world_size > 1 else ""


def _show_trace_alone(model_config: dict[str, Any], setting: Setting, rank: int, *, as_json: bool) -> int:
    """A model without formulas, by a dry run alone; nothing is compared or recommended."""
    from finetune.planner.traced import in_parts
    from finetune.trace.child import trace_in_child

    found = trace_in_child(model_config, setting, rank=rank)
    if as_json:
        print(json.dumps({"setting": asdict(setting), "rank": rank, "trace": found.record()}, indent=2))
        return 0
    whose = _of_processes(rank, setting)
    print(f"There are no formulas for {model_config.get('model_type')}; a dry run of one setting{whose} gives:")
    for part, size in in_parts(found).items():
        print(f"{part:<13}{size / GIB:>10.3f} GiB")
    print(f"{'peak':<13}{found.peak.bytes / GIB:>10.3f} GiB in the {found.peak_phase}, with")
    print("\n".join(f"  {name}: {value}" for name, value in asdict(setting).items()))
    return 0
