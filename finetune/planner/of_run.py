"""The plan of a starting run: what it needs, the settings left to the planner, and a comparison at the end."""

from dataclasses import dataclass, replace
from typing import Any

from finetune import __version__
from finetune.config.strategy_names import STRATEGIES
from finetune.errors import InputError
from finetune.hardware.cards import Machines
from finetune.planner.candidates import fastest
from finetune.planner.judged_rows import Row
from finetune.planner.memory import StepMemory
from finetune.planner.model import Model
from finetune.planner.nearest import nearest_that_fits
from finetune.planner.question import Question, question_about
from finetune.trace.setting import Setting
from finetune.units import GIB, MIB, size_text

MOST_PARTS = 4
"""That are named in the run's output."""


@dataclass(frozen=True)
class RunPlan:
    """What a run will take."""

    setting: Setting
    memory: StepMemory
    checkpoint_bytes: int
    question: Question | None = None
    """None in a rehearsal without a GPU, as is the judgement."""
    row: Row | None = None

    def describe(self) -> list[str]:
        """Three lines for the run's output, of about a hundred columns."""
        rows, kept = self.setting.micro_batch_size, self.setting.activations
        micro_batch = f"micro-batch {rows} x {self.setting.row_tokens:,} tokens, {kept}"
        micro_batch += ", assuming balanced routers" if self.setting.experts > 1 else ""
        checkpoint = f"checkpoint {size_text(self.checkpoint_bytes)}"
        if self.question is None or self.row is None:
            return [
                self._parts(),
                f"plan: {micro_batch}",
                f"plan: {checkpoint}; run finetune plan to see which GPUs it fits",
            ]
        need, time = self.row.gpu, self.row.time
        assert need.there is not None
        speed = "" if time.stand_in else f"{time.tokens_per_second:,.0f} tokens/s, MFU {time.mfu:.0%}; "
        return [
            self._parts(),
            f"plan: {size_text(need.bytes)} with CUDA context and fragmentation, of {size_text(need.there)} on "
            "each GPU "
            f"({self.question.machines.text}): {self.row.verdict}",
            f"plan: {speed}{micro_batch}; {checkpoint}",
        ]

    def _parts(self) -> str:
        """The peak as a line, with the largest of its parts."""
        parts = sorted(self.memory.parts.items(), key=lambda part: -part[1])
        unit, digits = (GIB, 1) if self.memory.peak >= GIB else (MIB, 0)
        named = dict(parts[:MOST_PARTS]) | {"other": sum(size for _, size in parts[MOST_PARTS:])}
        texts = [f"{name} {size / unit:.{digits}f}" for name, size in named.items() if round(size / unit, digits) > 0]
        peak = ", ".join(texts).replace("loss", "logits and loss")
        return f"plan: peak {size_text(self.memory.peak)}: {peak}"

    def problems(self) -> list[str]:
        """Why the run cannot fit, with the nearest one that does, as a sentence.

        Only the peak counts: what is needed beside it is an estimate, which the memory check before the first step
        verifies.
        """
        if self.question is None or self.row is None:
            return []
        need = self.row.gpu
        assert need.there is not None
        if self.memory.peak <= need.there:
            return []
        nearest = nearest_that_fits(self.question, self.setting)
        what = "No change of the settings makes it fit."
        if nearest:
            what = " ".join([f"To fit, {nearest.text}.", *nearest.given_up])
        return [
            f"This run would need {size_text(self.memory.peak)} at its peak on each GPU, which has "
            f"{size_text(need.there)}. {what} "
            "(Use --train.plan_check off to start it anyway.)"
        ]

    def record(self) -> dict[str, Any]:
        """For run.yaml."""
        predicted: dict[str, Any] = {
            "peak_memory_gib": round(self.memory.peak / GIB, 4),
            "parts_gib": {name: round(size / GIB, 4) for name, size in self.memory.parts.items()},
            "formulas": __version__,
        }
        if self.row is not None and not self.row.time.stand_in:
            predicted |= {
                "tokens_per_second": round(self.row.time.tokens_per_second),
                "mfu": round(self.row.time.mfu, 4),
            }
        return predicted

    def compare(self, *, peak_memory_gib: float | None, tokens_per_second: float | None) -> list[str]:
        """Predicted and measured values, as lines; values that were not measured are left out."""
        predicted, lines = self.record(), []
        if peak_memory_gib:
            gib = predicted["peak_memory_gib"]
            off = gib / peak_memory_gib - 1
            lines.append(f"peak memory: {peak_memory_gib:.2f} GiB, predicted {gib:.2f} ({off:+.1%})")
        if tokens_per_second and "tokens_per_second" in predicted:
            speed = predicted["tokens_per_second"]
            off = speed / tokens_per_second - 1
            lines.append(f"speed: {tokens_per_second:,.0f} tokens/s, predicted {speed:,} ({off:+.0%})")
        return lines


def plan_run(
    model: Model,
    setting: Setting,
    *,
    machines: Machines | None,
    global_batch_size: int,
    mean_row_tokens: float,
    mean_document_tokens: float,
    micro_batch_size: int | None,
    activation_checkpointing: bool | None,
    attended_tokens: float | None = None,
) -> RunPlan:
    """Plan a run, and choose what is left open: the fastest that fits.

    Memory is that of the longest row, time that of a mean one. Without a GPU nothing is there to choose by: one row at
    a time, activations kept.

    Args:
        setting: all that is given; ``row_tokens`` of the longest row.
        machines: the GPUs of the run; None in a rehearsal.
        mean_row_tokens: positions of a row, padding included.
        mean_document_tokens: of a document.
        micro_batch_size: None to choose it.
        activation_checkpointing: None to choose it.
        attended_tokens: of the document of a token, on average over tokens; None where documents are of equal length.

    Raises:
        InputError: if the run cannot be traced.
        RunStopped: if the libraries here cannot be traced.
    """
    if setting.strategy not in STRATEGIES:  # but one that a launch file of the user's own asks for
        raise InputError(
            f"The planner does not know {setting.strategy} yet; set train.activation_checkpointing yourself, "
            "since auto keeps all activations then."
        )
    rows = micro_batch_size or 1
    setting = replace(
        setting,
        micro_batch_size=rows,
        activation_checkpointing=bool(activation_checkpointing),
        accumulation=global_batch_size // (rows * setting.data_processes),
        flash=machines is None or machines.gpu.has_flash_attention,
    )
    if machines is None:
        return RunPlan(setting, model.memory(setting), model.checkpoint_bytes(setting))
    question = replace(
        question_about(model, setting, machines, mean_document_tokens=mean_document_tokens),
        attended_tokens=attended_tokens,
        micro_batch_size=micro_batch_size,
        checkpointing=(False, True) if activation_checkpointing is None else (activation_checkpointing,),
    )
    row = fastest(question, setting)
    mean = replace(row.setting, row_tokens=max(1, min(setting.row_tokens, round(mean_row_tokens))))
    time = model.time(mean, machines, mean_document_tokens=question.attended(mean))
    checkpoint = model.checkpoint_bytes(row.setting)
    return RunPlan(row.setting, row.memory, checkpoint, question, replace(row, time=time))
