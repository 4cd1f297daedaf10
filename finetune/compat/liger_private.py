"""Liger's kernels for a GPU, by the functions beneath its autograd: what is kept for the backward pass is ours to say.

Read in 0.8.5; earlier versions take other arguments. Goes when Liger offers its kernels as operations without autograd.
"""

import functools
import importlib.util
from importlib import metadata

import torch
from packaging.version import Version

NAME = "Liger"


@functools.cache
def is_installed() -> bool:
    """Whether a version from 0.8.5 on can be imported, with the Triton that it needs."""
    if any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")):
        return False
    try:
        return Version(metadata.version("liger-kernel")) >= Version("0.8.5")
    except metadata.PackageNotFoundError:
        return True  # a nightly build, which has another name


def computes(*tensors: torch.Tensor) -> bool:
    """Whether Liger's kernels take these tensors: on a GPU, of one dtype."""
    return tensors[0].is_cuda and len({each.dtype for each in tensors}) == 1 and is_installed()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, casts_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``models.fused.rms_norm``."""
    from liger_kernel.ops.rms_norm import rms_norm_forward

    out, _, rstd, *_ = rms_norm_forward(x, weight, eps, offset, _mode(casts_first), None)
    return out, rstd.view(*x.shape[:-1], 1)


def rms_norm_backward(
    of_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    casts_first: bool,
    learns: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``models.fused.rms_norm_backward``."""
    from liger_kernel.ops.rms_norm import rms_norm_backward as backward
    from liger_kernel.ops.utils import calculate_settings

    block, warps = calculate_settings(x.shape[-1])
    rows = x.view(-1, x.shape[-1])
    of_x, of_weight = backward(
        of_out, rows, weight, rstd.view(-1), offset, _mode(casts_first), block, warps, False, None, needs_dw=learns
    )
    return of_x, of_weight if learns else weight.new_empty(0)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """See ``models.fused.gated``."""
    from liger_kernel.ops.geglu import geglu_forward
    from liger_kernel.ops.swiglu import swiglu_forward

    _, _, out = (swiglu_forward if activation == "silu" else geglu_forward)(gate, up)
    return out


def gated_backward(of_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    """See ``models.fused.gated_backward``."""
    from liger_kernel.ops.geglu import geglu_backward
    from liger_kernel.ops.swiglu import swiglu_backward

    (swiglu_backward if activation == "silu" else geglu_backward)(gate, up, of_out)


def rotates(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether Liger's kernel takes these queries and keys."""
    return computes(q, k) and q.shape[-1] % 2 == 0


def rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``models.rotary.rotated``. The kernel writes into what it is given, where that is contiguous by positions."""
    from liger_kernel.ops.rope import rope_backward, rope_forward

    own = [each.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for each in (q, k)]
    found, others, *_ = (rope_backward if back else rope_forward)(*own, cos, sin)
    return found, others


def _mode(casts_first: bool) -> int:
    from liger_kernel.ops.rms_norm import _str_to_casting_mode

    mode: int = _str_to_casting_mode["llama" if casts_first else "gemma"]
    return mode
