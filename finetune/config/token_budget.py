"""A run's length and batches in tokens, as rows and steps."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from finetune.config.recipe_classes import CorpusRun

Configuration = TypeVar("Configuration", bound=CorpusRun)


@dataclass(frozen=True)
class Stage:
    """Steps that follow one another, of as many rows each and of the same sources."""

    steps: int
    rows: int
    """Of a step, over all processes and micro-batches."""
    mix: int
    """Which sources: 0 for data.train, 1 for the first of data.stages."""


def budget_problems(cfg: CorpusRun) -> list[str]:
    """Why a budget in tokens does not make rows and steps, as sentences."""
    data, train = cfg.data, cfg.train
    ends = {
        "train.batch_warmup: until_tokens": [each.until_tokens for each in train.batch_warmup],
        "data.stages: from_tokens": [each.from_tokens for each in data.stages],
    }
    staged = [name for name, tokens in ends.items() if tokens]
    found = {
        "train.tokens and train.steps both say how long the run is; leave one of them out.": bool(
            train.tokens and train.steps
        ),
        "train.tokens and train.global_batch_tokens count tokens of full rows; set data.packing to concatenate or "
        "true.": not data.packing and bool(train.tokens or train.global_batch_tokens),
        "train.batch_warmup ends at a batch in tokens; set train.global_batch_tokens.": bool(
            train.batch_warmup and not train.global_batch_tokens
        ),
        f"data.eval {data.eval} is taken out of data.train, and data.stages may train what it took; name held-out "
        "sources.": bool(data.stages) and isinstance(data.eval, float),
        f"{' and '.join(staged)} are tokens of the run; say how long it is with train.tokens.": bool(
            staged and not train.tokens
        ),
    }
    for name in staged:
        tokens = ends[name]
        found[f"{name} {_listed(tokens)}: each must be above the one before; put them in order."] = any(
            one >= other for one, other in pairwise(tokens)
        )
        found[f"{name} {tokens[-1]:,} is not reached in train.tokens {train.tokens or 0:,}; leave it out."] = bool(
            train.tokens
        ) and tokens[-1] >= (train.tokens or 0)
    batches = {"train.global_batch_tokens": [train.global_batch_tokens or 0]}
    batches["train.batch_warmup: global_batch_tokens"] = [each.global_batch_tokens for each in train.batch_warmup]
    for name, tokens in batches.items():
        for count in tokens:
            nearest = max(1, round(count / data.max_length)) * data.max_length
            found[f"{name} {count:,} is no multiple of data.max_length {data.max_length:,}; set it to {nearest:,}."] = (
                bool(count % data.max_length)
            )
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def _listed(tokens: list[int]) -> str:
    return ", ".join(f"{count:,}" for count in tokens)


def warmup_problems(cfg: CorpusRun, world_size: int) -> list[str]:
    """Why the batches of train.batch_warmup cannot be shared among processes, as sentences."""
    if not cfg.train.batch_warmup:
        return []
    if cfg.train.micro_batch_size == "auto":
        return ["train.micro_batch_size: auto chooses for batches of one size; with train.batch_warmup set a number."]
    rows, length = cfg.train.micro_batch_size, cfg.data.max_length
    unit = rows * world_size * length
    on = f"{world_size} process{'es' if world_size > 1 else ''}"
    return [
        f"train.batch_warmup: {each.global_batch_tokens:,} tokens do not divide into micro-batches of {rows} rows of "
        f"{length:,} tokens on {on}; set it to {max(1, round(each.global_batch_tokens / unit)) * unit:,}, or change "
        "train.micro_batch_size."
        for each in cfg.train.batch_warmup
        if each.global_batch_tokens % length == 0 and each.global_batch_tokens % unit
    ]


def stages_of(cfg: CorpusRun) -> list[Stage]:
    """The stages of a run with ``train.tokens``.

    Example, of rows of 1,000 tokens: 100,000 tokens at 10,000 a step, but 4,000 a step until 21,000, and other sources
    from 50,000 on. That is 6 steps of 4 rows (24,000 tokens), 3 steps of 10 rows (to 54,000), and 5 of the other
    sources (to 104,000).
    """
    data, train, length = cfg.data, cfg.train, cfg.data.max_length
    total = train.tokens or 0
    ends = [*(each.until_tokens for each in train.batch_warmup), total]
    sizes = [*(each.global_batch_tokens // length for each in train.batch_warmup), rows_of_step(cfg)]
    starts = [0, *(each.from_tokens for each in data.stages)]
    stages, done = list[Stage](), 0
    while done < total:
        mix, size = bisect_right(starts, done) - 1, bisect_right(ends, done)
        end = min([ends[size], *starts[mix + 1 :]])
        stage = Stage(math.ceil((end - done) / (sizes[size] * length)), sizes[size], mix)
        stages, done = [*stages, stage], done + stage.steps * stage.rows * length
    return stages


def rows_of_step(cfg: CorpusRun) -> int:
    """Of the steps after the batch's warm-up."""
    tokens = cfg.train.global_batch_tokens
    return tokens // cfg.data.max_length if tokens else cfg.train.global_batch_size


def in_rows(cfg: Configuration) -> Configuration:
    """The configuration with its budget in rows and steps.

    With rows of 2,048 tokens, 1e9 tokens at 524,288 a step are 1,908 steps of 256 rows.
    """
    train = cfg.train
    steps = sum(stage.steps for stage in stages_of(cfg)) if train.tokens else train.steps
    changes = {"global_batch_size": rows_of_step(cfg), "steps": steps}
    return cfg.model_copy(update={"train": train.model_copy(update=changes)})
