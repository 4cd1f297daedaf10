"""What a configuration cannot ask for, as sentences that the run, ``finetune data`` and ``finetune plan`` share."""

import re
from collections.abc import Collection, Mapping, Sequence

from finetune.config import sections

TAKEN = {
    *("loss", "accuracy", "kl", "bits_per_byte"),
    *("reward_chosen", "reward_rejected", "reward_margin", "reference_point"),
}
"""Figures of the held-out rows, which metrics.jsonl has as eval_NAME."""


def batch_problems(global_batch_size: int, micro_batch_size: int, world_size: int) -> list[str]:
    """Why a global batch cannot be cut into micro-batches for every process, naming the nearest ones that can."""
    unit = micro_batch_size * world_size
    if global_batch_size % unit == 0:
        return []
    below, above = global_batch_size // unit * unit, (global_batch_size // unit + 1) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    if micro_batch_size == 1:
        return [
            f"train.global_batch_size {global_batch_size} rows cannot be shared equally by {world_size} processes; set "
            f"it to {nearest}."
        ]
    return [
        f"train.global_batch_size {global_batch_size} does not divide into micro-batches of {micro_batch_size} rows on "
        f"{world_size} process{'es' if world_size > 1 else ''} ({unit} rows at a time); set it to {nearest}, or change "
        "train.micro_batch_size."
    ]


