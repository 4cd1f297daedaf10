"""RMSNorm and the gated product of an MLP as one operation each, of which autograd keeps no more than the inputs.

transformers composes both of several operations, and autograd keeps what each of them needs. In bf16 these are 6 bytes
a channel and position of a norm (its input in fp32, and what is multiplied by the weights), and 8 of an MLP (gate,
``silu(gate)``, up, and their product). Here they are 2 and 4: the rest is computed again in the backward pass, a few
rows at a time. On a GPU Liger's kernels compute, where liger-kernel is installed; elsewhere PyTorch does.

A model's modules are recognised by what they compute, not by their names: ``fuse`` gives a module's own forward some
numbers, small and large ones, as in training, and replaces it where an operation here returns the same, to the bit.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from finetune.compat import liger_private as liger
from finetune.compat.torch_private import storage_key, without_modes
from finetune.models import rotary
from finetune.models.recomputation import recomputed_parts

AT_ONCE = {"cpu": 2**20, "cuda": 2**24}
"""Bytes of a tensor in fp32 that is computed with at a time. On a CPU a norm's stay in its caches: 2.7 ms forward and
backward instead of 12.8 (1,250 rows of 576 channels in bf16, two cores)."""
KEPT = nullcontext()
ROWS, WIDTH = 16, 16
"""Shape of the numbers that modules are recognised by. Their own weights are not used: ZeRO-3 has partitioned them."""


@torch.library.custom_op("finetune::rms_norm", mutates_args=())
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, casts_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` (arXiv:1910.07467), over the last dimension.

    Args:
        x: of shape (..., D).
        weight: of shape (D,).
        offset: 1 where the weights are stored as what they differ from 1 by (Gemma), else 0.
        casts_first: round to the dtype of ``x`` before the weights are multiplied (Llama), or only afterwards.

    Returns:
        The normalised values, of the shape of ``x``, and what each row was multiplied by, of shape (..., 1) and fp32.
    """
    if liger.computes(x, weight):
        return liger.rms_norm(x, weight, eps, offset, casts_first)
    out = torch.empty(x.shape, dtype=_dtype_of_norm(x, weight, casts_first), device=x.device)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    scale = weight if casts_first and not offset else weight.float() + offset
    for rows, its_out, its_rstd in _parts(x, out, rstd):
        whole = rows.float()
        torch.rsqrt(whole.pow(2).mean(-1, keepdim=True).add_(eps), out=its_rstd)
        normalised = whole * its_rstd
        its_out.copy_((normalised.to(x.dtype) if casts_first else normalised) * scale)
    return out, rstd


@rms_norm.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, casts_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(x.shape, dtype=_dtype_of_norm(x, weight, casts_first), device=x.device)
    return out, torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


