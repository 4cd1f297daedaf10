"""The nearest configuration that fits: the fewest and mildest changes to one that does not fit."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from finetune.config.compatibility import STRATEGIES
from finetune.hardware.cards import Machines
from finetune.planner.candidates import Judge, why_not
from finetune.planner.judged_rows import Row, judged
from finetune.planner.question import Question, method_of, question_about
from finetune.planner.shape import ModelShape
from finetune.trace.placement import placement_of
from finetune.trace.setting import Setting

LEAST_ROW_TOKENS = 128
Change = Callable[[Setting], list[Setting]]
KEYS: dict[str, tuple[str, Callable[[Setting], str]]] = {
    "micro_batch_size": ("train.micro_batch_size", lambda setting: str(setting.micro_batch_size)),
    "activation_checkpointing": (
        "train.activation_checkpointing",
        lambda setting: "full" if setting.activation_checkpointing else "none",
    ),
    "optimizer": ("train.optimizer", lambda setting: setting.optimizer),
    "adapter": ("adapter.type", lambda setting: setting.adapter),
    "bits": ("quantization.bits", lambda setting: str(setting.bits or "none")),
    "row_tokens": ("data.max_length", lambda setting: str(setting.row_tokens)),
}
"""Fields of a setting that are keys of the recipe, and their values there."""


@dataclass(frozen=True)
class Nearest:
    """What fits in place of something that does not."""

    row: Row
    changes: dict[str, str]
    """Keys of the configuration and their new values, the mildest change first."""
    strategy: str | None
    """The strategy file to launch with, where it is another."""

    @property
    def text(self) -> str:
        """As part of a sentence: set a to b and c to d, and launch with e."""
        parts = [f"{key} to {value}" for key, value in self.changes.items()]
        launch = f"launch with accelerate_configs/{self.strategy}.yaml" if self.strategy else ""
        joined = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        return ", and ".join(part for part in (f"set {joined}" if parts else "", launch) if part)


def nearest_that_fits(
    shape: ModelShape,
    setting: Setting,
    machines: Machines,
    *,
    mean_document_tokens: float | None = None,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    judge: Judge = judged,
) -> Nearest | None:
    """The nearest way to train that fits the machines; None if there is none.

    From the mildest: a smaller micro-batch, activation checkpointing, 8-bit optimizer state, sharding over the GPUs
    that there are, an adapter, 4-bit weights, shorter rows. All milder changes are tried, alone and together, before a
    harsher one; rows are no shorter than they must be with all the others. What fits without being tight comes first.

    Args:
        mean_document_tokens: that a token's document has on average; a whole row's where it is not given.
        host_bytes: memory of one machine, if known.
        disk_bytes: free for checkpoints, if known.
        judge: predicts one way to train.
    """
    question = question_about(
        shape,
        setting,
        machines,
        mean_document_tokens=mean_document_tokens or setting.row_tokens,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )
    return _search(question, setting, judge)


def nearest_to(question: Question, row: Row, judge: Judge = judged) -> Nearest | None:
    """The same for a row of a question's answer."""
    return _search(question, row.setting, judge)


def _search(question: Question, start: Setting, judge: Judge) -> Nearest | None:
    for accepted in ({"fits"}, {"fits", "tight"}):
        for shorter in _row_lengths(start):
            if not _fitting(question, [shorter], _CHANGES, accepted, judge, all_of_them=False):
                continue
            for number in range(2 ** len(_CHANGES)):  # in binary, the changes that are made: the harsher weigh more
                chosen = [change for place, change in enumerate(_CHANGES) if number >> place & 1]
                if fitting := _fitting(question, [shorter], chosen, accepted, judge, all_of_them=True):
                    return _nearest(start, max(fitting, key=_preference))
    return None


def _fitting(
    question: Question,
    settings: list[Setting],
    changes: Sequence[Change],
    accepted: set[str],
    judge: Judge,
    *,
    all_of_them: bool,
) -> list[Row]:
    """Rows that fit after changes; one that cannot be made leaves none, or is passed over."""
    for change in sorted(changes, key=lambda change: change is _smaller_micro_batches):
        changed = [each for setting in settings for each in change(setting)]
        settings = changed if changed or all_of_them else settings
    return [row for row in _judged(question, settings, judge) if row.verdict in accepted]


def _preference(row: Row) -> tuple[int, float]:
    """Of ways that differ as much: the largest micro-batch, the fastest."""
    return row.setting.micro_batch_size, row.time.tokens_per_second


def _judged(question: Question, settings: list[Setting], judge: Judge) -> Iterator[Row]:
    """Rows of the possible ones; what has more tokens than one that did not fit is not looked at."""
    too_many: dict[Setting, int] = {}
    for setting in settings:
        kind = replace(setting, micro_batch_size=1, accumulation=1, row_tokens=1)
        documents = min(question.mean_document_tokens, setting.row_tokens)
        asked = replace(question, base=setting, mean_document_tokens=documents)
        if setting.tokens >= too_many.get(kind, math.inf) or why_not(asked, setting.strategy, method_of(setting)):
            continue
        row = judge(asked, setting)
        if row.verdict == "does not fit":
            too_many[kind] = min(setting.tokens, too_many.get(kind, setting.tokens))
        yield row


def _smaller_micro_batches(setting: Setting) -> list[Setting]:
    rows = setting.micro_batch_size * setting.accumulation
    smaller = [n for n in range(1, setting.micro_batch_size) if rows % n == 0]
    return [replace(setting, micro_batch_size=n, accumulation=rows // n) for n in smaller]


def _with_checkpointing(setting: Setting) -> list[Setting]:
    return [] if setting.activation_checkpointing else [replace(setting, activation_checkpointing=True)]


def _with_8_bit_state(setting: Setting) -> list[Setting]:
    return [replace(setting, optimizer="adamw_8bit")] if setting.optimizer == "adamw" else []


def _sharded(setting: Setting) -> list[Setting]:
    """Under every strategy that splits more over the same GPUs; offload is the last resort of a user, not ours."""
    here = placement_of(setting.strategy, setting.world_size)
    found = []
    for strategy in STRATEGIES:
        there = placement_of(strategy, setting.world_size)
        more = (there.weight_shards, there.gradient_shards, there.optimizer_shards)
        less = (here.weight_shards, here.gradient_shards, here.optimizer_shards)
        if there.optimizer_on == "gpu" and more > less:
            found.append(replace(setting, strategy=strategy))
    return found


def _with_adapter(setting: Setting) -> list[Setting]:
    return [replace(setting, adapter="lora")] if setting.adapter == "none" else []


def _in_4_bits(setting: Setting) -> list[Setting]:
    return [replace(setting, bits=4)] if setting.adapter != "none" and setting.bits != 4 else []


def _row_lengths(setting: Setting) -> Iterator[Setting]:
    """From its own, by halves."""
    tokens = setting.row_tokens
    while tokens >= min(LEAST_ROW_TOKENS, setting.row_tokens):
        yield replace(setting, row_tokens=tokens)
        tokens //= 2


_CHANGES: tuple[Change, ...] = (
    _smaller_micro_batches,
    _with_checkpointing,
    _with_8_bit_state,
    _sharded,
    _with_adapter,
    _in_4_bits,
)
"""From the mildest; one that cannot be made gives no settings."""


def _nearest(start: Setting, row: Row) -> Nearest:
    before, after = asdict(start), asdict(row.setting)
    changes = {key: value(row.setting) for name, (key, value) in KEYS.items() if before[name] != after[name]}
    strategy = row.setting.strategy
    return Nearest(row, changes, strategy if strategy != start.strategy else None)
