"""What a recipe that learns from a corpus refuses beside ``preflight``, and its rows."""

from transformers import PreTrainedTokenizerBase

from finetune.config.recipe_classes import CorpusRun
from finetune.config.token_budget import budget_problems
from finetune.data.batches import Batches
from finetune.data.concatenation import Concatenated
from finetune.errors import InputError
from finetune.models.spec import ModelSpec
from finetune.run.inputs import batches_of, load_rows
from finetune.training.pretraining import Measured


def corpus_problems(cfg: CorpusRun) -> list[str]:
    """What contradicts learning from a corpus, as sentences."""
    data = cfg.data
    found = {
        "data.streaming: a corpus is prepared before training; set it to false.": data.streaming,
        f"data.format {data.format}: a corpus is of texts; leave it at auto, or set it to text.": (
            data.format not in ("auto", "text")
        ),
        "eval.exact_match: a text has no answer; set it to false.": cfg.eval.exact_match,
        "pretrain.depth_scaled is about random weights; set model.random_weights to true, or leave it out.": (
            cfg.pretrain.depth_scaled and not cfg.model.random_weights
        ),
    }
    return [sentence for sentence, is_wrong in found.items() if is_wrong] + budget_problems(cfg)


def corpus_of(cfg: CorpusRun, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> tuple[Batches, Measured | None]:
    """The rows of each step, and the held-out texts.

    Raises:
        InputError: as ``load_rows``, and for rows that are no texts.
    """
    documents, held_out = load_rows(cfg.data, tokenizer, spec)
    for rows in (documents, held_out):
        if rows is not None and (others := sorted(set(rows.summary["formats"]) - {"text"})):
            raise InputError(
                f"{', '.join(rows.summary['sources'])}: rows of the format {' and '.join(others)} were found, but a "
                "corpus is of texts; give rows with the key `text`, or train on these with recipes/sft.py."
            )
    rows, data = documents, cfg.data
    if data.packing == "concatenate":
        assert documents is not None
        rows, data = Concatenated(documents, data.max_length), data.model_copy(update={"packing": False})
        if not len(rows):
            raise InputError(f"{', '.join(rows.summary['sources'])}: no row has two tokens; give more text.")
    batches = batches_of(data, cfg.train, tokenizer, spec, rows)
    assert isinstance(batches, Batches)
    return batches, None if held_out is None else Measured(held_out, tokenizer)
