"""The settings that answer a question: for each strategy and method the fastest that fits.

Where nothing of a method fits on the GPUs as it was asked for, bf16 weights and 8-bit state are tried as well.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from finetune.config.refusals import batch_problems
from finetune.config.strategy_names import IN_PARTS, SHARDED_PARTS, SIZES, STAGES, TOGETHER, sharded_as
from finetune.errors import InputError, RunStopped
from finetune.hardware.cards import Machines
from finetune.planner.changes import (
    LONG_ROW_TOKENS,
    PLAIN_1F1B,
    with_8_bit_state,
    with_bf16_weights,
    with_offloaded_activations,
)
from finetune.planner.judged_rows import Row, gpu_need, judged
from finetune.planner.possible import why_not
from finetune.planner.question import Question
from finetune.trace.placement import SPLITS, placement_of, world_sizes_problem
from finetune.trace.setting import APART, Method, Setting

SAME_SETTING_SPEED = 0.01
"""Share by which the speeds of two settings of one strategy and method may differ and be equal. It is finer than
``preference.SAME_SPEED``, because their predictions share their errors."""
SPLIT_STAGES = tuple(name for name in IN_PARTS if len(SIZES[name]) > 1)
"""Strategies of pipelines whose layers are split."""
Judge = Callable[[Question, Setting], Row]


@dataclass(frozen=True)
class Impossible:
    """An impossible combination of strategy and method, and why."""

    strategy: str
    method: Method
    why: str
    is_untraced: bool = False
    """Its step could not be traced; a run may do well all the same."""


def candidates(question: Question, judge: Judge = judged) -> tuple[list[Row], list[Impossible]]:
    """The rows of the answer, and what is left out of it.

    Args:
        judge: predicts one way to train.
    """
    rows, left_out = list[Row](), list[Impossible]()

    def compare(bases: Iterable[Setting]) -> None:
        possible = list[Setting]()
        for base in bases:
            if why := why_not(question.model, base) or _too_few_rows(question, base):
                left_out.append(Impossible(base.strategy, base.method, why))
            else:
                possible.append(base)
        for base, found in zip(possible, _fastest_of_each(question, possible, judge), strict=True):
            if isinstance(found, Row):
                rows.append(found)
            else:
                untraced = isinstance(found, RunStopped)
                left_out.append(Impossible(base.strategy, base.method, str(found), untraced))

    compare(_bases(question))
    compare(_with_split_stages(question, rows))
    compare(_with_sharded_parts(question, rows))
    compare(_with_split_layers(question, rows))
    return rows + _reduced(question, rows, judge), left_out


def _bases(question: Question) -> Iterator[Setting]:
    """Strategies with all their sizes, and methods; where several are compared, without those that have nothing to
    win, and without those that are for what does not fit otherwise."""
    machines, last_resorts = question.machines, (*SPLIT_STAGES, *SHARDED_PARTS)
    for strategy in question.strategies:
        if len(question.strategies) > 1 and (
            strategy in last_resorts or is_pointless(strategy, machines, question.base.row_tokens)
        ):
            continue
        yield from _with_all_sizes(question, strategy)


def _with_all_sizes(question: Question, strategy: str) -> Iterator[Setting]:
    """A strategy with all its sizes, and methods."""
    for method in question.methods:
        for sizes in splits(strategy, question.machines, question.model.anatomy.layers):
            how: dict[str, Any] = {"strategy": strategy, **sizes, **({} if "stages" in sizes else PLAIN_1F1B)}
            yield replace(question.base, adapter=method.adapter, bits=method.bits, **how)


def _with_split_stages(question: Question, rows: Sequence[Row]) -> list[Setting]:
    """Of several machines, pipelines of split layers where neither so many GPUs for each layer nor so many stages fit
    by themselves. No machine has parts of two stages."""
    machines = question.machines

    def could_win(setting: Setting) -> bool:
        alone = [
            row
            for row in rows
            if row.setting.method == setting.method
            and any(getattr(row.setting, size.field) == number for size, number in setting.sizes.items())
        ]
        return machines.nodes % setting.stages == 0 and all(
            row.verdict != "fits" and _could_fit(row, shards=setting.size // row.setting.size) for row in alone
        )

    strategies = question.strategies if machines.nodes > 1 and len(question.strategies) > 1 else ()
    compared = [each for name in SPLIT_STAGES if name in strategies for each in _with_all_sizes(question, name)]
    return [each for each in compared if could_win(each)]


def _with_sharded_parts(question: Question, rows: Sequence[Row]) -> list[Setting]:
    """Of several machines, shards of the parts that do not fit: inside one, shards of the whole model need as little.
    No machine has parts of two stages."""
    machines = question.machines

    def could_win(row: Row) -> bool:
        setting = row.setting
        return (
            machines.nodes > 1
            and row.verdict != "fits"
            and sharded_as(setting.strategy) in question.strategies
            and setting.data_processes > 1
            and machines.nodes % setting.stages == 0
            and _could_fit(row, shards=setting.data_processes)
        )

    unlike = {"pipeline_schedule": "1f1b"}  # under which alone a stage's gradients are added up before they are freed
    launches = {
        row.setting: _launch(row.setting) | {"strategy": sharded_as(row.setting.strategy), **unlike}
        for row in rows
        if could_win(row)
    }
    return [replace(question.base, **launch, **setting.method._asdict()) for setting, launch in launches.items()]


def _with_split_layers(question: Question, rows: Sequence[Row]) -> list[Setting]:
    """Of long rows, split layers of GPUs that compute each row together, where neither fits by itself, however many
    GPUs there are for it."""
    is_compared = "cp_tp" in question.strategies and len(question.strategies) > 1

    def could_win(setting: Setting) -> bool:
        alone = [
            row
            for row in rows
            if row.setting.method == setting.method and max(row.setting.context, row.setting.tensor) > 1
        ]
        as_sharded = [row for row in alone if row.setting.strategy == "cp"]
        return setting.size > 1 and all(row.verdict != "fits" for row in alone) and all(map(_could_fit, as_sharded))

    if not is_compared or question.base.row_tokens < LONG_ROW_TOKENS:
        return []
    return [each for each in _with_all_sizes(question, "cp_tp") if could_win(each)]


def _too_few_rows(question: Question, base: Setting) -> str | None:
    rows, micro_batch_size = question.global_batch_size, question.micro_batch_size or 1
    return next(iter(batch_problems(rows, micro_batch_size, base.data_processes)), None)


def splits(strategy: str, machines: Machines, layers: int) -> list[dict[str, Any]]:
    """The sizes that a strategy leaves open: GPUs that share each row, each layer or its experts, inside a machine, and
    the stages of a pipeline. Where it leaves none open, or these GPUs have none, one choice of nothing.

    Args:
        layers: of the model.
    """
    sizes, world_size = SIZES.get(strategy, ()), machines.world_size
    inside = machines.gpus_per_node if machines.gpus_per_node > 1 else world_size
    stages, split = range(2, min(world_size, layers) + 1), [number for number in SPLITS if number <= inside]
    every = [dict(zip(sizes, each)) for each in product(*(stages if size == STAGES else split for size in sizes))]
    possible = [each for each in every if world_sizes_problem(strategy, world_size, each) is None]
    return [{size.field: number for size, number in each.items()} for each in possible] or [{}]


def is_pointless(strategy: str, machines: Machines, row_tokens: int = 0) -> bool:
    """Whether a strategy has nothing to win on these machines.

    On one GPU there is nothing to split, so that only what offloads differs from a plain step. Replicas of shards spare
    the network between machines; on one machine there is none.

    Where several GPUs compute a row together, they send one another what a whole row needs: for long ones.
    """
    if strategy in TOGETHER:
        return strategy != "cp" or row_tokens < LONG_ROW_TOKENS or machines.world_size == 1
    placement = placement_of(strategy, machines.world_size)
    if machines.world_size == 1:
        return placement.framework != "plain" and placement.optimizer_on == "gpu"
    return machines.nodes == 1 and placement.framework == "fully_shard" and placement.replicas > 1


def _reduced(question: Question, rows: Sequence[Row], judge: Judge) -> list[Row]:
    """Rows with less exact updates that fit, for methods of which nothing fits on the GPUs as it was asked for.

    Of the mildest reduction with which something fits, and, where that keeps activations in host memory, of the mildest
    with which something fits without. An adapter's gradients and state are too small to matter.
    """
    found: list[Row] = []
    for method in question.methods:
        on_gpu = [row for row in rows if row.setting.method == method and row.setting.placement.optimizer_on == "gpu"]
        if method.adapter != "none" or any(row.verdict == "fits" and not row.offloads for row in on_gpu):
            continue
        on_gpu = [row for row in on_gpu if _could_fit(row)]
        for base in _reductions(question):
            changed = [replace(base, **_launch(row.setting), adapter="none", bits=None) for row in on_gpu]
            possible = [each for each in changed if why_not(question.model, each) is None]
            tried = _fastest_of_each(question, possible, judge)
            fitting = [row for row in tried if isinstance(row, Row) and row.verdict == "fits"]
            on_the_gpus = [row for row in fitting if not row.offloads]
            is_first = all(row.setting.method != method for row in found)
            found += fitting if is_first else on_the_gpus
            if on_the_gpus:
                break
    return found


def _launch(setting: Setting) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in ("strategy", *PLAIN_1F1B, *APART)}


def _could_fit(row: Row, *, shards: int = 1) -> bool:
    """Whether its GPU, or so many together, hold half of the weights and gradients: no reduction leaves less of them,
    so that what is larger need not be traced."""
    parts = row.memory.parts
    return (parts["weights"] + parts["gradients"]) / 2 <= shards * (row.gpu.there or 0)


def _reductions(question: Question) -> Iterator[Setting]:
    """The base with less exact updates, the mildest first: 8-bit state, bf16 weights, both; what was chosen stays."""
    base, chosen = question.base, question.chosen
    with_state = [] if "optimizer" in chosen else with_8_bit_state(base)
    yield from with_state
    if "weights" not in chosen:
        for each in (base, *with_state):
            yield from with_bf16_weights(each)


def fastest(question: Question, base: Setting, judge: Judge = judged) -> Row:
    """Of micro-batches and activation checkpointing the fastest that fits; else the one that needs least.

    Of ways as fast as the fastest, by ``SAME_SETTING_SPEED``: without checkpointing, with the smallest micro-batch.
    More rows in a micro-batch never need less memory, so that the largest that fits is found by bisection.

    Raises:
        InputError, RunStopped: if it cannot be trained, or not be traced.
    """
    (found,) = _fastest_of_each(question, [base], judge)
    if not isinstance(found, Row):
        raise found
    return found


def _fastest_of_each(question: Question, bases: Sequence[Setting], judge: Judge) -> list[Row | InputError | RunStopped]:
    """Searches side by side: what all of them wait for is traced together, in one or two rounds."""
    found: dict[int, Row | InputError | RunStopped] = {}
    searches = {number: _search(question, base, judge) for number, base in enumerate(bases)}
    while len(found) < len(bases):
        wanted = list[Setting]()
        for number, search in searches.items():
            if number in found:
                continue
            try:
                wanted += next(search)
            except StopIteration as end:
                found[number] = end.value
            except (InputError, RunStopped) as error:
                found[number] = error
        question.model.tracer.prepare(wanted)
    return [found[number] for number in searches]


def _search(question: Question, base: Setting, judge: Judge) -> Generator[list[Setting], None, Row]:
    """The search of ``fastest``, which gives settings that must be traced before it goes on."""
    rows: dict[Setting, Row] = {}

    def row(setting: Setting) -> Row:
        if setting not in rows:
            rows[setting] = judge(question, setting)
        return rows[setting]

    speeds: dict[Setting, float] = {}
    most = math.inf  # recomputing is faster only where it lets a larger micro-batch fit
    ways = [question.ways(base, checkpointing=checkpointing) for checkpointing in question.checkpointing]
    if len(ways) > 1:
        ways.append([each for setting in ways[-1] for each in with_offloaded_activations(setting)])
    for settings in filter(None, ways):
        offloads = settings[0].offloads_activations and not base.offloads_activations  # where nothing else fits
        if speeds and (offloads or max(speeds.values()) >= (1 - SAME_SETTING_SPEED) * most):
            break
        yield settings
        possible = {setting: _tokens_per_second(question, setting) for setting in settings}
        if row(settings[0]).verdict == "fits":
            fitting = bisect_left(settings, True, key=lambda setting: row(setting).verdict != "fits")
            speeds |= {setting: possible[setting] for setting in settings[:fitting]}
        most = max(possible.values())
    if len(question.checkpointing) > 1 and base.stages == 1:
        recomputing = [setting for setting in speeds if setting.recomputes == "full"]
        partly = [each for each in map(partial(_partly, question), recomputing) if row(each).verdict == "fits"]
        speeds |= {setting: _tokens_per_second(question, setting) for setting in partly}
    if speeds:
        enough = (1 - SAME_SETTING_SPEED) * max(speeds.values())
        near = (setting for setting in speeds if speeds[setting] >= enough)
        return row(min(near, key=_simplicity))
    tight = [each for each in rows.values() if each.verdict == "tight"]
    if tight:
        return max(tight, key=lambda each: each.time.tokens_per_second)
    return min(rows.values(), key=lambda each: each.worst.share or 0.0)


def _partly(question: Question, setting: Setting) -> Setting:
    """With as few recomputed layers as fit the GPU, of a setting that recomputes all."""
    fewer = [replace(setting, recomputed_layers=number) for number in range(1, question.model.anatomy.layers)]
    place = bisect_left(fewer, True, key=lambda each: gpu_need(question, each).verdict == "fits")
    return [*fewer, setting][place]


def _simplicity(setting: Setting) -> tuple[bool, int]:
    return setting.activation_checkpointing, setting.micro_batch_size


def _tokens_per_second(question: Question, setting: Setting) -> float:
    predicted = question.model.time(setting, question.machines, mean_document_tokens=question.attended(setting))
    return predicted.tokens_per_second
