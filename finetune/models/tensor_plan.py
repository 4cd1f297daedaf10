"""Which weights of a model each process has under tensor parallelism, by the model's own plan.

transformers says of each kind of layer how it is split (``base_model_tp_plan``). A layer that is split by its outputs
(``colwise``) computes some of them from the whole input; one that is split by its inputs (``rowwise``) takes those
outputs as they are, and its results are summed over the processes (arXiv:1909.08053, section 3).

Example: of an MLP of width 8 and 24, on 2 processes, the first has rows 0 to 11 of ``up_proj.weight``, of shape
(24, 8), and columns 0 to 11 of ``down_proj.weight``, (8, 24). With 8 query heads and 2 heads of keys on 4 processes,
each has 2 query heads and the one head of keys that they look at: two processes have the same.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Split:
    """How a tensor is cut into equal parts."""

    dim: int = 0
    parts: int = 1
    bundles: int = 1
    """Tensors that lie end to end in it along this dimension, of each of which a part has its own: 2 for the gates and
    the inputs of experts, which are one weight."""

    def take(self, whole: torch.Tensor, part: int) -> torch.Tensor:
        """One part, as a view if it is one."""
        apart = whole.unflatten(self.dim, (self.bundles, self.parts, -1))
        return apart.select(self.dim + 1, part).flatten(self.dim, self.dim + 1)

    def stretches(self, shape: Sequence[int]) -> int:
        """How many ranges of a flattened tensor a part consists of, all of one length.

        Columns 2 and 3 of a tensor of shape (3, 4) are elements 2 3, 6 7, 10 11: three ranges.
        """
        return 1 if self.parts == 1 else math.prod(shape[: self.dim]) * self.bundles


def take_flat(whole: torch.Tensor, part: int, parts: int, stretches: int) -> torch.Tensor:
    """One part of a flattened tensor, flattened; or of what there is for each element, or for each few of them."""
    return whole.view(stretches, parts, -1)[:, part].reshape(-1)


def join_flat(parts: Sequence[torch.Tensor], stretches: int) -> torch.Tensor:
    """A flattened tensor from all its parts in their order, flattened."""
    return torch.stack([each.view(stretches, -1) for each in parts], 1).view(-1)


class Share(NamedTuple):
    """What a process has of a parameter."""

    split: Split = Split()
    is_partial: bool = False
    """Whether the gradient of a process is that of its own outputs alone, and those of all that have the same part are
    summed. Otherwise they are equal."""


class Style(NamedTuple):
    """How a layer is split, and what is done with its input and its output."""

    by: str
    """``outputs`` or ``inputs``; empty for a module whose parameters are in the plan by themselves."""
    takes: str
    """``copy``: the whole input, whose gradient is summed; ``own``: what this process has; ``scatter``: its part."""
    gives: str
    """``own``: what this process has; ``reduce``: the sum over processes; ``gather``: all outputs."""


STYLES = {
    "colwise": Style("outputs", "copy", "own"),
    "colwise_gather_output": Style("outputs", "copy", "gather"),
    "colwise_rep": Style("outputs", "copy", "gather"),
    "rowwise": Style("inputs", "own", "reduce"),
    "rowwise_split_input": Style("inputs", "scatter", "reduce"),
    "rowwise_rep": Style("inputs", "scatter", "reduce"),
    "moe_tp_experts": Style("", "copy", "reduce"),
}
"""By the names of transformers, earlier ones included."""
KEYS_AND_VALUES = ("k_proj", "v_proj")
"""Layers that may have fewer heads than there are processes, several of which have the same then."""
PARTIAL = "replicated_with_grad_allreduce"
"""Of norms of heads: each process computes the gradient that comes from its own heads."""
OF_EXPERTS = {"packed_colwise": (1, 2), "rowwise": (2, 1)}
"""Dimension and bundles of weights of shape (experts, outputs, inputs)."""
BLOCK_4_BIT = 64
"""Weights that share a scale (bitsandbytes' default, and QLoRA's: arXiv:2305.14314, section 3)."""


class Layer(NamedTuple):
    """A module that is split."""

    name: str
    module: Any
    style: Style
    parts: int
    """Different ones: fewer than processes where they have few heads of keys and values."""


def named_styles(model: Any) -> dict[str, str]:
    """Of the modules and parameters of a model, by the names that they have without an adapter."""
    base, plan = model.base_model, model.config.get_text_config().base_model_tp_plan or {}
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    patterns = {re.compile(re.escape(prefix + key).replace(r"\*", r"\d+")): style for key, style in plan.items()}
    every = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    names = dict.fromkeys(name.replace(".base_layer", "") for name in every)
    return {name: style for name in names for pattern, style in patterns.items() if pattern.fullmatch(name)}


def layers_of(model: Any, size: int) -> list[Layer]:
    """The modules that are split over so many processes, with the output head, where the vocabulary is split."""
    modules, heads = dict(model.named_modules()), model.config.get_text_config().num_attention_heads
    found = [
        Layer(name, modules[name], STYLES[style], parts_of(modules, name, style, size, heads))
        for name, style in named_styles(model).items()
        if name in modules and style in STYLES
    ]
    head = model.get_output_embeddings()
    if splits_vocabulary(model, size):
        name = next(name for name, module in modules.items() if module is head)
        found.append(Layer(name, head, STYLES["colwise_gather_output"], size))
    return found


def parts_of(modules: dict[str, Any], name: str, style: str, size: int, heads: int) -> int:
    """Different parts of a layer; 0 where it cannot be split over so many processes.

    Args:
        heads: of the model's queries.
    """
    module, (parent, _, last) = modules[name], name.rpartition(".")
    split_by, attention = STYLES[style].by, modules[parent]
    if not split_by:
        return size
    units = module.out_features if split_by == "outputs" else module.in_features
    if style == "colwise" and last in KEYS_AND_VALUES and hasattr(attention, "head_dim"):
        units //= attention.head_dim
        if units < heads and size % units == 0:
            return units
    elif style == "colwise" and (hasattr(attention, "head_dim") or hasattr(attention, "head_size")) and heads % size:
        return 0
    return 0 if units % size else size


def splits_vocabulary(model: Any, size: int) -> bool:
    """Whether each process has the embeddings and scores of some tokens: not where an adapter is around them, or where
    they cannot be divided."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, torch.nn.Embedding) or type(head) is not torch.nn.Linear:
        return False
    vocabulary: int = model.config.get_text_config().vocab_size
    return vocabulary % size == 0 and len(embedding.weight) == len(head.weight) == vocabulary


