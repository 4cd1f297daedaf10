"""The settings that answer a question: for each strategy and method the fastest that fits.

Where nothing of a method fits on the GPUs as it was asked for, bf16 weights and 8-bit state are tried as well.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from finetune.config.compatibility import Cell, bf16_weights_problems, reference_problems, refusal
from finetune.errors import InputError, RunStopped
from finetune.hardware.cards import Machines
from finetune.planner.changes import with_8_bit_state, with_bf16_weights
from finetune.planner.judged_rows import Row, judged
from finetune.planner.question import Method, Question
from finetune.trace.placement import placement_of, world_sizes_problem
from finetune.trace.setting import Setting

SAME_SETTING_SPEED = 0.01
"""Share by which the speeds of two settings of one strategy and method may differ and be equal. It is finer than
``preference.SAME_SPEED``, because their predictions share their errors."""
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
    possible, left_out = list[tuple[str, Method]](), list[Impossible]()
    for strategy in question.strategies:
        if len(question.strategies) > 1 and is_pointless(strategy, question.machines):
            continue
        for method in question.methods:
            if why := why_not(question, strategy, method):
                left_out.append(Impossible(strategy, method, why))
            else:
                possible.append((strategy, method))
    found = _fastest_of_each(question, possible, judge)
    rows = [each for each in found if isinstance(each, Row)]
    left_out += [each for each in found if isinstance(each, Impossible)]
    return rows + _reduced(question, rows, judge), left_out


def _fastest_of_each(
    question: Question, combinations: Sequence[tuple[str, Method]], judge: Judge
) -> list[Row | Impossible]:
    def best(strategy: str, method: Method) -> Row | Impossible:
        try:
            return fastest(question, strategy, method, judge)
        except (InputError, RunStopped) as error:  # it cannot be trained, or not be traced
            return Impossible(strategy, method, str(error))

    return question.model.together([partial(best, *each) for each in combinations])


def is_pointless(strategy: str, machines: Machines) -> bool:
    """Whether a strategy has nothing to win on these machines.

    On one GPU there is nothing to split, so that only what offloads differs from a plain step. Replicas of shards spare
    the network between machines; on one machine there is none.
    """
    placement = placement_of(strategy, machines.world_size)
    if machines.world_size == 1:
        return placement.framework != "plain" and placement.optimizer_on == "gpu"
    return machines.nodes == 1 and placement.framework == "fully_shard" and placement.replicas > 1


def _reduced(question: Question, rows: Sequence[Row], judge: Judge) -> list[Row]:
    """Rows with less exact updates that fit, for methods of which nothing fits on the GPUs as it was asked for.

    Of the mildest reduction with which something fits. An adapter's gradients and state are too small to matter.
    """
    found: list[Row] = []
    for method in question.methods:
        on_gpu = [row for row in rows if row.method == method and not row.offloads]
        if method.adapter != "none" or any(row.verdict == "fits" for row in on_gpu):
            continue
        strategies = [row.setting.strategy for row in on_gpu]
        for base in _reductions(question):
            asked = replace(question, base=base)
            possible = [(strategy, method) for strategy in strategies if why_not(asked, strategy, method) is None]
            tried = _fastest_of_each(asked, possible, judge)
            if fitting := [row for row in tried if isinstance(row, Row) and row.verdict == "fits"]:
                found += fitting
                break
    return found


def _reductions(question: Question) -> Iterator[Setting]:
    """The base with less exact updates, the mildest first: 8-bit state, bf16 weights, both; what was chosen stays."""
    base, chosen = question.base, question.chosen
    with_state = [] if "optimizer" in chosen else with_8_bit_state(base)
    yield from with_state
    if "weights" not in chosen:
        for each in (base, *with_state):
            yield from with_bf16_weights(each)


def why_not(question: Question, strategy: str, method: Method) -> str | None:
    """Why a combination is impossible, as a sentence; None if it is possible."""
    base, published = question.base, question.model.published_bits
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
        or next(iter(reference_problems(strategy, base.reference)), None)
    )


def fastest(question: Question, strategy: str, method: Method, judge: Judge = judged) -> Row:
    """Of micro-batches and activation checkpointing the fastest that fits; else the one that needs least.

    Of ways as fast as the fastest, by ``SAME_SETTING_SPEED``: without checkpointing, with the smallest micro-batch.
    More rows in a micro-batch never need less memory, so that the largest that fits is found by bisection.
    """
    rows: dict[Setting, Row] = {}

    def row(setting: Setting) -> Row:
        if setting not in rows:
            rows[setting] = judge(question, setting)
        return rows[setting]

    speeds: dict[Setting, float] = {}
    most = math.inf  # recomputing is faster only where it lets a larger micro-batch fit
    for checkpointing in question.checkpointing:
        if speeds and max(speeds.values()) >= (1 - SAME_SETTING_SPEED) * most:
            break
        settings = [question.setting(strategy, method, checkpointing, n) for n in question.micro_batch_sizes]
        question.model.prepare(settings)
        possible = {setting: _tokens_per_second(question, setting) for setting in settings}
        speeds |= {setting: possible[setting] for setting in settings[: _that_fit(settings, row)]}
        most = max(possible.values())
    if speeds:
        enough = (1 - SAME_SETTING_SPEED) * max(speeds.values())
        near = (setting for setting in speeds if speeds[setting] >= enough)
        return row(min(near, key=lambda setting: (setting.activation_checkpointing, setting.micro_batch_size)))
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
    predicted = question.model.time(setting, question.machines, mean_document_tokens=question.attended(setting))
    return predicted.tokens_per_second
