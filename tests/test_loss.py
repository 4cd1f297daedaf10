"""The loss against transformers' own, and what a sum gives that a mean does not."""

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from finetune.data.batches import IGNORED
from finetune.training.loss import token_loss_sum


def logits_and_labels(seed: int = 0, rows: int = 3, positions: int = 7, vocabulary: int = 11):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, positions, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (rows, positions), generator=generator)
    labels[torch.rand(rows, positions, generator=generator) < 0.4] = IGNORED
    return logits, labels


def test_sum_over_trained_tokens_equals_transformers_loss_times_its_token_count():
    logits, labels = logits_and_labels()
    next_tokens = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    expected = ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1])
    count = (next_tokens != IGNORED).sum()
    torch.testing.assert_close(token_loss_sum(logits, next_tokens), expected * count)


def test_sums_of_parts_add_up_to_the_sum_of_the_whole_where_means_do_not():
    logits, labels = logits_and_labels()
    whole = token_loss_sum(logits, labels)
    parts = sum(token_loss_sum(logits[i : i + 1], labels[i : i + 1]) for i in range(len(logits)))
    torch.testing.assert_close(parts, whole)
    counts = (labels != IGNORED).sum(1)
    assert len(set(counts.tolist())) > 1
    means = sum(token_loss_sum(logits[i : i + 1], labels[i : i + 1]) / counts[i] for i in range(len(logits))) / 3
    assert abs(means - whole / counts.sum()) > 1e-3


def test_no_trained_position_gives_zero_loss_and_zero_gradient():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((2, 3), IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_fp32(dtype: torch.dtype):
    logits, labels = logits_and_labels()
    loss = token_loss_sum(logits.to(dtype), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, token_loss_sum(logits.to(dtype).float(), labels))
