"""How many micro-batches make a step, where that changes during a run."""

import torch
from accelerate import Accelerator

from finetune.distributed.sharding import engine_of


def accumulate(accelerator: Accelerator, model: torch.nn.Module, micro_batches: int) -> None:
    """Have the next step take so many micro-batches of each process.

    DeepSpeed divides losses by its own number of them, and ZeRO with offload looks at its optimizer's.
    """
    if micro_batches == accelerator.gradient_accumulation_steps:
        return
    accelerator.gradient_accumulation_steps = micro_batches
    accelerator.step = 0  # of its count, from which it knows a step's last one
    if engine := engine_of(model):
        engine.set_train_batch_size(accelerator.num_processes * micro_batches * engine.train_micro_batch_size_per_gpu())
        engine.optimizer.gradient_accumulation_steps = micro_batches
