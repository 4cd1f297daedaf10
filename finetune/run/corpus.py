"""What a recipe that learns from a corpus refuses beside ``preflight``, and its rows."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.config.recipe_classes import CorpusRun
from finetune.config.token_budget import budget_problems, stages_of, warmup_problems
from finetune.data import dataset
from finetune.data.batches import Batches
from finetune.data.concatenation import Concatenated
from finetune.data.rows import Rows
from finetune.data.sources import named_sources
from finetune.data.stages import Staged
from finetune.data.streaming import Stream
from finetune.data.text_stream import ConcatenatedStream, StagedStream
from finetune.errors import InputError, refuse_if_any
from finetune.models.spec import ModelSpec
from finetune.run.inputs import batches_of, load_rows, settings_of
from finetune.run.preflight import row_problems
from finetune.training.pretraining import Measured


def corpus_problems(cfg: CorpusRun, world_size: int) -> list[str]:
    """What contradicts learning from a corpus, as sentences."""
    data = cfg.data
    found = {
        f"data.format {data.format}: pretraining takes plain text only; leave it at auto, or set it to text.": (
            data.format not in ("auto", "text")
        ),
        "eval.exact_match: a text has no answer; set it to false.": cfg.eval.exact_match,
        "pretrain.depth_scaled is about random weights; set model.random_weights to true, or leave it out.": (
            cfg.pretrain.depth_scaled and not cfg.model.random_weights
        ),
    }
    problems = [sentence for sentence, is_wrong in found.items() if is_wrong]
    return problems + budget_problems(cfg) + warmup_problems(cfg, world_size)


def corpus_of(
    cfg: CorpusRun, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec
) -> tuple[Batches | Stream, Measured | None]:
    """The rows of each step, and the held-out texts.

    Args:
        cfg: with its budget in rows.

    Raises:
        InputError: as ``load_rows``, and for rows that are no texts.
    """
    data = cfg.data
    if data.streaming:  # what is no text is a bad row: it is seen when it is read
        data = data.model_copy(update={"format": "text"})
    documents, held_out = load_rows(data, tokenizer, spec)
    later = [data.model_copy(update={"train": each.train, "eval": None}) for each in data.stages]
    mixes = [(data, documents), *((each, load_rows(each, tokenizer, spec)[0]) for each in later)]
    refuse_if_any(text_problems(*(rows for _, rows in mixes), held_out))

    def batches(mix: int, steps: int | None, rows_of_step: int) -> Any:
        (data, rows), stream = mixes[mix], Stream
        if data.packing == "concatenate":
            data, stream = data.model_copy(update={"packing": False}), ConcatenatedStream
            rows = None if rows is None else Concatenated(rows, data.max_length)
            if rows is not None and not len(rows):
                raise InputError(f"{', '.join(rows.summary['sources'])}: no row has two tokens; give more text.")
        train = cfg.train.model_copy(update={"steps": steps, "global_batch_size": rows_of_step})
        return batches_of(data, train, tokenizer, spec, rows, stream=stream)

    if cfg.data.stages or cfg.train.batch_warmup:
        found = (StagedStream if data.streaming else Staged)(stages_of(cfg), batches)
    else:
        found = batches(0, cfg.train.steps, cfg.train.global_batch_size)
    return found, None if held_out is None else Measured(held_out, tokenizer)


def text_problems(*read: Rows | None) -> list[str]:
    """Which rows are no texts, as sentences."""
    found = []
    for rows in read:
        if rows is not None and (others := sorted(set(rows.summary["formats"]) - {"text"})):
            found.append(
                f"{', '.join(rows.summary['sources'])}: rows of the format {' and '.join(others)} were found, but a "
                "corpus is of texts; give rows with the key `text`, or train on these with recipes/sft.py."
            )
    return found


def stage_problems(cfg: CorpusRun, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> list[str]:
    """Why a run would refuse the sources of ``data.stages``, as sentences."""
    settings, skip = settings_of(cfg.data, tokenizer, spec.end_tokens), cfg.data.on_bad_row == "skip"
    found = []
    for number, stage in enumerate(cfg.data.stages, start=1):
        try:
            rows = dataset.read_rows(named_sources(stage.train), tokenizer, settings, skip_bad_rows=skip)
            refuse_if_any(row_problems(rows, None, cfg.data, spec) + text_problems(rows))
        except InputError as error:
            found += [f"data.stages {number}: {problem}" for problem in error.problems]
    return found
