"""What two real steps, of two lengths of rows, change in a prediction. Arithmetic alone: ``trace.probe`` measures.

Memory: what was measured over what was predicted is taken to lie on a straight line over the tokens of a micro-batch.
Where the prediction itself is a straight line, so is the corrected one, through both measurements; where another phase
of the step holds the peak at the length that is asked about, the prediction keeps its bend.
Time: two steps determine two factors at most, one of all that is computed at the card's FLOP/s and one of all that is
moved at its memory bandwidth; only one of both together where the two steps do not tell them apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune.errors import InputError
from finetune.hardware.cards import Machines
from finetune.planner.judged_rows import verdict
from finetune.planner.peak_memory import FRAGMENTATION, needed_bytes, step_memory
from finetune.planner.rates import RATES, Rates
from finetune.planner.shape import ModelShape
from finetune.planner.speed import Parts, step_time
from finetune.trace.probe import Probed
from finetune.trace.setting import Setting
from finetune.units import GIB

LEAST_ROW_TOKENS = 64
ROOM = 0.85
"""Share of the GPU's memory that a probe may need by the prediction that it is there to check."""
APART = 0.1
"""How different the two steps must be made up for two factors: below it, an error of 1 % in a measured time makes one
of more than 10 % in a factor."""
MOST_WAITING = 0.1
"""Share of a step that may be spent on waiting for the host; of more, nothing follows for the card."""
LEAST_EFFICIENCY, MOST_EFFICIENCY = 0.05, 1.0


@dataclass(frozen=True)
class MemoryLine:
    """Measured less predicted peak, as a straight line over the tokens of a micro-batch."""

    bytes_per_token: float
    constant_bytes: float

    @classmethod
    def through(cls, first: tuple[int, float], second: tuple[int, float]) -> "MemoryLine":
        """The line through two points: tokens, and bytes."""
        (x, y), (other_x, other_y) = first, second
        slope = (other_y - y) / (other_x - x)
        return cls(slope, y - slope * x)

    def at(self, tokens: int) -> float:
        """Bytes at so many tokens."""
        return self.constant_bytes + self.bytes_per_token * tokens


@dataclass(frozen=True)
class FittedRates:
    """The rates with what was fitted of them."""

    rates: Rates
    fitted: tuple[str, ...]
    """Names of the fields that were determined apart; of both together where it is "all"; none where it is empty."""


@dataclass(frozen=True)
class Calibration:
    """What a probe says of a setting."""

    probed: tuple[Probed, Probed]
    predicted: tuple[Probed, Probed]
    """The same steps by the formulas."""
    asked: Probed
    """The setting that is asked about, by the formulas."""
    corrected: Probed
    """The same, as the probe corrects it."""
    rates: FittedRates
    needed_bytes: int
    """With what a GPU needs beside the corrected peak."""
    there_bytes: int
    knows_speed: bool
    """Whether the card's data sheet is known; else seconds are those of another card, and mean nothing."""

    @property
    def verdict(self) -> str:
        return verdict(self.needed_bytes, self.there_bytes)

    @property
    def measured_line(self) -> MemoryLine:
        """The measured peak itself over the tokens."""
        return _line(self.probed)

    @property
    def predicted_line(self) -> MemoryLine:
        return _line(self.predicted)


