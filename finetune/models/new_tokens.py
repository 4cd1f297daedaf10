"""Special tokens of a named chat template that a tokenizer lacked, and the rows of embedding and head that are theirs.

Example: a tokenizer of 32,000 tokens, and a model of 32,000 rows. ``chatml`` adds <|im_start|> and <|im_end|>, whose
ids are 32,000 and 32,001: both rows are trained, and 64 are added, since a GPU multiplies fast by a head whose rows are
a multiple of 64. A model that was padded to 32,064 rows has them already: none is added, and rows 32,000 and 32,001 are
trained. They begin as the mean of the rows before them (Hewitt, "Initializing New Word Embeddings for Pretrained
Language Models", 2021), without noise: every process has the same. Added rows of no token are that mean too, and an
adapter leaves them there. Their score is the mean of all scores: 62 of 32,064 have 0.2 % of the probability at most.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.config import sections
from finetune.data import named_templates
from finetune.models import loading

MULTIPLE = 64
"""Of which the rows of a vocabulary that grows are one."""
ROWS_AT_ONCE = 4096
"""That are summed in fp64."""


@dataclass(frozen=True)
class NewTokens:
    """Rows of a model's vocabulary that training begins with; false where there are none."""

    names: tuple[str, ...] = ()
    first: int = 0
    """Of the rows; no token before it is new."""
    last: int = -1
    stored_rows: int = 0
    """That the model has in its files."""
    grown_rows: int | None = None
    """Of a vocabulary that has grown before, which keeps its size; None for the next multiple of ``MULTIPLE``."""

    def __bool__(self) -> bool:
        return self.last >= self.first

    @property
    def rows(self) -> Sequence[int]:
        """Those that are trained, which follow one another."""
        return range(self.first, self.last + 1)

    @property
    def adds_rows(self) -> bool:
        """Whether the model in its files has no place for them."""
        return self.last >= self.stored_rows

    @property
    def all_rows(self) -> int:
        """Of the model that has them: its vocabulary."""
        if not self.adds_rows:
            return self.stored_rows
        if self.grown_rows is not None and self.grown_rows > self.last:
            return self.grown_rows
        return MULTIPLE * -(-(self.last + 1) // MULTIPLE)

    def grown(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """A configuration of the model that has the rows, given that of its files."""
        return with_vocabulary(config, self.all_rows) if self.adds_rows else config

    def as_stored(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The configuration of the files, given that of the model that has the rows."""
        return with_vocabulary(config, self.stored_rows) if self.adds_rows else config

    def describe(self) -> list[str]:
        """A line for the run's output."""
        names = ", ".join(self.names)
        rows = f"; the vocabulary grows to {self.all_rows:,} rows" if self.adds_rows else ""
        line = f"added the special tokens {names} to the tokenizer; their embeddings are trained{rows}"
        return [line] if self else []

    def record(self) -> dict[str, Any] | None:
        """For run.yaml."""
        told = {"tokens": list(self.names), "trained_rows": list(self.rows), "rows": self.all_rows}
        return told | {"rows_of_base": self.stored_rows} if self else None


def of_template(
    section: sections.Model, chat_template: str | None, config: PreTrainedConfig, grown_rows: int | None = None
) -> NewTokens:
    """What a chat template adds to a model's tokenizer; nothing where it is a file, or the tokenizer has its tokens.

    Args:
        grown_rows: of a run that goes on; see ``grown_rows_of``.

    Raises:
        InputError: if there is no tokenizer.
    """
    if not named_templates.has_specials(chat_template):
        return NewTokens()
    path, revision = section.tokenizer_source
    tokenizer = loading.load_tokenizer(
        path, revision=revision, trust_remote_code=section.trust_remote_code, chat_template=None
    )
    names = named_templates.use(tokenizer, str(chat_template), adds_tokens=True)
    ids: Any = tokenizer.convert_tokens_to_ids(list(names))
    stored: int = config.get_text_config().vocab_size
    return NewTokens(names, min(*ids, stored), max(ids), stored, grown_rows) if names else NewTokens()


def grown_rows_of(run: Mapping[str, Any]) -> int | None:
    """Of the vocabulary of a run, by its record: runs were not always given a multiple of ``MULTIPLE``."""
    rows: int | None = (run.get("new_tokens") or {}).get("rows")
    return rows


def of_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> NewTokens:
    """Tokens that a model has no rows for."""
    return up_to(max(tokenizer.get_vocab().values(), default=0) + 1, config)


def up_to(rows: int, config: PreTrainedConfig, grown_rows: int | None = None) -> NewTokens:
    """What a model lacks of so many rows.

    Args:
        grown_rows: of weights that are put in the place of the model's.
    """
    stored: int = config.get_text_config().vocab_size
    return NewTokens((), stored, rows - 1, stored, grown_rows) if rows > stored else NewTokens()


def with_vocabulary(config: PreTrainedConfig, rows: int) -> PreTrainedConfig:
    """A copy of a configuration, with so many rows of embedding and head."""
    changed = copy.deepcopy(config)
    changed.get_text_config().vocab_size = rows
    return changed


def problems(model: PreTrainedModel, new: NewTokens, section: sections.Adapter) -> list[str]:
    """Why rows cannot be added or trained, as sentences.

    Args:
        model: its modules; weights may be on the meta device.
    """
    if not new:
        return []
    head: Any = model.get_output_embeddings()
    names, advice = ", ".join(new.names), "set model.tokenizer and model.path to a model that has them."
    if not isinstance(model.get_input_embeddings(), torch.nn.Embedding) or not isinstance(head, torch.nn.Linear):
        return [
            f"data.chat_template: the tokenizer lacks {names}, and {type(model).__name__} has no ordinary embedding "
            f"and output head whose rows could be trained; {advice}"
        ]
    if section.type != "none" and head.bias is not None:
        return [
            f"data.chat_template: the tokenizer lacks {names}, and the output head of {type(model).__name__} has a "
            f"bias, which PEFT does not train for single tokens; set adapter.type to none, or {advice}"
        ]
    ours = {name.rpartition(".")[2] for name, module in model.named_modules() if module in own(model)}
    adapted = sorted(ours & set([] if section.targets == "all-linear" else section.targets))
    if section.type != "none" and adapted:
        return [
            f"adapter.targets: {', '.join(adapted)} cannot have an adapter of its own while single rows of it are "
            f"trained, for the tokens {names} of data.chat_template; put it into adapter.modules_to_save instead."
        ]
    return []


def own(model: PreTrainedModel) -> list[Any]:
    """The embedding and the output head."""
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def is_tied(model: PreTrainedModel) -> bool:
    """Whether embedding and output head share a weight."""
    embedding, head = own(model)
    return bool(embedding.weight is head.weight)


def names_of(model: PreTrainedModel, modules_to_save: Sequence[str]) -> list[str]:
    """Of the modules whose single rows an adapter trains: not of those that it trains whole, nor of a tied head.

    Args:
        modules_to_save: last names of modules that are trained whole.
    """
    names = {module: name for name, module in model.named_modules() if module in own(model)}
    whole = [name for name in names.values() if name.rpartition(".")[2] in modules_to_save]
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return [] if whole else [names[model.get_input_embeddings()]]
    return [name for name in names.values() if name not in whole]


@torch.no_grad()
def give_rows(model: PreTrainedModel, new: NewTokens) -> None:
    """Give a model the new rows, and those that it lacks, as the mean of the rows before. Its weights must be whole.

    A tied head stays tied; a head with a bias gets the mean of its biases.
    """
    if not new:
        return
    rows = new.all_rows
    embedding, head = own(model)
    tied = is_tied(model)
    for module in [embedding] if tied else [embedding, head]:
        module.weight = _with_rows(module.weight, new, rows)
    if tied:
        head.weight = embedding.weight
    if head.bias is not None:
        head.bias = _with_rows(head.bias, new, rows)
    embedding.num_embeddings = head.out_features = rows
    model.config.get_text_config().vocab_size = rows
    for module in model.modules():
        if isinstance(vars(module).get("vocab_size"), int):  # of which transformers' models keep copies
            module.vocab_size = rows  # type: ignore[assignment]


def _with_rows(weight: torch.nn.Parameter, new: NewTokens, rows: int) -> torch.nn.Parameter:
    """A weight with so many rows: of new tokens the mean of those before them, of no token that of all there were."""
    grown = weight.new_empty((rows, *weight.shape[1:]))
    grown[: len(weight)] = weight
    grown[len(weight) :] = _mean(weight)
    grown[new.first : new.last + 1] = _mean(weight[: new.first])
    return torch.nn.Parameter(grown, requires_grad=weight.requires_grad)


def _mean(rows: torch.Tensor) -> torch.Tensor:
    # in fp64, so that sums in another order, on another machine, come to the same number; some rows at a time
    total = sum(part.sum(0, dtype=torch.float64) for part in rows.split(ROWS_AT_ONCE))
    return (total / len(rows)).to(rows.dtype)
