"""An answer as a dictionary for JSON: everything that it rests on, in bytes and seconds."""

from dataclasses import asdict
from typing import Any

from finetune import __version__
from finetune.cli.planning.launch_command import in_lines, launch_command
from finetune.cli.planning.reasons import reasons
from finetune.hardware.cards import Machines
from finetune.planner.choose import Plan
from finetune.planner.judged_rows import Need, Row
from finetune.planner.nearest import Nearest

SCHEMA = 1
"""Raised when a key changes its meaning or goes."""


def record(plan: Plan, *, model: str, notes: tuple[str, ...] = ()) -> dict[str, Any]:
    """The whole answer; ``recommended`` is the number of a row, and None where nothing fits."""
    question, best = plan.question, plan.best
    fastest = max(row.time.tokens_per_second for row in plan.rows)
    return {
        "schema": SCHEMA,
        "finetune": __version__,
        "measured": False,
        "model": model,
        "parameters": question.model.anatomy.parameters,
        "active_parameters": question.model.anatomy.active_parameters,
        "machines": _machines(question.machines),
        "world_size": question.machines.world_size,
        "speed_of": plan.stand_in or question.machines.gpu.name,
        "global_batch_size": question.global_batch_size,
        "row_tokens": question.base.row_tokens,
        "mean_document_tokens": question.mean_document_tokens,
        "epoch_tokens": question.epoch_tokens,
        "rows": [row_record(row, plan, fastest) for row in plan.rows],
        "impossible": [
            {"strategy": each.strategy, "method": each.method.text, "why": each.why} for each in plan.impossible
        ],
        "recommended": 0 if best else None,
        "reason": " ".join(reasons(plan)) if best else None,
        "command": in_lines(launch_command(question, best.setting)) if best else None,
        "course": _course(best) if best else None,
        "nearest": _nearest(plan.nearest),
        "notes": list(notes),
    }


def _course(row: Row) -> list[tuple[str, int]]:
    return [(phase, sum(parts.values())) for phase, parts in row.memory.course]


def row_record(row: Row, plan: Plan, fastest: float) -> dict[str, Any]:
    """One row. Seconds are None where the speed of the GPU is not known, and ``relative_speed`` is all there is."""
    setting, time = row.setting, row.time
    is_known = time.stand_in is None
    epoch = plan.question.epoch_tokens
    return {
        **asdict(setting),
        "packing": setting.packing,
        "method": row.setting.method.text,
        "verdict": row.verdict,
        "worst": row.worst.what,
        "gpu_bytes": row.memory.parts,
        "gpu_peak_bytes": row.memory.peak,
        "gpu_phases": row.memory.phases,
        "gpu": _need(row.gpu),
        "host": _need(row.host),
        "disk": _need(row.disk),
        "relative_speed": time.tokens_per_second / fastest,
        "tokens_per_second": time.tokens_per_second if is_known else None,
        "mfu": time.mfu if is_known else None,
        "step_seconds": time.step_seconds if is_known else None,
        "step_seconds_by_part": asdict(time.parts) if is_known else None,
        "epoch_seconds": time.seconds_for(epoch) if is_known and epoch else None,
        "transfers": [asdict(each) for each in time.transfers],
    }


def _machines(machines: Machines) -> dict[str, Any]:
    """Their fields, and whether the GPU multiplies in bf16, which follows from them."""
    found = asdict(machines)
    found["gpu"]["bf16"] = machines.gpu.bf16
    return found


def _need(need: Need) -> dict[str, Any]:
    return {"needed_bytes": need.bytes, "there_bytes": need.there, "verdict": need.verdict}


def _nearest(nearest: Nearest | None) -> dict[str, Any] | None:
    if nearest is None:
        return None
    return {"changes": nearest.changes, "strategy": nearest.strategy, "setting": asdict(nearest.row.setting)}
