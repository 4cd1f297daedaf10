"""The rows of a run and their batches, as a configuration asks for them."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.config import sections
from finetune.data import batches, dataset, streaming
from finetune.data.encoding import Settings
from finetune.data.rows import Rows
from finetune.data.sources import named_sources
from finetune.errors import refuse_if_any
from finetune.models import loading
from finetune.models.spec import ModelSpec
from finetune.run.preflight import row_problems
from finetune.run.screen import Preparing
from finetune.start_up import is_first_process


def load_tokenizer(model: sections.Model, data: sections.Data) -> PreTrainedTokenizerBase:
    """The model's own tokenizer, or the one that is named, with the chat template that is named.

    Raises:
        InputError: if there is none, or a slow one.
    """
    path, revision = model.tokenizer_source
    return loading.load_tokenizer(
        path,
        revision=revision,
        trust_remote_code=model.trust_remote_code,
        chat_template=data.chat_template,
        adds_tokens=True,
    )


def settings_of(
    data: sections.Data, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int], *, paired: bool = False
) -> Settings:
    """How records become rows.

    Args:
        end_tokens: at which generation stops, beside the tokenizer's own.
        paired: each record has two, a chosen answer and a rejected one.
    """
    known = tokenizer.added_tokens_decoder
    return Settings(
        format=data.format,
        columns=tuple(sorted(data.columns.items())),
        train_on=data.train_on,
        max_length=data.max_length,
        split_key=data.split_key,
        too_long=data.too_long,
        train_think=data.train_think,
        on_dropped=data.on_dropped,
        turn_ends=tuple(known[token].content for token in end_tokens if token in known),
        paired=paired,
    )


def load_rows(
    data: sections.Data, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec, *, paired: bool = False
) -> tuple[Rows | None, Rows | None]:
    """The training rows (None where they are streamed), and the held-out rows where there are some.

    No process group exists yet, so that no collective waits for a tokenizer: one process prepares, the others wait for
    its files.

    Raises:
        InputError: if sources cannot be read, or the model cannot take what they hold.
    """
    train = named_sources(data.train)
    held_out = data.eval if isinstance(data.eval, float) else named_sources(data.eval)
    settings, skip = settings_of(data, tokenizer, spec.end_tokens, paired=paired), data.on_bad_row == "skip"
    with Preparing(shown=is_first_process()) as tell:
        if data.streaming:
            assert not isinstance(held_out, float)  # refused before
            rows, held = None, dataset.read_some(held_out, tokenizer, settings, skip_bad_rows=skip, tell=tell)
        else:
            rows, held = dataset.load(train, held_out, tokenizer, settings, skip_bad_rows=skip, tell=tell)
    refuse_if_any(row_problems(rows, held, data, spec))
    return rows, held


def batches_of(
    data: sections.Data,
    train: sections.Train,
    tokenizer: PreTrainedTokenizerBase,
    spec: ModelSpec,
    rows: Rows | None,
    *,
    paired: bool = False,
    stream: type[streaming.Stream] = streaming.Stream,
) -> batches.Batches | streaming.Stream:
    """Which rows are trained in which optimizer step: a function of (seed, epoch, step).

    Args:
        rows: None to read them as they are needed.
        paired: every two that follow one another are a row of the input.
        stream: how they are read then.
    """
    form: dict[str, Any] = {
        "packing": data.packing,
        "flat": spec.flat,
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.least_micro_batch_size,
        "seed": train.seed,
    }
    if rows is not None:
        length: dict[str, Any] = {"steps": train.steps, "epochs": train.epochs}
        return batches.Batches(rows, max_length=data.max_length, paired=paired, **length, **form)
    assert train.steps is not None  # refused before
    return stream(
        named_sources(data.train),
        tokenizer,
        settings_of(data, tokenizer, spec.end_tokens),
        steps=train.steps,
        vocabulary=spec.text_config.vocab_size,
        skip_bad_rows=data.on_bad_row == "skip",
        **form,
    )
