"""How many parameters are trained: all, or those that PEFT adds and frees for an adapter.

LoRA (arXiv:2106.09685) puts two matrices beside a linear layer, of ``rank * inputs`` and ``rank * outputs`` elements;
DoRA (arXiv:2402.09353) a magnitude for each output as well. Names are matched as PEFT 0.21 matches them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from finetune.config.refusals import adapter_name_problems
from finetune.errors import refuse_if_any
from finetune.planner.model_shape import Linear, ModelShape
from finetune.trace.setting import Setting

FUSED = {"gate_up_proj": 2}
"""Matrices that lie in one parameter of the experts. PEFT multiplies its rank by them, so that each half has its own,
as in transformers 4, where they were apart (``peft.utils.transformers_weight_conversion``)."""


@dataclass(frozen=True)
class AdapterParameters:
    """Elements of what an adapter trains, in the whole model."""

    matrices: int
    """Of LoRA's two matrices for each of its layers."""
    magnitudes: int = 0
    """Of DoRA."""
    saved_modules: int = 0
    """Of modules that are trained whole beside it."""

    @property
    def total(self) -> int:
        """All that is trained."""
        return self.matrices + self.magnitudes + self.saved_modules


def trained_parameters(shape: ModelShape, setting: Setting) -> int:
    """Parameters that have a gradient.

    Raises:
        InputError: if the adapter's names match nothing in the model.
    """
    if setting.adapter == "none":
        return shape.parameters
    kind: Literal["lora", "dora"] = "dora" if setting.adapter == "dora" else "lora"
    return adapter_parameters(
        shape, kind=kind, rank=setting.rank, targets=setting.targets, modules_to_save=setting.modules_to_save
    ).total


def adapter_parameters(
    shape: ModelShape,
    *,
    kind: Literal["lora", "dora"],
    rank: int,
    targets: str | Sequence[str],
    modules_to_save: Sequence[str],
) -> AdapterParameters:
    """Parameters that an adapter trains.

    Args:
        targets: all-linear, for every linear layer but the output head, a mixture's routers and experts included; or
            last names of linear layers.
        modules_to_save: last names of modules.

    Raises:
        InputError: for names that the model does not have, or that PEFT cannot take together.
    """
    refuse_if_any(_problems(shape, kind, targets, modules_to_save))
    adapted = [linear for linear in shape.linears if is_adapted(linear, targets, modules_to_save)]
    matrices = shape.layers * sum(ranks(linear, rank) * (linear.inputs + linear.outputs) for linear in adapted)
    magnitudes = shape.layers * sum(linear.outputs for linear in adapted)
    if targets != "all-linear" and "lm_head" in targets:
        matrices += rank * (shape.hidden + shape.vocabulary)
        magnitudes += shape.vocabulary
    return AdapterParameters(
        matrices=matrices,
        magnitudes=magnitudes if kind == "dora" else 0,
        saved_modules=_saved(shape, modules_to_save),
    )


def ranks(linear: Linear, rank: int) -> int:
    """Rows of the first matrix: those of every expert, one above the other."""
    return rank if linear.is_module else rank * linear.copies * FUSED.get(linear.name, 1)


def is_adapted(linear: Linear, targets: str | Sequence[str], modules_to_save: Sequence[str]) -> bool:
    if not linear.is_module:
        return targets == "all-linear"  # whatever is saved: PEFT puts it beside a parameter, which it never skips
    asked = targets == "all-linear" or linear.name in targets
    return asked and not set(linear.path.split(".")) & set(modules_to_save)


def _saved(shape: ModelShape, names: Sequence[str]) -> int:
    """Of modules that are trained whole. PEFT takes each module whose name ends in one of the names: norm is every
    norm."""

    def is_saved(path: str) -> bool:
        return any(part.endswith(tuple(names)) for part in path.split("."))

    in_layer = sum(linear.parameters for linear in shape.linears if is_saved(linear.path))
    in_layer += sum(norm.elements for norm in shape.norms if is_saved(norm.path))
    ends = is_saved("embed_tokens") + is_saved("lm_head")
    matrices = min(ends, 1) if shape.tied else ends  # a tied weight stays one (finetune.models.adapter.attach)
    return shape.layers * in_layer + matrices * shape.embedding_parameters + is_saved("norm") * shape.final_norm


def _problems(shape: ModelShape, kind: str, targets: str | Sequence[str], modules_to_save: Sequence[str]) -> list[str]:
    linear = {each.name for each in shape.linears if each.is_module} | {"lm_head"}
    paths = [each.path for each in shape.linears] + [each.path for each in shape.norms]
    parts = [part for path in paths for part in path.split(".")]
    stacked = {each.name for each in shape.linears if each.copies > 1}
    modules = ({*parts} - stacked) | {"embed_tokens", "norm", "lm_head"}
    found = adapter_name_problems(targets, modules_to_save, linear=linear, modules=modules)
    return found or _conflicts(shape, kind, targets, modules_to_save)


def _conflicts(shape: ModelShape, kind: str, targets: str | Sequence[str], modules_to_save: Sequence[str]) -> list[str]:
    """Names that the model has, and that PEFT refuses together."""
    everything, saved = targets == "all-linear", set(modules_to_save)
    is_mixture = any(not linear.is_module for linear in shape.linears)
    found = []
    if shape.tied and not everything and "lm_head" in targets and "embed_tokens" in saved:
        found.append(
            "adapter: lm_head is in targets and embed_tokens in modules_to_save, but they are one weight in this "
            "model; take one of them out."
        )
    if everything and is_mixture and kind == "dora":
        found.append("adapter.type: DoRA cannot be had for experts; set adapter.type to lora, or list adapter.targets.")
    if everything and is_mixture and (both := sorted(saved & {"gate", "experts"})):
        found.append(
            f"adapter.modules_to_save: {', '.join(both)} has an adapter by all-linear already; take it out, or list "
            "adapter.targets."
        )
    if not any(is_adapted(linear, targets, modules_to_save) for linear in shape.linears) and "lm_head" not in targets:
        found.append("adapter.modules_to_save: it covers every target, which leaves no layer to put an adapter beside.")
    return found
