"""The settings that answer a question: for each strategy and method the fastest that fits."""

from collections.abc import Callable
from dataclasses import dataclass

from finetune.config.compatibility import Cell, bf16_weights_problems, refusal
from finetune.planner.judged_rows import Row, judged
from finetune.planner.question import Method, Question
from finetune.planner.speed import step_time
from finetune.trace.placement import placement_of, world_sizes_problem
from finetune.trace.setting import Setting

SAME_SPEED = 0.01
"""Share by which two predicted speeds may differ and mean the same: of those the smaller one is taken."""
Judge = Callable[[Question, Setting], Row]


@dataclass(frozen=True)
class Impossible:
    """An impossible combination of strategy and method, and why."""

    strategy: str
    method: Method
    why: str


def candidates(question: Question, judge: Judge = judged) -> tuple[list[Row], list[Impossible]]:
    """The rows of the answer, and what is left out of it.

    Args:
        judge: predicts one way to train.
    """
    rows, left_out = [], []
    for strategy in question.strategies:
        if len(question.strategies) > 1 and _is_pointless(strategy, question.machines.world_size):
            continue
        for method in question.methods:
            if why := why_not(question, strategy, method):
                left_out.append(Impossible(strategy, method, why))
            else:
                rows.append(fastest(question, strategy, method, judge))
    return rows, left_out


def _is_pointless(strategy: str, world_size: int) -> bool:
    """On one GPU there is nothing to split, so that only what offloads differs from a plain step."""
    placement = placement_of(strategy, world_size)
    return world_size == 1 and placement.framework != "plain" and placement.optimizer_on == "gpu"


def why_not(question: Question, strategy: str, method: Method) -> str | None:
    """Why a combination is impossible, as a sentence; None if it is possible."""
    base, published = question.base, question.shape.published_bits
    if published and method.bits != published:
        return (
            f"The model is published in {published} bits, which stay frozen; train an adapter on them, or take its "
            "16-bit version."
        )
    cell = Cell(strategy, method.bits, method.adapter, base.optimizer)
    return (
        world_sizes_problem(strategy, question.machines.world_size)
        or refusal(cell)
        or next(iter(bf16_weights_problems(cell, weights=base.weights, precision=base.precision)), None)
    )


def fastest(question: Question, strategy: str, method: Method, judge: Judge = judged) -> Row:
    """Of micro-batches and activation checkpointing the fastest that fits; else the one that needs least.

    Of ways as fast as the fastest, by ``SAME_SPEED``, the one that needs least. More rows in a micro-batch never need
    less memory, so that the largest that fits is found by bisection.
    """
    rows: dict[Setting, Row] = {}

    def row(setting: Setting) -> Row:
        if setting not in rows:
            rows[setting] = judge(question, setting)
        return rows[setting]

    speeds: dict[Setting, float] = {}
    for checkpointing in question.checkpointing:
        settings = [question.setting(strategy, method, checkpointing, n) for n in question.micro_batch_sizes]
        possible = {setting: _tokens_per_second(question, setting) for setting in settings}
        if max(possible.values()) > max(speeds.values(), default=0.0):  # else there is nothing to win
            fitting = settings[: _that_fit(settings, row)]
            speeds |= {setting: possible[setting] for setting in fitting}
    if speeds:
        enough = (1 - SAME_SPEED) * max(speeds.values())
        # the smallest micro-batch of each kind needs least of its kind
        smallest = {
            setting.activation_checkpointing: setting for setting in reversed(speeds) if speeds[setting] >= enough
        }
        return min(map(row, smallest.values()), key=lambda each: each.gpu.bytes)
    tight = [each for each in rows.values() if each.verdict == "tight"]
    if tight:
        return max(tight, key=lambda each: each.time.tokens_per_second)
    return min(rows.values(), key=lambda each: each.worst.share or 0.0)


def _that_fit(settings: list[Setting], row: Callable[[Setting], Row]) -> int:
    """How many of the settings fit, of which each needs no less than the one before."""
    if row(settings[0]).verdict != "fits":
        return 0
    low, high = 1, len(settings)
    while low < high:
        middle = (low + high + 1) // 2
        if row(settings[middle - 1]).verdict == "fits":
            low = middle
        else:
            high = middle - 1
    return low


def _tokens_per_second(question: Question, setting: Setting) -> float:
    predicted = step_time(
        question.shape, setting, question.machines, mean_document_tokens=question.mean_document_tokens
    )
    return predicted.tokens_per_second
