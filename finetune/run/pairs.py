"""What a recipe that learns from pairs of answers refuses beside ``preflight``, and where its reference comes from."""

import numpy as np

from finetune.compat.peft_private import adapter_off
from finetune.config import sections
from finetune.config.compatibility import reference_problems
from finetune.config.dpo_section import WITHOUT_REFERENCE, Dpo, reference_taken
from finetune.data.rows import Rows
from finetune.distributed import RememberedWeights, Strategy
from finetune.training.preferences import Preferences


def pair_problems(cfg: sections.Run, dpo: Dpo, launch: Strategy) -> list[str]:
    """What contradicts pairs of answers, as sentences."""
    data, given = cfg.data, dpo.model_fields_set
    without = dpo.loss in WITHOUT_REFERENCE
    found = {
        "data.streaming: pairs are prepared before training; set it to false.": data.streaming,
        "data.packing: the answers of a micro-batch lie end to end as they are; set it to false.": data.packing,
        f"data.format {data.format}: a pair is known by its keys; leave it at auto.": data.format != "auto",
        f"data.train_on {data.train_on}: of a pair the two answers are compared; leave it at assistant.": (
            data.train_on != "assistant"
        ),
        "train.label_smoothing belongs to the loss of single tokens, and pairs are compared; leave it out.": (
            cfg.train.label_smoothing > 0
        ),
        "eval.exact_match: the chosen answer of a pair is one of many; set it to false.": cfg.eval.exact_match,
        "dpo.reference adapter_off needs an adapter; set adapter.type to lora, or dpo.reference to cached.": (
            dpo.reference == "adapter_off" and cfg.adapter.type == "none"
        ),
        "dpo.reference adapter_off would compare with the model without the adapter that adapter.from names; set it to "
        "cached.": dpo.reference == "adapter_off" and cfg.adapter.from_ is not None,
        f"dpo.reference adapter_off would compare with the model without what adapter.init {cfg.adapter.init} begins "
        "with; set it to cached.": dpo.reference == "adapter_off" and cfg.adapter.init != "default",
        f"dpo.reference: {dpo.loss} has no reference; leave it out.": without and "reference" in given,
        f"dpo.label_smoothing belongs to the loss robust, and dpo.loss is {dpo.loss}; leave it out.": (
            dpo.label_smoothing > 0 and dpo.loss != "robust"
        ),
        f"dpo.margin belongs to the loss simpo, and dpo.loss is {dpo.loss}; leave it out.": (
            "margin" in given and dpo.loss != "simpo"
        ),
        f"dpo.desirable_weight and dpo.undesirable_weight belong to the loss kto, and dpo.loss is {dpo.loss}; leave "
        "them out.": dpo.loss != "kto" and bool({"desirable_weight", "undesirable_weight"} & given),
        "dpo.length_normalized: kto compares sums over the tokens of an answer; set it to false.": (
            dpo.loss == "kto" and dpo.length_normalized
        ),
    }
    of_launch = reference_problems(launch.name, dpo.compares_with)
    return [sentence for sentence, is_wrong in found.items() if is_wrong] + of_launch


def kind_problems(dpo: Dpo, *read: Rows | None) -> list[str]:
    """Rows that the loss cannot learn from, as sentences: it needs pairs, or answers that are judged alone."""
    found = []
    for rows in read:
        if rows is None:
            continue
        is_alone = (np.asarray(rows.trained_tokens).reshape(-1, 2) == 0).any(1)
        whose = ", ".join(rows.summary["sources"])
        if dpo.loss == "kto" and not is_alone.all():
            found.append(
                f"{whose}: {(~is_alone).sum():,} rows are pairs (chosen, rejected), but kto learns from answers "
                "that are judged alone; give each a row with prompt, completion and label, or set another dpo.loss."
            )
        if dpo.loss != "kto" and is_alone.any():
            found.append(
                f"{whose}: {is_alone.sum():,} rows have one answer with a label, but {dpo.loss} compares two; set "
                "dpo.loss to kto, or give each row chosen and rejected."
            )
    return found


def caches_reference(cfg: sections.Run, dpo: Dpo, launch: Strategy) -> bool:
    """Whether references are computed before training, and not in each step."""
    return _reference_of(cfg, dpo, launch) == "cached"


def preferences_of(cfg: sections.Run, dpo: Dpo, launch: Strategy) -> Preferences:
    """What the recipe learns."""
    reference = _reference_of(cfg, dpo, launch)
    if reference == "model":
        beginning = RememberedWeights()
        return Preferences(dpo, beginning.in_place, beginning.remember)
    if reference != "adapter_off":
        return Preferences(dpo)
    return Preferences(dpo, adapter_off)


def _reference_of(cfg: sections.Run, dpo: Dpo, launch: Strategy) -> str:
    is_off_at_first = cfg.adapter.is_nothing_at_first
    return reference_taken(dpo.compares_with, adapted=is_off_at_first, in_order=launch.gathers_in_order)
