"""A row of the answer beside real steps on the GPU that is here."""

from dataclasses import asdict, replace
from typing import Any

from finetune.cli.planning.probe import Probed
from finetune.errors import InputError
from finetune.hardware.cards import Machines
from finetune.planner.judged_rows import Row, verdict
from finetune.planner.memory import StepMemory, needed_bytes
from finetune.planner.question import Question
from finetune.trace.setting import Setting
from finetune.units import GIB


def row_to_probe(rows: tuple[Row, ...], question: Question, here: Machines) -> Row:
    """The first way to train that can be probed: the recommended one, if it can.

    Raises:
        InputError: if the question is about other GPUs than there are here, or about several of them, or nothing fits.
    """
    asked = question.machines
    if asked.gpu.name != here.gpu.name:
        raise InputError(
            f"--probe measures the {here.gpu.name} that is here, and the question is about {asked.text}; leave --probe "
            f"out, or ask about --gpus 1x{here.gpu.name}."
        )
    for row in rows:
        place = row.setting.placement
        if place.framework == "plain" and row.verdict != "does not fit":
            return row
    raise InputError(
        f"--probe takes its steps on one GPU without sharding, and no row of the answer for {asked.text} does that and "
        f"fits; ask about --gpus 1x{here.gpu.name}, with --strategy left out."
    )


def probed_setting(row: Row) -> Setting:
    """What is probed of a row: more than two micro-batches change neither the peak nor the time of each."""
    return replace(row.setting, accumulation=min(row.setting.accumulation, 2))


def compared(row: Row, question: Question, real: Probed) -> dict[str, Any]:
    """Real steps of ``probed_setting`` beside the prediction, for ``--json``; each row is one document.

    None stands where nothing is known: of memory without a GPU, of the predicted speed of a card without a data sheet.
    """
    model, machines, setting = question.model, question.machines, probed_setting(row)
    memory = model.memory(setting, large_workspaces=machines.gpu.has_large_workspaces)
    time = model.time(setting, machines, mean_document_tokens=setting.row_tokens)
    needed = None
    if real.peak_bytes is not None:
        needed = needed_bytes(StepMemory({"measured": real.peak_bytes}, {}), setting)
    is_known = time.stand_in is None
    return {
        "setting": asdict(setting),
        "measured": asdict(real) | {"tokens_per_second": time.tokens / real.step_seconds},
        "predicted": {
            "peak_bytes": memory.peak,
            "step_seconds": time.step_seconds if is_known else None,
            "tokens_per_second": time.tokens_per_second if is_known else None,
        },
        "verdict": None if needed is None else verdict(needed, row.gpu.there or 0),
        "needed_bytes": needed,
    }


def lines_of(row: Row, found: dict[str, Any]) -> list[str]:
    """What ``compared`` says, as plain text."""
    real, said, needed = found["measured"], found["predicted"], found["needed_bytes"]
    setting = row.setting
    rows = f"{setting.micro_batch_size} x {setting.row_tokens:,} tokens"
    lines = [f"Probed: {row.name}, micro-batch {rows}, {setting.activations}"]
    if needed is not None:
        off = said["peak_bytes"] / real["peak_bytes"] - 1
        peaks = f"{real['peak_bytes'] / GIB:.2f} GiB, predicted {said['peak_bytes'] / GIB:.2f} ({off:+.1%})"
        there = (row.gpu.there or 0) / GIB
        lines.append(f"peak memory: {peaks}; {needed / GIB:.1f} of {there:.1f} GiB are needed: {found['verdict']}")
    speed = f"speed: {real['tokens_per_second']:,.0f} tokens/s"
    if said["tokens_per_second"] is None:
        return [*lines, f"{speed}; its prediction needs the card's data sheet, which is not known"]
    off = said["tokens_per_second"] / real["tokens_per_second"] - 1
    return [*lines, f"{speed}, predicted {said['tokens_per_second']:,.0f} ({off:+.0%})"]