def probe_settings(shape: ModelShape, setting: Setting, memory_bytes: float) -> tuple[Setting, Setting]:
    """The two steps to take, with rows of the length that is asked about if they leave room, and half of it.

    Raises:
        InputError: if not even short rows fit by the prediction.
    """
    alike = replace(setting, accumulation=min(setting.accumulation, 2))
    long = alike
    while needed_bytes(step_memory(shape, long), long) > ROOM * memory_bytes:
        long = replace(long, row_tokens=long.row_tokens // 2)
        if long.row_tokens < LEAST_ROW_TOKENS:
            break
    if long.row_tokens < LEAST_ROW_TOKENS:
        raise InputError(
            f"By the prediction, not even rows of {LEAST_ROW_TOKENS} tokens fit this GPU, so there is "
            "nothing to probe; use a smaller model, or --method qlora."
        )
    return replace(long, row_tokens=long.row_tokens // 2), long


def predicted_step(
    shape: ModelShape, setting: Setting, machines: Machines, *, mean_document_tokens: float, rates: Rates = RATES
) -> Probed:
    """A step by the formulas."""
    time = step_time(shape, setting, machines, mean_document_tokens=mean_document_tokens, rates=rates)
    return Probed(setting.tokens, step_memory(shape, setting).peak, time.step_seconds)


def calibrate(
    shape: ModelShape,
    setting: Setting,
    machines: Machines,
    *,
    mean_document_tokens: float,
    settings: tuple[Setting, Setting],
    probed: tuple[Probed, Probed],
) -> Calibration:
    """Correct the prediction for a setting by two real steps.

    Args:
        settings: of the two steps, in which each row was one document.
        probed: what was measured of them.
    """
    times = [step_time(shape, each, machines, mean_document_tokens=each.row_tokens) for each in settings]
    predicted = tuple(
        Probed(each.tokens, step_memory(shape, each).peak, time.step_seconds) for each, time in zip(settings, times)
    )
    assert len(predicted) == 2
    fitted = fit_rates([time.parts for time in times], [each.step_seconds for each in probed])
    asked = predicted_step(shape, setting, machines, mean_document_tokens=mean_document_tokens)
    again = predicted_step(shape, setting, machines, mean_document_tokens=mean_document_tokens, rates=fitted.rates)
    more = error_line(predicted, probed).at(setting.tokens)
    corrected = replace(again, peak_bytes=round(asked.peak_bytes + more))
    return Calibration(
        probed=probed,
        predicted=predicted,
        asked=asked,
        corrected=corrected,
        rates=fitted,
        needed_bytes=needed_bytes(step_memory(shape, setting), setting) + round(more * (1 + FRAGMENTATION)),
        there_bytes=int(machines.gpu.memory_gib * GIB),
        knows_speed=times[0].stand_in is None,
    )


def error_line(predicted: Sequence[Probed], probed: Sequence[Probed]) -> MemoryLine:
    """Measured less predicted peak over the tokens, through both steps."""
    first, second = (
        (each.tokens, float(each.peak_bytes - formula.peak_bytes)) for each, formula in zip(probed, predicted)
    )
    return MemoryLine.through(first, second)


def _line(steps: tuple[Probed, Probed]) -> MemoryLine:
    first, second = ((each.tokens, float(each.peak_bytes)) for each in steps)
    return MemoryLine.through(first, second)


def fit_rates(parts: Sequence[Parts], seconds: Sequence[float], rates: Rates = RATES) -> FittedRates:
    """Determine the efficiencies that two steps determine.

    Args:
        parts: seconds of each step by the formulas with ``rates``.
        seconds: that each took.
    """
    if any(each.launches > MOST_WAITING * each.seconds for each in parts):
        return FittedRates(rates, ())
    computing = [each.matrix_products + each.attention for each in parts]
    moving = [each.elementwise + each.weights + each.loss + each.optimizer for each in parts]
    left = [time - each.seconds + c + m for time, each, c, m in zip(seconds, parts, computing, moving)]
    across, down = computing[0] * moving[1], computing[1] * moving[0]
    if across != down and _tells_apart([each.matrix_products for each in parts], moving):
        slower_computing = (left[0] * moving[1] - left[1] * moving[0]) / (across - down)
        slower_moving = (computing[0] * left[1] - computing[1] * left[0]) / (across - down)
        if slower_computing > 0 and slower_moving > 0:
            apart = slowed(rates, computing=slower_computing, moving=slower_moving)
            if all(
                LEAST_EFFICIENCY < efficiency <= MOST_EFFICIENCY
                for efficiency in (apart.matrix_efficiency, apart.memory_efficiency)
            ):
                return FittedRates(apart, ("matrix_efficiency", "memory_efficiency"))
    both = [c + m for c, m in zip(computing, moving)]
    slower = sum(time * each for time, each in zip(left, both)) / sum(each**2 for each in both)
    return FittedRates(slowed(rates, computing=slower, moving=slower), ("all",))


def _tells_apart(products: Sequence[float], moving: Sequence[float]) -> bool:
    """Whether two steps are made up differently, attention apart, whose own efficiency is a guess too."""
    across, down = products[0] * moving[1], products[1] * moving[0]
    return abs(across - down) > APART * max(across, down)


def slowed(rates: Rates, *, computing: float, moving: float) -> Rates:
    """The rates of a card that takes so many times as long."""
    return replace(
        rates,
        matrix_efficiency=rates.matrix_efficiency / computing,
        attention_efficiency=rates.attention_efficiency / computing,
        attention_most_tflops=rates.attention_most_tflops / computing,
        memory_efficiency=rates.memory_efficiency / moving,
    )
