"""What a run asks of its data before it starts.

The recipe and ``finetune data`` call the same two functions, so that the verb cannot promise what a run refuses.
"""

from collections.abc import Sequence

from transformers import PreTrainedConfig

from finetune.config import sections
from finetune.data import sources, streaming
from finetune.data.dataset import named_sources
from finetune.data.rows import Rows
from finetune.data.sources import Source
from finetune.models import loading as models


def problems_before_reading(model: sections.Model, data: sections.Data, train: sections.Train) -> list[str]:
    """What the configuration and a look at the file system tell, before anything is loaded."""
    held_out = named_sources(data.eval)
    return (
        models.problems(model.path, model.tokenizer, data.chat_template)
        + sources.problems(named_sources(data.train) + held_out)
        + held_out_problems(held_out)
        + (streaming.problems(data.eval, train.steps) if data.streaming else [])
    )


def problems_of_rows(
    train: Rows | None, held_out: Rows | None, data: sections.Data, model_config: PreTrainedConfig
) -> list[str]:
    """What the tokenised rows have that the model cannot take.

    Args:
        train: None where the rows of a stream are not read yet; then, as with rows at hand of data that a run would
            stream, each may have ``max_length`` tokens.
    """
    text_config = model_config.get_text_config()
    longest_known = None if data.streaming else train
    return vocabulary_problems([train, held_out], text_config.vocab_size) + position_problems(
        longest_known, held_out, data.max_length, models.most_positions(text_config)
    )


def held_out_problems(entries: Sequence[Source]) -> list[str]:
    """Weights in data.eval, where they would mean nothing: the loss is that of every held-out row."""
    return [
        f"data.eval: {entry.path} has the weight {entry.weight:g}, but held-out rows count once each; take it out."
        for entry in entries
        if entry.weight != 1
    ]


def position_problems(train: Rows | None, held_out: Rows | None, max_length: int, positions: int | None) -> list[str]:
    """Rows longer than the model knows positions; those of a stream, which is not read yet, may have ``max_length``."""
    longest = max_length if train is None else int(train.lengths.max())
    if held_out is not None:
        longest = max(longest, int(held_out.lengths.max()))
    if positions is None or longest <= positions:
        return []
    return [
        f"Rows have up to {longest:,} tokens, but the model knows {positions:,} positions; set data.max_length to "
        f"{positions} or less."
    ]


def vocabulary_problems(sources: Sequence[Rows | None], vocabulary: int) -> list[str]:
    """Tokens that the model has no embedding for."""
    largest = max((rows.summary["largest_token"] for rows in sources if rows is not None), default=0)
    if largest < vocabulary:
        return []
    return [
        f"The tokenizer gives token {largest}, but the model knows {vocabulary} tokens only; set model.tokenizer to "
        "the model's own."
    ]