def bundled(model: Any, size: int) -> list[str]:
    """Trained parameters that are several tensors end to end: a part has rows of each, and a shard of it would be no
    range of the whole. Adapters of experts are such."""
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    cuts = {name: share.split for name, share in shares_of(model, size).items() if name in trained}
    return [name for name, split in cuts.items() if split.dim == 0 and split.bundles > 1]


def shares_of(model: Any, size: int) -> dict[str, Share]:
    """Of each parameter that is not whole with the same gradient on every process, by its name; adapters included."""
    found: dict[int, Share] = {}
    styles = named_styles(model)
    for layer in layers_of(model, size):
        if layer.style.by:
            is_by_outputs, copies = layer.style.by == "outputs", size // layer.parts
            for name, parameter in layer.module.named_parameters():
                found[id(parameter)] = _share_of(name, is_by_outputs, Split(parts=layer.parts), copies)
        else:
            found |= _of_experts(layer, styles, size)
    for name, style in styles.items():
        if style == PARTIAL:
            found |= {id(each): Share(is_partial=True) for each in model.get_submodule(name).parameters()}
    if splits_vocabulary(model, size):
        found[id(model.get_input_embeddings().weight)] = Share(Split(0, size))
    return {name: found[id(each)] for name, each in model.named_parameters() if id(each) in found}


def _share_of(name: str, is_by_outputs: bool, split: Split, copies: int) -> Share:
    """Of a parameter of a linear layer, by its name in it, which may be that of an adapter.

    Args:
        split: of its outputs, or inputs.
        copies: processes that have the same part.
    """
    is_first, is_last = "lora_A" in name, "lora_B" in name
    if is_by_outputs:
        return Share(is_partial=True) if is_first else Share(split, is_partial=copies > 1)
    if is_last or name.endswith("bias"):
        return Share(is_partial=is_last)
    return Share(replace(split, dim=1))


def _of_experts(layer: Layer, styles: dict[str, str], size: int) -> dict[int, Share]:
    """Of the weights of all experts, which are one parameter, and of the adapters around them."""
    module, found = layer.module, dict[int, Share]()
    while hasattr(module, "base_layer"):  # each is of one of these weights
        dim, bundles = OF_EXPERTS[styles[f"{layer.name}.{module.parameter_name}"]]
        for name, parameter in (*module.lora_A.named_parameters("lora_A"), *module.lora_B.named_parameters("lora_B")):
            found[id(parameter)] = _share_of(name, dim == 1, Split(0, size, bundles), copies=1)
        module = module.base_layer
    for name, parameter in module.named_parameters(recurse=False):
        dim, bundles = OF_EXPERTS[styles[f"{layer.name}.{name}"]]
        found[id(parameter)] = Share(Split(dim, size, bundles))
    return found


