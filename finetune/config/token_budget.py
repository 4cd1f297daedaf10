"""A run's length and batch in tokens, as rows and steps."""

from typing import TypeVar

from finetune.config.recipe_classes import CorpusRun

Configuration = TypeVar("Configuration", bound=CorpusRun)


def budget_problems(cfg: CorpusRun) -> list[str]:
    """Why a budget in tokens does not make rows and steps, as sentences."""
    data, train = cfg.data, cfg.train
    found = {
        "train.tokens and train.steps both say how long the run is; leave one of them out.": bool(
            train.tokens and train.steps
        ),
        "train.tokens and train.global_batch_tokens count tokens of full rows; set data.packing to concatenate or "
        "true.": (not data.packing and bool(train.tokens or train.global_batch_tokens)),
    }
    if (tokens := train.global_batch_tokens or 0) % data.max_length:
        nearest = max(1, round(tokens / data.max_length)) * data.max_length
        found[
            f"train.global_batch_tokens {tokens:,} is no multiple of data.max_length {data.max_length:,}; set it to "
            f"{nearest:,}."
        ] = True
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def in_rows(cfg: Configuration) -> Configuration:
    """The configuration with its budget in rows and steps.

    With rows of 2,048 tokens, 1e9 tokens at 524,288 a step are 1,908 steps of 256 rows.
    """
    train, length = cfg.train, cfg.data.max_length
    rows = train.global_batch_tokens // length if train.global_batch_tokens else train.global_batch_size
    steps = -(-train.tokens // (rows * length)) if train.tokens else train.steps
    return cfg.model_copy(update={"train": train.model_copy(update={"global_batch_size": rows, "steps": steps})})