def adapter_name_problems(
    targets: str | Sequence[str],
    modules_to_save: Sequence[str],
    *,
    linear: Collection[str],
    modules: Collection[str],
    patterns: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Names of an adapter's section that match nothing in the model.

    Args:
        linear: last names of the model's linear layers.
        modules: last names of all of its modules.
        patterns: names in adapter.rank_pattern and adapter.alpha_pattern, by these keys.
    """
    named = [targets] if isinstance(targets, str) else list(targets)
    unknown = [name for name in named if name not in linear or isinstance(targets, str)]  # names come as a list
    found = []
    if targets != "all-linear" and (unknown or not named):
        found.append(
            f"adapter.targets: the model has no linear layer {', '.join(unknown) or 'in an empty list'}; it has "
            f"{', '.join(sorted(linear))}. Or set all-linear."
        )
    if missing := [name for name in modules_to_save if name not in modules]:
        found.append(
            f"adapter.modules_to_save: the model has no module {', '.join(missing)}; it has "
            f"{', '.join(sorted(modules))}."
        )
    for key, names in (patterns or {}).items():
        if strange := [name for name in names if name not in (linear if targets == "all-linear" else named)]:
            found.append(
                f"adapter.{key}: {', '.join(strange)} gets no adapter; name linear layers that adapter.targets has."
            )
    if both := sorted(set(modules_to_save) & set(named)):
        found.append(f"adapter: {', '.join(both)} is in both targets and modules_to_save; remove it from one.")
    return found


def unused_adapter_keys(adapter: sections.Adapter) -> list[str]:
    """Keys of an adapter that is not asked for."""
    default = sections.Adapter()
    given = (
        [key for key, value in adapter if key != "from_" and value != getattr(default, key)]
        if adapter.type == "none"
        else []
    )
    return [f"adapter.{key} is set, but adapter.type is none; set adapter.type to lora, or remove it." for key in given]


def adapter_init_problems(
    adapter: sections.Adapter, bits: int | str | None, *, is_stored: bool, random_weights: bool
) -> list[str]:
    """What an adapter cannot start with, by its section and its base.

    Args:
        bits: of the frozen weights, 4 or 8; else none, in one way or another.
        is_stored: the model is published in these bits.
    """
    init, is_quantised = adapter.init, bits in (4, 8)
    if init == "default" or adapter.type == "none":
        return []
    takes_off = init in ("pissa", "olora")
    found = {
        f"adapter.init {init} is not available with adapter.type dora, whose magnitudes are those of the weights as "
        "they were; set adapter.type to lora, or adapter.init to default.": adapter.type == "dora",
        f"adapter.init {init} is the start of a new adapter, and adapter.from names one to continue from; remove one "
        "of them.": adapter.from_ is not None,
        f"adapter.init {init} writes into the frozen weights, which are in {bits} bits; set adapter.init to loftq, "
        "which is made for a base in 4 bits, or quantization.bits to none.": (
            takes_off and is_quantised and not is_stored
        ),
        f"adapter.init {init} writes into the frozen weights, but this model is published in {bits} bits; use its "
        "16-bit version, or set adapter.init to default.": takes_off and is_quantised and is_stored,
        "adapter.init loftq makes up for what quantising takes from the weights; set quantization.bits to 4, or "
        "adapter.init to pissa or default.": init == "loftq" and bits != 4,
        "adapter.init loftq needs the weights as they were before they were quantised, but this model is published in "
        "4 bits; use its 16-bit version, or set adapter.init to default.": init == "loftq" and bits == 4 and is_stored,
        "adapter.init loftq reads the unquantised weights from the model's files, and model.random_weights has none; "
        "set adapter.init to default.": init == "loftq" and random_weights,
    }
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def schedule_problems(train: sections.Train) -> list[str]:
    """Keys of the learning rate and the optimizer that contradict one another."""
    default = sections.Train.model_fields["decay_ratio"].default
    lowest = train.min_learning_rate
    found = {
        f"train.decay_ratio belongs to the schedule wsd, and train.schedule is {train.schedule}; leave it out.": (
            train.schedule != "wsd" and train.decay_ratio != default
        ),
        "train.min_learning_rate_ratio: the schedule constant does not decay; leave it out.": (
            train.schedule == "constant" and train.min_learning_rate_ratio > 0
        ),
        "train.min_learning_rate: the schedule constant does not decay; leave it out.": (
            train.schedule == "constant" and lowest is not None
        ),
        "train.min_learning_rate and train.min_learning_rate_ratio say the same in two ways; remove one of them.": (
            lowest is not None and train.min_learning_rate_ratio > 0
        ),
        f"train.min_learning_rate {lowest or 0:g} is above the peak, train.learning_rate {train.learning_rate:g}; "
        "lower it.": lowest is not None and lowest > train.learning_rate,
        f"train.warmup_ratio {train.warmup_ratio:g} and train.decay_ratio {train.decay_ratio:g} are more than the "
        "whole run; lower one of them.": (
            train.schedule == "wsd" and train.warmup_steps is None and train.warmup_ratio + train.decay_ratio > 1
        ),
        f"train.betas: {train.optimizer} has none; leave them out, or set train.optimizer to adamw.": (
            train.betas is not None and train.optimizer in ("adafactor", "sgd")
        ),
    }
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def resumption_problems(section: sections.Checkpoint) -> list[str]:
    """Keys of a resumption that is not asked for."""
    if section.resume != "none" or not section.resume_weights_only:
        return []
    return [
        "checkpoint.resume_weights_only takes weights from a checkpoint, but checkpoint.resume is none; set it to "
        "auto, or to the folder of a checkpoint."
    ]


def question_problems(section: sections.Eval, held_out: object) -> list[str]:
    """Keys of eval that need held-out rows, where data.eval names none."""
    asks = {"prompts": isinstance(section.prompts, int) and section.prompts > 0, "exact_match": section.exact_match}
    return [
        f"eval.{key} asks for held-out conversations, but data.eval names none; set data.eval."
        for key, is_asked in asks.items()
        if is_asked and not held_out
    ] + _comparison_problems(section, held_out)


def _comparison_problems(section: sections.Eval, held_out: object) -> list[str]:
    asked = {"keep_best": section.keep_best, "early_stopping": section.early_stopping > 0}
    keys = [f"eval.{key}" for key, is_asked in asked.items() if is_asked]
    found = {
        "eval.every: there is nothing to evaluate; set data.eval or eval.tasks, or leave it out.": (
            section.every > 0 and not keys and not held_out and not section.tasks
        ),
        f"{' and '.join(keys)}: no evaluation is made during training; set eval.every.": keys and section.every == 0,
        f"{' and '.join(keys)}: there is no eval_loss without held-out rows; set data.eval.": (
            keys and section.metric == "eval_loss" and not held_out
        ),
        f"eval.metric is {section.metric}, but nothing is compared by it; set eval.keep_best or eval.early_stopping, "
        "or remove it.": not keys and section.metric != sections.Eval().metric,
    }
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def task_problems(tasks: Sequence[sections.Task]) -> list[str]:
    """Names of eval.tasks that cannot be those of figures in metrics.jsonl."""
    names = [task.name for task in tasks]
    found = [
        f"eval.tasks: the name {name!r} has other characters than letters, digits, - and _; change it."
        for name in names
        if not re.fullmatch(r"[\w-]+", name, re.ASCII)
    ]
    found += [
        f"eval.tasks: eval_{name} is a figure of the held-out loss; choose another name for the task."
        for name in sorted({*names} & TAKEN)
    ]
    twice = sorted({name for name in names if names.count(name) > 1})
    return found + [f"eval.tasks: {name} is the name of two tasks; give each its own." for name in twice]


def position_problems(longest: int, positions: int | None) -> list[str]:
    """Rows longer than the model has positions.

    Args:
        longest: tokens of the longest row.
        positions: None for a model that counts none.
    """
    if positions is None or longest <= positions:
        return []
    return [
        f"Rows have up to {longest:,} tokens, but the model has {positions:,} positions; set data.max_length to "
        f"{positions} or less."
    ]


def packing_problems(capability: tuple[int, int] | None) -> list[str]:
    """Why documents cannot be packed on a card.

    Args:
        capability: its compute capability, (8, 0) for Ampere; None where there is no GPU, or where it is not known.
    """
    if capability is None or capability >= (8, 0):
        return []
    return [
        f"This GPU has compute capability {'.'.join(map(str, capability))}, and attention to packed documents "
        "needs 8.0 (Ampere) or newer; set data.packing to false."
    ]


def recomputation_problems(layers: int | None, there: int) -> list[str]:
    """Why so many layers cannot be recomputed.

    Args:
        layers: None for all.
        there: layers of the model.
    """
    if layers is None or layers <= there:
        return []
    return [
        f"train.activation_checkpointing is {layers}, but the model has {there} layers; set it to full, or to a "
        "smaller number."
    ]


def planner_problems(attention: str) -> list[str]:
    """Attention that the planner does not count.

    Args:
        attention: as ``model.attention``.
    """
    if attention == "eager":
        return ["The planner does not count eager attention, whose scores take memory of the row's length squared."]
    return []
