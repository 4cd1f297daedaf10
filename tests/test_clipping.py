"""Gradients are clipped by the norm of all of them, which is computed in fp32 whatever they are stored in."""

import pytest
import torch

from finetune.distributed.clipping import clip

BF16, FP32 = torch.bfloat16, torch.float32


def trained(dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    parameters = [torch.zeros(40, 3, dtype=each, requires_grad=True) for each in dtypes]
    for each in parameters:
        each.grad = torch.randn(each.shape, generator=random).to(each.dtype)
    return parameters


def in_fp64(parameters: list[torch.Tensor]) -> float:
    return float(torch.cat([each.grad.double().flatten() for each in parameters if each.grad is not None]).norm())


@pytest.mark.parametrize("dtypes", [[FP32] * 3, [BF16] * 3, [BF16, FP32, BF16]])
def test_the_norm_of_gradients_in_bf16_is_exact_to_fp32_and_they_are_clipped_by_it(dtypes: list[torch.dtype]):
    parameters = trained(dtypes)
    exact = in_fp64(parameters)
    assert float(clip(parameters, 0.5)) == pytest.approx(exact, rel=1e-6)
    assert in_fp64(parameters) == pytest.approx(0.5, rel=1e-3)  # each element is rounded once


def test_gradients_below_the_bound_stay_as_they_are_and_parameters_without_one_are_left_out():
    parameters = trained([BF16, FP32, FP32])
    parameters[2].grad = None
    before = [each.grad.clone() for each in parameters[:2] if each.grad is not None]
    clip(parameters, 100.0)
    assert all(each.grad is not None and each.grad.equal(was) for each, was in zip(parameters, before))


def test_a_model_without_any_gradient_has_the_norm_0():
    assert float(clip([torch.zeros(2, requires_grad=True)], 1.0)) == 0
