"""``python -m finetune.distributed``: build DeepSpeed's C++ operations in advance."""

import torch

from finetune.distributed.deepspeed_ops import build, problems

if __name__ == "__main__":
    build(cpu=not torch.cuda.is_available(), offload=True, nvme=not problems(nvme=True))
