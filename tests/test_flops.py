"""Counted FLOPs against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.models import loading as models
from finetune.models.flops import training_flops


def test_flops_of_a_training_step_are_those_that_pytorch_counts():
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        attn_implementation="eager",  # the counter sees its matrix products
    )
    model, length = LlamaForCausalLM(config), 48
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(3, length, dtype=torch.int64)).logits.sum().backward()
    shape = models.shape(model)
    ours = training_flops(**shape, mean_row_length=length).of(1, 1)
    skipped_half = 6 * shape["layers"] * shape["heads"] * shape["head_dim"] * length  # above the diagonal
    assert (ours + skipped_half) * 3 * length == pytest.approx(counter.get_total_flops(), rel=0.01)
