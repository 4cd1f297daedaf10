"""Compares two models on real text: how much their logits and probabilities differ.

Both compute in fp32, whatever the dtype of their weights. So the difference comes from the weights, not from the
rounding of each product, which would dominate in bf16.

Memory stays bounded: at most 16 rows of 512 tokens, 4,096 tokens together; the first model's logits are kept for them
(2 GiB for a vocabulary of 128k), the second's only for one row at a time. Of the weights, only those of the module that
computes are in fp32: at most the output head's (2 GiB for 128k of width 4,096).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding import Settings
from finetune.data.encoding_workers import first_rows
from finetune.data.sources import Source
from finetune.errors import InputError

ROWS, ROW_TOKENS, TOKENS = 16, 512, 4096
CHARACTERS = 100_000
"""Most characters read of a text file: more than 4,096 tokens in any language."""
AT_ONCE = 128
"""Positions whose probabilities are compared together, in fp64."""

SAMPLES = (
    "The lighthouse keeper wrote down the weather every evening. On the third of March the wind turned to the north, "
    "and by midnight the harbour was white with foam. Two fishing boats had not come back; their lamps were seen at "
    "four in the morning, far beyond the reef, and nobody in the village went to bed before they were safe.",
    "def running_mean(values, width):\n"
    '    """Mean of each window of `width` values."""\n'
    "    total = sum(values[:width])\n"
    "    means = [total / width]\n"
    "    for old, new in zip(values, values[width:]):\n"
    "        total += new - old\n"
    "        means.append(total / width)\n"
    "    return means\n",
    "春になると、川沿いの桜が一斉に咲き始めます。週末には多くの人が集まり、木の下でお弁当を広げます。"
    "祖母は毎年、花が散る前に家族を呼び、昔の話を聞かせてくれました。",
)
"""English prose, code and Japanese, used without data of the run."""


@dataclass(frozen=True)
class Text:
    """What the models are compared on."""

    name: str
    rows: list[list[int]]
    """Tokens of each row."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))


@dataclass(frozen=True)
class Difference:
    """How much two models differ over all tokens of a text."""

    tokens: int
    largest_logit: float
    """Largest absolute difference of a logit."""
    mean_logit: float
    """Mean absolute difference over all logits."""
    mean_kl: float
    """Kullback-Leibler divergence of the second model's next-token distribution from the first's, mean, in nats."""
    agreement: float
    """Share of tokens after which both models find the same token most likely."""

    def table(self) -> str:
        """Four lines, below 80 columns."""
        lines = (
            ("largest difference of a logit", f"{self.largest_logit:.2e}"),
            ("mean difference of the logits", f"{self.mean_logit:.2e}"),
            ("mean KL divergence, nats per token", f"{self.mean_kl:.2e}"),
            ("most likely next token is the same", f"{100 * self.agreement:.2f} %"),
        )
        return "\n".join(f"  {name:<36}{value:>12}" for name, value in lines)


def choose_text(
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_file: Path | None,
    entries: Sequence[Source],
    settings: Settings,
    vocabulary: int,
) -> Text:
    """Rows of a text file, or of the run's data, or of the sample texts, where none of its rows can be used.

    Args:
        text_file: plain text in UTF-8.
        entries: data of the run, rendered and cut as in training.
        vocabulary: tokens that the model knows.

    Raises:
        InputError: if the file cannot be read or is empty, or the tokenizer is not the model's.
    """
    if text_file is not None:
        name, tokens = str(text_file), _encode(tokenizer, _read(text_file))
        rows = [tokens[i : i + ROW_TOKENS] for i in range(0, len(tokens), ROW_TOKENS)]
    else:
        name = ", ".join(entry.path for entry in entries)
        try:
            rows = [list(row.tokens) for row in first_rows(entries, tokenizer, settings, count=ROWS)]
        except InputError:  # a dataset of the hub, which cannot be reached
            rows = []
        if not rows:  # of data that has changed, or that a recipe of one's own reads in its own way
            name, rows = "sample texts", [_encode(tokenizer, sample) for sample in SAMPLES]
    bounded: list[list[int]] = []
    for row in rows[:ROWS]:
        left = TOKENS - sum(map(len, bounded))
        bounded += [row[: min(ROW_TOKENS, left)]] if row and left else []
    if not bounded:
        raise InputError(f"{name}: it contains no text; give another file with --text.")
    if (largest := max(map(max, bounded))) >= vocabulary:
        raise InputError(
            f"The tokenizer gives token {largest}, but the base model only knows {vocabulary} tokens; give the model "
            "that the adapter was trained on with --base-model."
        )
    return Text(name, bounded)


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {path}: the file cannot be read as text ({error}); give a UTF-8 file.") from error


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"]) if text.strip() else []


@torch.no_grad()
def logits(model: Any, text: Text) -> Iterator[torch.Tensor]:
    """Logits of each row, of shape (tokens, vocabulary), in fp32 on the CPU."""
    model.eval()
    device = model.device
    with _computing_in_fp32(model):
        for row in text.rows:
            yield model(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0].float().cpu()


@contextmanager
def _computing_in_fp32(model: torch.nn.Module) -> Iterator[None]:
    """While a module computes, its own 16-bit weights are in fp32; afterwards they are restored.

    Quantised weights stay as they are: their layers compute in the dtype of what comes in.
    """
    narrow: dict[torch.nn.Parameter, torch.Tensor] = {}

    def widen(module: torch.nn.Module, _: Any) -> None:
        for weight in module.parameters(recurse=False):
            if weight.dtype in (torch.bfloat16, torch.float16):
                narrow[weight] = weight.data
                weight.data = weight.data.float()

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for weight in module.parameters(recurse=False):
            if weight in narrow:
                weight.data = narrow.pop(weight)

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(widen).remove)
            # before hooks that were there: what is undone last is what was done first
            hooks.callback(module.register_forward_hook(restore, prepend=True).remove)
        yield


def compare(first: Sequence[torch.Tensor], second: Iterable[torch.Tensor]) -> Difference:
    """Compare the logits of two models row by row, in fp64."""
    tokens, same, entries, largest, sum_logit, sum_kl = 0, 0, 0, 0.0, 0.0, 0.0
    for rows in zip(first, second, strict=True):
        for a, b in zip(*(row.split(AT_ONCE) for row in rows)):
            a, b = a.double(), b.double()
            apart, log_p, log_q = (a - b).abs(), a.log_softmax(-1), b.log_softmax(-1)
            largest = max(largest, apart.max().item())
            sum_logit += apart.sum().item()
            sum_kl += (log_p.exp() * (log_p - log_q)).sum().item()
            same += int((a.argmax(-1) == b.argmax(-1)).sum())
            tokens, entries = tokens + len(a), entries + a.numel()
    return Difference(tokens, largest, sum_logit / entries, sum_kl / tokens, same / tokens)
