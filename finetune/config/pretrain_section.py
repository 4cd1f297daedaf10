"""The keys of ``recipes/pretrain.py`` alone."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from finetune.config.key_types import NonNegativeFloat, PathText, PositiveInt
from finetune.config.sections import Data, DataSource, Section, Train


def _whole(value: Any) -> Any:
    """2e9, which YAML takes for a text, as a number; what is none is for pydantic to refuse."""
    if isinstance(value, bool):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    return int(number) if number.is_integer() else value


Tokens = Annotated[PositiveInt, BeforeValidator(_whole)]


class Pretrain(Section):
    depth_scaled: bool = False
    """With model.random_weights: the matrices that write into the residual stream start smaller by the square root of
    twice the number of layers, so that deep models begin as stably as shallow ones (GPT-2; arXiv:1909.08053)."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared logarithm of the softmax's denominator, which is added to the loss of each token and keeps
    scores from drifting: 1e-4 in PaLM (arXiv:2204.02311, section 5)."""


class Mix(Section):
    from_tokens: Tokens
    """Tokens of the run after which it begins."""
    train: PathText | Annotated[list[PathText | DataSource], Field(min_length=1)]
    """Sources, as data.train has them."""


class SmallerBatch(Section):
    until_tokens: Tokens
    """Tokens of the run at which it ends."""
    global_batch_tokens: Tokens
    """Tokens per optimizer step until then, a multiple of data.max_length."""


class Corpus(Data):
    packing: bool | Literal["concatenate"] = "concatenate"  # type: ignore[assignment]  # one choice more than others have
    """concatenate: documents lie end to end and are cut wherever a row of max_length tokens is full; what shares a row
    attends to what stands before it, of other documents too. true: pack whole documents, blind to each other."""
    stages: list[Mix] = Field(default=[])
    """Other sources from some point of the run on, in order, each with the keys from_tokens and train."""


class Budget(Train):
    tokens: Tokens | None = None
    """Tokens of the run; overrides epochs. The steps are as many as reach it."""
    global_batch_tokens: Tokens | None = None
    """Tokens per optimizer step, a multiple of data.max_length; overrides global_batch_size."""
    batch_warmup: list[SmallerBatch] = Field(default=[])
    """Smaller batches to begin with, in order, each with the keys until_tokens and global_batch_tokens."""
