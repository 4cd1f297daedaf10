"""Where LoRA's matrices start, beside PEFT's default: pissa, olora and loftq.

The default begins with B = 0, so that the adapter adds nothing. Of a weight W, with the scale s = alpha / rank:

- pissa (arXiv:2404.02948): s B A is the best approximation of W of this rank, and W - s B A is frozen in W's place;
- olora (arXiv:2406.01775): B and A are the first columns of Q and the first rows of R, of W = Q R, and W - s B A is
  frozen likewise;
- loftq (arXiv:2310.08659, one iteration): s B A is the best approximation of W - Q(W), what is lost as W is
  quantised. The frozen Q(W) is what it always is.

With pissa and olora the adapter learns from another base than the published one, and what it has learnt is
s (B A - B0 A0), where B0 and A0 are its matrices at the start. ``in_terms_of_base`` writes that as an ordinary adapter
of twice the rank on the published base, as PEFT converts it. Nothing of the start is in a checkpoint: a run that is
resumed computes it again. The same weight gives the same start: random directions come from a generator of its own, and
products are in float64. One thread or two differ by 1e-14, which is lost when the start is rounded.

Example: W = [[3, 0], [0, 1]], rank 1, s = 1. pissa: B = [1.73, 0], A = [1.73, 0], frozen is [[0, 0], [0, 1]]. After a
step B = [1.8, 0.1]; saved are B' = [[1.8, -1.73], [0.1, 0]] and A' = [[1.73, 0], [1.73, 0]], of rank 2:
B' A' = [[0.12, 0], [0.17, 0]], which W has not and the trained model has.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune.config import sections
from finetune.models import weight_files
from finetune.models.adapter_layers import linear_layers

OVERSAMPLING = 8
ROUNDS = 6
"""Of the block Krylov method. Of the energy that the best approximation of rank 16 has of weights of SmolLM2-135M, or
of what they lose in 4 bits, at most 3e-4 are then missed."""

Whole = Callable[[torch.nn.Parameter], AbstractContextManager[object]]


def problems(skeleton: PreTrainedModel, section: sections.Adapter, files: Sequence[Path] | None) -> list[str]:
    """Why the model's layers cannot start like this, as sentences.

    Args:
        skeleton: the model without weights.
        files: of its weights; None where they are not there yet.
    """
    if section.init == "default":
        return []
    layers = _started(skeleton, section)
    if small := _too_small(layers, section):
        return small
    if section.init == "loftq" and not layers:
        return [
            "adapter.init loftq starts with what 4 bits lose of a weight, but all of adapter.targets keep 16 bits; add "
            "layers that are quantised, or set adapter.init to default."
        ]
    if section.init == "loftq":
        return _not_in(files, [f"{name}.weight" for name in layers]) if files else []
    named = [id(each) for _, each in skeleton.named_parameters(remove_duplicate=False)]
    if shared := [name for name, layer in layers.items() if named.count(id(layer.weight)) > 1]:
        return [
            f"adapter.init {section.init} subtracts the adapter's start from the frozen weight, but another layer "
            f"uses the weight of {weight_files.first_of(shared)} too, and would change with it; leave it out of "
            "adapter.targets, or set adapter.init to default."
        ]
    return []


def layer_problems(adapted: torch.nn.Module, section: sections.Adapter) -> list[str]:
    """Why the layers that have adapters cannot start like this, as a sentence.

    Args:
        adapted: the model without weights, with its adapter.
    """
    if section.init == "default":
        return []
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    of_experts = [name for name, layer in layers.items() if not hasattr(layer.get_base_layer(), "weight")]
    if not of_experts:
        return []
    return [
        f"adapter.init {section.init} begins with the weight of each layer, but {of_experts[0]} has adapters "
        "of all its experts; set adapter.targets to other layers, or adapter.init to default."
    ]


def _started(model: PreTrainedModel, section: sections.Adapter) -> dict[str, Any]:
    """The layers that get a start: all targets, but for the output head with loftq, since it is not quantised."""
    head = model.get_output_embeddings()
    linear = linear_layers(model)
    if section.targets == "all-linear" or section.init == "loftq":
        linear = {name: layer for name, layer in linear.items() if layer is not head}
    return {n: m for n, m in linear.items() if section.targets == "all-linear" or _last(n) in section.targets}


def _too_small(layers: Mapping[str, Any], section: sections.Adapter) -> list[str]:
    """Of layers with fewer directions than the rank, the smallest of each last name; with the ranks that they allow."""
    found: dict[str, tuple[int, str]] = {}
    for name, layer in layers.items():
        last, directions = _last(name), min(layer.weight.shape)
        if section.rank_pattern.get(last, section.rank) > directions:
            found[last] = min(found.get(last, (directions, name)), (directions, name))
    if not found:
        return []
    allowed = dict(section.rank_pattern) | {last: directions for last, (directions, _) in found.items()}
    return [
        f"adapter.init {section.init} takes as many directions of a weight as the adapter's rank, but "
        f"{weight_files.first_of([f'{name} has only {directions}' for directions, name in found.values()])}; set "
        f"adapter.rank_pattern to {{{', '.join(f'{last}: {rank}' for last, rank in allowed.items())}}} or lower "
        "adapter.rank, or set adapter.init to default."
    ]


def _last(name: str) -> str:
    return name.split(".")[-1]


def _not_in(files: Sequence[Path], names: Collection[str]) -> list[str]:
    stored = weight_files.shapes(files)
    if not (missing := [name for name in names if name not in stored]):
        return []
    return [
        f"adapter.init loftq reads each weight by its name, but the files in {files[0].parent} have no "
        f"{weight_files.first_of(missing)}: transformers renames this model's weights as it reads them. Set "
        "adapter.init to default."
    ]


@torch.no_grad()
def start(
    model: torch.nn.Module,
    section: sections.Adapter,
    *,
    files: Sequence[Path],
    device: torch.device,
    whole: Whole,
    computes: bool,
) -> dict[str, torch.Tensor]:
    """Give an attached adapter its start, and its frozen weights what goes with it.

    Args:
        files: of the model's weights; read by loftq only.
        device: to compute on, with one weight at a time in float64.
        whole: within what it makes of a frozen weight, that is whole, and may be written. May be collective.
        computes: whether this process's values are of use: others get theirs when the strategy takes the model.

    Returns:
        What the matrices start with, by their names, in fp32 in host memory: of pissa and olora, whose adapter is
        saved by it. Else nothing.
    """
    if section.init == "default":
        return {}
    from peft.tuners.lora import LoraLayer

    places = {key: file for file in files for key in weight_files.shapes([file])} if section.init == "loftq" else {}
    beginning: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        layer: Any = module
        frozen = layer.get_base_layer()
        with whole(frozen.weight):
            if not computes:
                continue
            if section.init == "loftq":
                _start_from_loss(layer, places.get(f"{name}.weight"), f"{name}.weight", device)
                continue
            weight = frozen.weight.T if isinstance(frozen, Conv1D) else frozen.weight
            _start_from_weight(layer, weight, section.init, device)
        for matrix in ("lora_A", "lora_B"):
            value = getattr(layer, matrix)["default"].weight
            beginning[f"{name}.{matrix}.default.weight"] = value.to("cpu", torch.float32, copy=True)
    return beginning


def _start_from_weight(layer: Any, weight: torch.Tensor, init: str, device: torch.device) -> None:
    """Take the adapter's start off a weight of shape (out, in), in place."""
    exact, rank, scale = weight.to(device, torch.float64), layer.r["default"], layer.scaling["default"]
    left, right = _orthogonal(exact, rank) if init == "olora" else _principal(exact / scale, rank)
    b, a = _written(layer, left, right)
    weight.copy_(exact - scale * b.to(exact) @ a.to(exact))


