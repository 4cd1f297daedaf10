"""The largest term of a peak, and the levers that would still shrink it.

A lever is named if it is possible and not pulled yet; by how much it helps is not predicted.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from finetune.planner.candidates import is_pointless
from finetune.planner.changes import (
    in_4_bits,
    sharded,
    smaller_micro_batches,
    with_8_bit_state,
    with_adapter,
    with_bf16_weights,
    with_checkpointing,
    with_offloaded_activations,
    with_shorter_rows,
)
from finetune.planner.judged_rows import Row
from finetune.planner.possible import why_not
from finetune.planner.preference import SIMPLEST_FIRST
from finetune.planner.question import Question
from finetune.trace.placement import Placement
from finetune.trace.setting import Setting
from finetune.units import GIB

TERMS = {
    "weights": ("weights",),
    "gradients and optimizer state": ("gradients", "optimizer"),
    "activations": ("activations",),
    "logits and loss": ("loss",),
    "gathered layers and buckets": ("gathered",),
    "workspace": ("workspace",),
}
"""What the parts of a peak are called; parts that the same levers shrink are one term."""


@dataclass(frozen=True)
class Lever:
    """Something that shrinks terms of a peak."""

    words: str
    change: Callable[[Setting], list[Setting]]
    shrinks: frozenset[str]


def _adapter_on_4_bits(setting: Setting) -> list[Setting]:
    return [each for changed in with_adapter(setting) for each in in_4_bits(changed)]


STATE = "gradients and optimizer state"
LEVERS = (
    Lever("activation checkpointing", with_checkpointing, frozenset({"activations"})),
    Lever("activations in host memory", with_offloaded_activations, frozenset({"activations"})),
    Lever("a smaller micro-batch", smaller_micro_batches, frozenset({"activations"})),
    Lever("shorter rows", with_shorter_rows, frozenset({"activations", "logits and loss"})),
    Lever("8-bit optimizer state", with_8_bit_state, frozenset({STATE})),
    Lever("bf16 weights", with_bf16_weights, frozenset({"weights", STATE})),
    Lever("an adapter", with_adapter, frozenset({STATE, "gathered layers and buckets"})),
    Lever("an adapter on 4-bit weights", _adapter_on_4_bits, frozenset({"weights"})),
    Lever("4-bit weights", in_4_bits, frozenset({"weights"})),
)
"""From the mildest; beside them sharding, whose words name a strategy."""


def largest_term(row: Row) -> tuple[str, int]:
    """Its name and bytes."""
    sizes = {term: sum(row.memory.parts[part] for part in parts) for term, parts in TERMS.items()}
    term = max(sizes, key=lambda name: sizes[name])
    return term, sizes[term]


def levers(question: Question, setting: Setting, term: str) -> list[tuple[str, Setting]]:
    """What would shrink a term, in words, with a setting in which it is done."""
    found = [*_sharding(question, setting, term)]
    for lever in LEVERS:
        changed = [each for each in lever.change(setting) if why_not(question.model, each) is None]
        if term in lever.shrinks and changed and not (term == "weights" and _is_of_no_use(lever, setting)):
            found.append((lever.words, changed[0]))
    return found


def sentence(question: Question, row: Row, whose: str = "the peak") -> str:
    """The largest term and its levers.

    Args:
        whose: the peak, in words.
    """
    term, size = largest_term(row)
    words = [words for words, _ in levers(question, row.setting, term)]
    if not words and term in ("weights", STATE) and row.setting.placement.optimizer_shards > 1:
        words = ["more GPUs"]
    is_plural = term != "workspace"
    what = (
        f"{term[0].upper()}{term[1:]} {'are' if is_plural else 'is'} the largest part of {whose} ({size / GIB:.1f} GiB)"
    )
    if not words:
        return f"{what}; no setting would shrink {'them' if is_plural else 'it'}."
    listed = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"{what}; {listed} would shrink {'them' if is_plural else 'it'}."


def _sharding(question: Question, setting: Setting, term: str) -> Iterator[tuple[str, Setting]]:
    """By the simplest strategy that splits the term over more GPUs."""
    if term not in ("weights", STATE):
        return
    here = _shards_of(term, setting.placement)
    there = [each for each in sharded(setting) if _shards_of(term, each.placement) > here]
    there = [each for each in there if not is_pointless(each.strategy, question.machines)]
    there = [each for each in there if why_not(question.model, each) is None]
    if there:
        simplest = min(there, key=lambda each: SIMPLEST_FIRST.index(each.strategy))
        yield f"sharding with {simplest.strategy}", simplest


def _shards_of(term: str, placement: Placement) -> tuple[int, ...]:
    if term == "weights":
        return (placement.weight_shards,)
    return (placement.gradient_shards, placement.optimizer_shards)


def _is_of_no_use(lever: Lever, setting: Setting) -> bool:
    """Under ZeRO the weights are 16-bit copies already, and fp32 ones belong to the optimizer."""
    return lever.change is with_bf16_weights and (setting.adapter != "none" or setting.placement.framework == "zero")
