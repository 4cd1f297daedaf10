"""Liger's kernels in Triton's interpreter, beside PyTorch: in fp32, since it knows no bf16 arithmetic."""

import itertools
from typing import Any

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from triton.runtime import interpreter

from finetune.compat import liger_private as liger
from finetune.models import fused, rotary

CONVENTIONS = [(0.0, True), (1.0, False), (0.0, False)]


def adapt() -> None:
    """What the interpreter of Triton 3.9 lacks of compiled kernels."""
    convert = interpreter._implicit_cvt

    def as_compiled(arg: Any) -> Any:
        if isinstance(arg, float):  # which compiled kernels get as fp32, and interpreted ones as they are
            return tl.tensor(interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
        return convert(arg)

    interpreter._implicit_cvt = as_compiled
    # of CUDA's own library
    rms_norm.rsqrt = lambda x: 1.0 / tl.sqrt(x)
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def compare_norms(convention: tuple[float, bool], width: int) -> None:
    x, of_out, weight = torch.randn(3, 7, width), torch.randn(3, 7, width), torch.randn(width)
    out, rstd = liger.rms_norm(x, weight, 1e-5, *convention)
    torch.testing.assert_close((out, rstd), fused.rms_norm(x, weight, 1e-5, *convention))
    for learns in (True, False):
        given = (of_out, x, weight, rstd, *convention, learns)
        torch.testing.assert_close(liger.rms_norm_backward(*given), fused.rms_norm_backward(*given))


def assert_modes() -> None:
    """In fp32 both are the same numbers."""
    assert liger._mode(casts_first=True) == rms_norm._CASTING_MODE_LLAMA.value
    assert liger._mode(casts_first=False) == rms_norm._CASTING_MODE_GEMMA.value


def compare_products(activation: str) -> None:
    gate, up, of_out = torch.randn(3, 3, 7, 100)
    torch.testing.assert_close(liger.gated(gate, up, activation), fused.gated(gate, up, activation))
    ours, theirs = [gate.clone(), up.clone()], [gate.clone(), up.clone()]
    fused.gated_backward(of_out, ours[0], ours[1], activation)
    liger.gated_backward(of_out, theirs[0], theirs[1], activation)
    torch.testing.assert_close(theirs, ours)


def compare_rotations(heads: int, batches: int) -> None:
    q, k, angles = torch.randn(2, 7, heads, 24), torch.randn(2, 7, 2, 24), torch.randn(batches, 7, 12)
    before = q.clone()
    cos, sin = (each.repeat(1, 1, 2) for each in (angles.cos(), angles.sin()))
    for back in (False, True):
        given = (q.transpose(1, 2), k.transpose(1, 2), cos, sin, back)
        torch.testing.assert_close(liger.rotated(*given), rotary.rotated(*given))
        assert torch.equal(q, before)  # left as they were


if __name__ == "__main__":
    adapt()
    torch.manual_seed(0)
    assert_modes()
    alike = 0
    for convention, width in itertools.product(CONVENTIONS, (64, 100)):
        compare_norms(convention, width)
        alike += 1
    for activation in ("silu", "gelu_tanh"):
        compare_products(activation)
        alike += 1
    for heads, batches in ((6, 1), (4, 2)):
        compare_rotations(heads, batches)
        alike += 1
    print(f"{alike} alike", flush=True)