@torch.library.custom_op("finetune::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    of_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    casts_first: bool,
    learns: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of ``x`` and of ``weight``; of the latter none, of shape (0,), where it does not learn.

    With ``y = x * rstd`` and ``g`` the gradient of ``y``, that of ``x`` is ``rstd * (g - y * mean(g * y))``.
    """
    if liger.computes(x, weight):
        return liger.rms_norm_backward(of_out, x, weight, rstd, offset, casts_first, learns)
    of_x = torch.empty_like(x)
    of_weight = torch.zeros(len(weight) if learns else 0, dtype=torch.float32, device=x.device)
    scale = weight.float() + offset
    for gradient, rows, its_rstd, its_of_x in _parts(of_out, x, rstd, of_x):
        normalised = rows.float() * its_rstd
        of_rows = gradient.float()
        if learns:
            rounded = normalised.to(x.dtype) if casts_first else normalised
            of_weight += (of_rows * rounded).flatten(0, -2).sum(0)
        of_rows = of_rows * scale
        along = (of_rows * normalised).mean(-1, keepdim=True)
        its_of_x.copy_(normalised.mul_(along).neg_().add_(of_rows).mul_(its_rstd))
    return of_x, of_weight.to(weight.dtype)


@rms_norm_backward.register_fake
def _(
    of_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    casts_first: bool,
    learns: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), weight.new_empty(len(weight) if learns else 0)


@torch.library.custom_op("finetune::gated", mutates_args=())
def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """``silu(gate) * up``, or ``gelu_tanh(gate) * up`` (arXiv:2002.05202)."""
    if liger.computes(gate, up):
        return liger.gated(gate, up, activation)
    out = torch.empty_like(gate)
    for its_gate, its_up, its_out in _parts(gate, up, out):
        torch.mul(_ACTIVATIONS[activation](its_gate), its_up, out=its_out)
    return out


@gated.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("finetune::gated_backward", mutates_args={"gate", "up"})
def gated_backward(of_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    """Put the gradients of ``gate`` and ``up`` in their places: nobody else needs them any more."""
    if liger.computes(gate, up):
        liger.gated_backward(of_out, gate, up, activation)
        return
    for gradient, its_gate, its_up in _parts(of_out, gate, up):
        activated = _ACTIVATIONS[activation](its_gate)
        of_activated = gradient * its_up
        torch.mul(activated, gradient, out=its_up)
        its_gate.copy_(_DERIVED[activation](of_activated, its_gate))


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_DERIVED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}


def _dtype_of_norm(x: torch.Tensor, weight: torch.Tensor, casts_first: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if casts_first else x.dtype


def _parts(first: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Some rows of all at a time, where a row is the last dimension."""
    width = first.shape[-1]
    rows = max(1, AT_ONCE.get(first.device.type, AT_ONCE["cuda"]) // (4 * width))
    every = [each.view(-1, each.shape[-1]) for each in (first, *others)]
    yield from zip(*(each.split(rows) for each in every), strict=True)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, casts_first: bool
    ) -> torch.Tensor:
        x = x.contiguous()
        out, rstd = rms_norm(x, weight, eps, offset, casts_first)
        ctx.save_for_backward(x, weight, rstd)
        ctx.convention = offset, casts_first
        found: torch.Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        learns = ctx.needs_input_grad[1]
        of_x, of_weight = rms_norm_backward(of_out.contiguous(), x, weight, rstd, *ctx.convention, learns)
        return of_x, of_weight if learns else None, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        found: torch.Tensor = gated(gate, up, activation)
        return found

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        gated_backward(of_out.contiguous(), gate, up, ctx.activation)
        return gate, up, None


def fuse(model: torch.nn.Module) -> None:
    """Have each RMSNorm, gated MLP and rotation of queries and keys that is known by its numbers be one operation.

    In layers that are not recomputed as a whole, the product of a gated MLP is computed again in the backward pass:
    keeping it would take a fifth of what a layer keeps. Choose before which layers are recomputed.
    """
    recomputed = recomputed_parts(model)
    for module in model.modules():
        if forward := _norm_of(module) or _mlp_of(module, again=module not in recomputed) or rotary.rotating(module):
            module.forward = types.MethodType(forward, module)


def known_in(model: torch.nn.Module) -> dict[str, int]:
    """How many modules of each kind ``fuse`` finds in a model, whose weights may be on the meta device."""
    norms = sum(_norm_of(module) is not None for module in model.modules())
    mlps = sum(_mlp_of(module, again=False) is not None for module in model.modules())
    rotations = sum(rotary.rotating(module) is not None for module in model.modules())
    found = {"RMSNorm": norms, "gated MLP": mlps, "rotary embedding": rotations}
    return {kind: count for kind, count in found.items() if count}


def computed_by(kind: str) -> str:
    """Whose kernels compute on a kind of device, ``cpu`` or ``cuda``."""
    return liger.NAME if kind == "cuda" and liger.is_installed() else "PyTorch"


def _computed_again(product: torch.Tensor, compute: Callable[[], torch.Tensor]) -> AbstractContextManager[None]:
    """Within it autograd does not keep a tensor, and has it computed again where the backward pass needs it.

    Hooks do not nest: whoever sets some around the model, as activation checkpointing does, sees nothing of what is
    kept within.
    """
    key, elements = storage_key(product.untyped_storage()), product.numel()

    def pack(saved: torch.Tensor) -> torch.Tensor | torch.Size:
        is_it = storage_key(saved.untyped_storage()) == key and saved.numel() == elements and saved.is_contiguous()
        return saved.shape if is_it else saved

    def unpack(packed: torch.Tensor | torch.Size) -> torch.Tensor:
        return compute().view(packed) if isinstance(packed, torch.Size) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _norm_of(module: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
    """The forward that computes what a module's own does; None where it is no such norm."""
    eps = next((name for name in ("variance_epsilon", "eps") if isinstance(getattr(module, name, None), float)), None)
    if eps is None or [name for name, _ in module.named_parameters()] != ["weight"] or any(module.children()):
        return None

    def norm(offset: float, casts_first: bool) -> Callable[..., torch.Tensor]:
        def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = _RmsNorm.apply(hidden_states, self.weight, getattr(self, eps), offset, casts_first)
            return found

        return forward

    candidates = [norm(offset, casts_first) for offset, casts_first in ((0.0, True), (1.0, False), (0.0, False))]
    with without_modes(), torch.no_grad():
        weight = torch.linspace(0.5, 1.5, WIDTH, device="cpu", dtype=torch.bfloat16)
    return _the_one_like(module, candidates, weight=weight)


def _mlp_of(module: torch.nn.Module, *, again: bool) -> Callable[..., torch.Tensor] | None:
    """As ``_norm_of``, of an MLP whose gate is multiplied with another projection of the same input."""
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return None

    def mlp(activation: str) -> Callable[..., torch.Tensor]:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.gate_proj(x), self.up_proj(x)
            dtype = torch.promote_types(gate.dtype, up.dtype)
            gate, up = gate.to(dtype).contiguous(), up.to(dtype).contiguous()
            product = _Gated.apply(gate, up, activation)
            with _computed_again(product, lambda: gated(gate.detach(), up.detach(), activation)) if again else KEPT:
                found: torch.Tensor = self.down_proj(product)
            return found

        return forward

    projections = {
        "gate_proj": lambda x: x * 1.25,
        "up_proj": lambda x: x.flip(-1),
        "down_proj": lambda x: x,
    }
    return _the_one_like(module, [mlp(activation) for activation in _ACTIVATIONS], **projections)


def _the_one_like(
    module: torch.nn.Module, candidates: list[Callable[..., torch.Tensor]], **replaced: Any
) -> Callable[..., torch.Tensor] | None:
    """Of forwards, the one that returns the numbers of the module's own, where some of its attributes are others."""
    forward = type(module).forward
    if len(inspect.signature(forward).parameters) != 2:  # itself and its input
        return None
    seen: Any = _Seen(module, replaced)
    with without_modes(), torch.no_grad(), torch.random.fork_rng([]), _in_training(module):
        numbers = torch.sin(torch.arange(ROWS * WIDTH, device="cpu").view(ROWS, WIDTH))
        for x in (2 * numbers, 1e3 * numbers, numbers.to(torch.bfloat16)):
            try:
                own = forward(seen, x)
                candidates = [each for each in candidates if _are_equal(own, each(seen, x))]
            except Exception:  # of any type: it needs more than a module of these kinds has
                return None
    return candidates[0] if len(candidates) == 1 else None


@contextmanager
def _in_training(module: torch.nn.Module) -> Iterator[None]:
    were = {each: each.training for each in module.modules()}
    module.train()
    try:
        yield
    finally:
        for each, was in were.items():
            each.training = was


def _are_equal(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)


class _Seen:
    """A module for its own forward, which finds other things under some of its names."""

    def __init__(self, module: torch.nn.Module, replaced: dict[str, Any]) -> None:
        self._module, self._replaced = module, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(self._module, name)

    @property
    def __class__(self) -> Any:  # for its ``super()``
        return type(self._module)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise TypeError(f"This is seen as a {type(self._module)}, and as nothing else.")