def _start_from_loss(layer: Any, file: Path | None, name: str, device: torch.device) -> None:
    """Begin with what quantising took from a weight; the output head keeps the default, since it is not quantised."""
    import bitsandbytes as bnb

    if not isinstance(layer.get_base_layer(), bnb.nn.Linear4bit):
        return
    assert file is not None, name  # refused before
    frozen = layer.get_base_layer().weight
    with weight_files.opened(file, "pt") as opened:
        exact = opened.get_tensor(name).to(device, torch.float64)
    lost = exact - bnb.functional.dequantize_4bit(frozen.data, frozen.quant_state).to(exact)
    _written(layer, *_principal(lost / layer.scaling["default"], layer.r["default"]))


def _written(layer: Any, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """B and A as the adapter holds them, in its dtype."""
    b, a = layer.lora_B["default"].weight, layer.lora_A["default"].weight
    b.copy_(left)
    a.copy_(right)
    return b, a


def _orthogonal(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first columns of Q and the first rows of R, of matrix = Q R. They depend on its first columns only."""
    q = torch.linalg.qr(matrix[:, :rank])[0]
    return q, q.T @ matrix


def _principal(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two factors of the best approximation of this rank, which share its singular values evenly."""
    basis = _leading(matrix, rank)
    if basis is None:
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    else:
        q, r = torch.linalg.qr(matrix.T @ basis)  # basis.T @ matrix = r.T @ q.T, of which r.T is small
        u, s, v = torch.linalg.svd(r.T)
        u, v = basis @ u[:, :rank], v[:rank] @ q.T
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * v[:rank]


def _leading(matrix: torch.Tensor, rank: int) -> torch.Tensor | None:
    """An orthonormal basis of the directions in which a matrix is largest, found by a randomised block Krylov method.

    Random vectors (arXiv:0909.4061), and what powers of the matrix make of them, all kept (arXiv:1504.05477): the
    spectra of weights are too flat for the last power alone. None for a small matrix, whose own SVD is as quick.
    """
    rows, columns = matrix.shape
    width = rank + OVERSAMPLING
    if width * (1 + ROUNDS) >= min(rows, columns):
        return None
    drawn = torch.randn(columns, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    newest = basis = torch.linalg.qr(matrix @ drawn.to(matrix))[0]
    for _ in range(ROUNDS):
        newest = matrix @ (matrix.T @ newest)
        for _ in range(2):  # once leaves rounding errors of what was large
            newest = newest - basis @ (basis.T @ newest)
        newest = torch.linalg.qr(newest)[0]
        basis = torch.cat([basis, newest], 1)
    return torch.linalg.qr(basis)[0]  # of a matrix of low rank the later blocks are rounding errors, not orthogonal


def in_terms_of_base(name: str, value: torch.Tensor, beginning: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A trained matrix as it is saved: [B, -B0] and [A; A0] where the adapter's start was taken off the base.

    Args:
        name: of the parameter, A or B.
        beginning: what ``start`` returned.
    """
    if name not in beginning:
        return value
    first = beginning[name].to(value)
    return torch.cat([value, first], 0) if ".lora_A." in name else torch.cat([value, -first], 1)


def twice_the_rank(config: Any) -> None:
    """Have PEFT's configuration of an adapter describe what ``in_terms_of_base`` makes of it, with the same scale."""
    by = 2**0.5 if config.use_rslora else 2
    config.r *= 2
    config.lora_alpha *= by
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: by * alpha for name, alpha in config.alpha_pattern.items()}
