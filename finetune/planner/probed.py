"""The closed form beside two real steps on the GPU that is here, and the prediction as they correct it."""

from dataclasses import asdict
from typing import Any

from finetune.errors import InputError
from finetune.hardware.cards import Machines
from finetune.planner.calibration import Calibration, calibrate, probe_settings
from finetune.planner.judged_rows import Row
from finetune.planner.model_config import read_config
from finetune.planner.question import Question
from finetune.planner.rates import RATES
from finetune.trace.placement import placement_of
from finetune.trace.probe import probe_in_child
from finetune.units import GIB, MIB


def row_to_probe(rows: tuple[Row, ...], question: Question, here: Machines) -> Row:
    """The first way to train that can be probed.

    Raises:
        InputError: if the question is about other GPUs than there are here, or about several of them.
    """
    asked = question.machines
    if asked.gpu.name != here.gpu.name:
        raise InputError(
            f"--probe measures the {here.gpu.name} that is here, and the question is about {asked.text}; leave --probe "
            f"out, or ask about --gpus 1x{here.gpu.name}."
        )
    for row in rows:
        if placement_of(row.setting.strategy, row.setting.world_size).framework == "plain":
            return row
    raise InputError(
        f"--probe takes its steps on one GPU without sharding, and no row of the answer for {asked.text} does that; "
        f"ask about --gpus 1x{here.gpu.name}, with --strategy left out."
    )


def probe_row(row: Row, question: Question, model: str, revision: str | None) -> Calibration:
    """Take the steps in a process of its own, and correct the prediction for a row by them.

    Raises:
        InputError: if not even short rows leave room, or a step ran out of memory.
        RunStopped: if the probe failed.
    """
    settings = probe_settings(question.shape, row.setting, question.machines.gpu.memory_gib * GIB)
    first, second = probe_in_child(read_config(model, revision), settings)
    return calibrate(
        question.shape,
        row.setting,
        question.machines,
        mean_document_tokens=question.mean_document_tokens,
        settings=settings,
        probed=(first, second),
    )


def record_of(row: Row, found: Calibration) -> dict[str, Any]:
    """For ``--json``."""
    fields = asdict(found)
    rates = fields.pop("rates")
    return {
        "setting": asdict(row.setting),
        **fields,
        "measured_bytes_per_token": found.measured_line.bytes_per_token,
        "measured_constant_bytes": found.measured_line.constant_bytes,
        "fitted": list(rates["fitted"]),
        "rates": rates["rates"],
        "verdict": found.verdict,
    }


def lines_of(row: Row, found: Calibration) -> list[str]:
    """What the probe says, as plain text."""
    cells = [("tokens of a micro-batch", "peak GiB", "predicted", "off", "step s", "predicted", "off")]
    for real, formula in zip(found.probed, found.predicted):
        cells.append(
            (
                f"{real.tokens:,}",
                f"{real.peak_bytes / GIB:.2f}",
                f"{formula.peak_bytes / GIB:.2f}",
                f"{formula.peak_bytes / real.peak_bytes - 1:+.1%}",
                f"{real.step_seconds:.3f}",
                f"{formula.step_seconds:.3f}" if found.knows_speed else "",
                f"{formula.step_seconds / real.step_seconds - 1:+.0%}" if found.knows_speed else "",
            )
        )
    lines = [f"{first:<24}" + "".join(f"{cell:>9}" for cell in rest) for first, *rest in cells]
    measured, predicted = found.measured_line, found.predicted_line
    return [
        f"Probed: {row.name}",
        *lines,
        f"A token takes {measured.bytes_per_token / MIB:.3f} MiB ({predicted.bytes_per_token / MIB:.3f} predicted), "
        f"and {measured.constant_bytes / GIB:.2f} GiB ({predicted.constant_bytes / GIB:.2f}) do not depend on tokens.",
        f"Corrected for {found.asked.tokens:,} tokens: a peak of {found.corrected.peak_bytes / GIB:.2f} GiB "
        f"({found.asked.peak_bytes / GIB:.2f} predicted); {found.needed_bytes / GIB:.1f} of "
        f"{found.there_bytes / GIB:.1f} GiB are needed: {found.verdict}.",
        _of_speed(row, found),
    ]


def _of_speed(row: Row, found: Calibration) -> str:
    if not found.knows_speed:
        return "The data sheet of this card is not known here, so that nothing is said of its speed."
    fitted, rates = found.rates.fitted, found.rates.rates
    if not fitted:
        return "The steps were too short to tell the card's speed: the host was waited for; probe longer rows."
    tokens = row.time.tokens
    speed = (
        f"Corrected speed: {tokens / found.corrected.step_seconds:,.0f} tokens/s "
        f"({tokens / found.asked.step_seconds:,.0f} predicted)"
    )
    if "all" in fitted:
        slower = RATES.matrix_efficiency / rates.matrix_efficiency
        return f"{speed}; everything takes {slower:.2f} times as long as assumed."
    return (
        f"{speed}; matrix products reach {rates.matrix_efficiency:.0%} of the data sheet "
        f"({RATES.matrix_efficiency:.0%} assumed), memory {rates.memory_efficiency:.0%} "
        f"({RATES.memory_efficiency:.0%})."
    )
