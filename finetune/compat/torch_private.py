"""Private names of PyTorch that training uses. Read in 2.11 to 2.13."""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

GROWTH_TRACKER = "_growth_tracker"
"""Key of the good steps since the scale changed, in ``GradScaler.state_dict``. Goes with a public getter and setter."""


def cpu_computes_bf16() -> bool:
    """Whether this CPU multiplies in bf16. Goes when ``torch.cpu`` answers it without an underscore."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def offload_policies(model: torch.nn.Module) -> list[Any]:
    """The offload policy of each FSDP2 group of parameters. Goes when ``FSDPModule`` has a getter for it."""
    groups: list[Any] = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    return [group.offload_policy for group in groups if group is not None]