def why_not(model: Any, size: int, *, bits: int | None) -> Iterator[str]:
    """Why a model cannot be split over so many processes, as clauses. Its weights may be on the meta device.

    It must have no adapter yet, and no layer that is quantised.

    Args:
        bits: that its layers will be quantised to.
    """
    kind, styles = type(model).__name__, named_styles(model)
    if not styles:
        yield f"{kind} has no plan for tensor parallelism in transformers"
        return
    modules, head, config = dict(model.named_modules()), model.get_output_embeddings(), model.config.get_text_config()
    for style in sorted({style for name, style in styles.items() if not _is_known(modules, name, style)}):
        yield f"{kind} has layers that are split in a way ({style}) that is not supported here"
        return
    if beside := sorted(_beside(modules, styles)):
        yield f"{kind} has weights among split layers ({', '.join(beside)}) of which its plan says nothing"
        return
    wrong = {
        name.rpartition(".")[2]
        for name, style in styles.items()
        if name in modules and style in STYLES and not parts_of(modules, name, style, size, config.num_attention_heads)
    }
    if wrong:
        heads = config.num_attention_heads
        known = f"{heads} attention heads, {getattr(config, 'num_key_value_heads', None) or heads} of keys and values"
        yield f"{', '.join(sorted(wrong))} cannot be divided by {size} (the model has {known})"
    if any(each.parts < size for each in layers_of(model, size)) and any(map(_takes_keys_of_another, modules.values())):
        yield f"{kind} has layers that take the keys of another layer, of which there are fewer heads than {size}"
    weights = {name: each.shape for name, each in model.named_parameters() if name in styles}
    cuts = [(shape, *OF_EXPERTS[styles[name]]) for name, shape in weights.items()]
    if any(shape[dim] % (bundles * size) for shape, dim, bundles in cuts):
        yield f"the width of its experts cannot be divided by {size}"
    if bits and not wrong:
        yield from why_not_quantised([each for each in layers_of(model, size) if each.module is not head])


def _beside(modules: dict[str, Any], styles: dict[str, str]) -> set[str]:
    """Names of weights that work on the outputs of one process, whose gradients would be wrong without a word."""
    own = [name for name, style in styles.items() if style in STYLES and STYLES[style].gives == "own"]
    parents = dict.fromkeys(name.rpartition(".")[0] for name in own)
    every = [f"{parent}.{name}" for parent in parents for name, _ in modules[parent].named_parameters()]
    known = tuple(f"{name}." for name in styles)
    return {name.removesuffix(".weight").rpartition(".")[2] for name in every if not f"{name}.".startswith(known)}


def why_not_quantised(layers: Sequence[Layer]) -> Iterator[str]:
    """Why weights in 4 bits cannot be cut, of which 64 have a scale in common."""
    for name, module, style, parts in layers:
        if not style.by:  # experts, which are not quantised
            continue
        last = name.rpartition(".")[2]
        if style.by == "inputs" and module.bias is not None:
            yield f"{last} has a bias, which cannot be added once in 4 bits"
            return
        together = module.in_features * (module.out_features if style.by == "outputs" else 1)
        if together // parts % BLOCK_4_BIT:
            yield f"{last} cannot be cut in 4 bits, where {BLOCK_4_BIT} weights of a row share a scale"
            return


def _takes_keys_of_another(module: Any) -> bool:
    return hasattr(module, "num_key_value_groups") and hasattr(module, "q_proj") and not hasattr(module, "k_proj")


def _is_known(modules: dict[str, Any], name: str, style: str) -> bool:
    if name not in modules:
        return style in OF_EXPERTS
    if style in STYLES:
        return not STYLES[style].by or type(modules[name]) is torch.nn.Linear
    return style == PARTIAL


def puts_together(model: Any) -> bool:
    """Whether a process needs whole outputs of some layers, so that what it computes is not a smaller model."""
    styles = {STYLES[style] for style in named_styles(model).values() if style in STYLES}
    return any(each.gives == "gather" or each.takes == "scatter" for each in styles)


def split_names(model: Any) -> set[str]:
    """Last names of the linear layers that are split."""
    modules, styles = dict(model.named_modules()), named_styles(model)
    return {name.rpartition(".")[2] for name, style in styles.items() if name in modules and style in STYLES}
