"""How many micro-batches make a step, where that changes during a run."""

import torch
from accelerate import Accelerator

from finetune.distributed.sharding import engine_of


def accumulate(accelerator: Accelerator, model: torch.nn.Module, micro_batches: int) -> None:
    """Have the next step take so many micro-batches, of all processes together.

    DeepSpeed divides losses by its own number of them, and ZeRO with offload looks at its optimizer's.
    """
    each = micro_batches // accelerator.num_processes
    if each == accelerator.gradient_accumulation_steps:
        return
    accelerator.gradient_accumulation_steps = each
    accelerator.step = 0  # of its count, from which it knows a step's last one
    if engine := engine_of(model):
        engine.set_train_batch_size(micro_batches * engine.train_micro_batch_size_per_gpu())
        engine.optimizer.gradient_accumulation_steps = each
