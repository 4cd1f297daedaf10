"""Attention to documents without a GPU's kernel: what PyTorch's own gives for each of them alone."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.models import document_attention
from finetune.models.document_attention import each_document

SHORT = 6
Tensors = list[torch.Tensor]


@pytest.fixture(autouse=True)
def documents_of_more_than_six_tokens_are_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(document_attention, "SHORT", SHORT)


def drawn(lengths: list[int], *, key_heads: int, groups: int, value_size: int, dtype: torch.dtype) -> Tensors:
    """Query, key, value, and the gradient of the output."""
    draw, tokens = torch.Generator().manual_seed(sum(lengths)), sum(lengths)
    heads = key_heads * groups
    shapes = [(1, heads, tokens, 8), (1, key_heads, tokens, 8), (1, key_heads, tokens, value_size)]
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    return [*inputs, torch.randn(1, tokens, heads, value_size, generator=draw, dtype=torch.float64).to(dtype)]


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int], window: Any) -> torch.Tensor:
    """By PyTorch's attention, document by document, with a mask of what a token sees."""
    outputs = []
    for start, end in itertools.pairwise(bounds):
        place = torch.arange(end - start)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (window or end))
        of_document = (each[:, :, start:end] for each in (query, key, value))
        outputs.append(F.scaled_dot_product_attention(*of_document, attn_mask=seen, scale=0.3, enable_gqa=True))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def with_gradients(output: torch.Tensor, tensors: Tensors) -> Tensors:
    *inputs, of_output = tensors
    return [output, *torch.autograd.grad(output, inputs, of_output)]


@given(
    lengths=st.lists(st.integers(1, 2 * SHORT), min_size=1, max_size=7),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    value_size=st.sampled_from([4, 8]),
    window=st.sampled_from([None, 1, 3, 9]),
)
@settings(max_examples=100, deadline=None)
def test_documents_together_are_what_each_is_alone(
    lengths: list[int], key_heads: int, groups: int, value_size: int, window: int | None
):
    tensors = drawn(lengths, key_heads=key_heads, groups=groups, value_size=value_size, dtype=torch.float64)
    bounds = [0, *itertools.accumulate(lengths)]
    expected = with_gradients(alone(*tensors[:3], bounds, window), tensors)
    found = with_gradients(each_document(*tensors[:3], bounds, 0.3, window, 0.0), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_short_documents_take_no_call_each_and_long_ones_do(monkeypatch: pytest.MonkeyPatch):
    lengths, seen, original = [3, 9, 6, 1, 7], list[int](), F.scaled_dot_product_attention

    def watched(query: torch.Tensor, *others: Any, **known: Any) -> torch.Tensor:
        seen.append(query.shape[2])
        return original(query, *others, **known)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    tensors = drawn(lengths, key_heads=1, groups=2, value_size=8, dtype=torch.float32)
    bounds = [0, *itertools.accumulate(lengths)]
    each_document(*tensors[:3], bounds, None, None, 0.0)
    assert seen == [9, 7]
    seen.clear()
    each_document(*tensors[:3], bounds, None, None, 0.5)  # dropout is PyTorch's alone
    assert seen == lengths


def test_16_bits_are_as_near_to_fp64_as_pytorchs_own_attention():
    lengths = [6, 5, 6, 4, 3]
    bounds = [0, *itertools.accumulate(lengths)]
    tensors = drawn(lengths, key_heads=2, groups=3, value_size=8, dtype=torch.bfloat16)
    exact = [each.detach().double().requires_grad_(each.requires_grad) for each in tensors]
    expected = with_gradients(alone(*exact[:3], bounds, None), exact)

    def errors(found: Tensors) -> list[float]:
        return [
            float((one.detach().double() - other.detach()).norm() / other.detach().norm())
            for one, other in zip(found, expected)
        ]

    usual = errors(with_gradients(alone(*tensors[:3], bounds, None), tensors))
    found = errors(with_gradients(each_document(*tensors[:3], bounds, 0.3, None, 0.0), tensors))
    assert all(one < 1.5 * other for one, other in zip(found, usual, strict=True)), (found, usual)


def test_autocast_computes_in_16_bits_and_scores_in_32():
    tensors = drawn([6, 4], key_heads=1, groups=2, value_size=8, dtype=torch.float32)
    rounded = [each.detach().bfloat16() for each in tensors[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        found = each_document(*tensors[:3], [0, 6, 10], None, None, 0.0)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, each_document(*rounded, [0, 6, 10], None, None, 0.0))
