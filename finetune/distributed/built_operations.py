"""Whether DeepSpeed is installed, and its C++ operations are built or can be. For ``finetune doctor``."""

import importlib.metadata
import os
import shutil
from pathlib import Path

import torch

from finetune.distributed import deepspeed_ops

OPERATIONS = {
    "CPUAdamBuilder": "the strategies with offload",
    "ShareMemCommBuilder": "rehearsals on the CPU",
    "AsyncIOBuilder": "zero3_nvme",
}
"""Operations that are compiled, and what needs them."""


def describe_operations() -> tuple[str, list[str]]:
    """What was seen, and sentences on what to do. All of it concerns the ZeRO strategies alone."""
    if deepspeed_ops.problems(nvme=False):
        return "not installed; only the ZeRO strategies need it", []
    version = importlib.metadata.version("deepspeed")
    deepspeed_ops.prepare_import()  # puts ninja on the path
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    wanted = [name for name in OPERATIONS if name != "ShareMemCommBuilder" or not torch.cuda.is_available()]
    builders = {name: get_accelerator().create_op_builder(name) for name in wanted}
    unbuilt = {name: each for name, each in builders.items() if not list(root.glob(f"**/{each.name}/{each.name}.so"))}
    if not unbuilt:
        return f"{version}, its operations are built", []
    seen = f"{version}, not built: {', '.join(each.name for each in unbuilt.values())}"
    tools = [tool for tool in ("c++", "ninja") if shutil.which(tool) is None]
    problems = [f"Install {' and '.join(tools)}, which compile them."] if tools else []
    for name, builder in unbuilt.items():
        if not tools and not builder.is_compatible(verbose=False):
            asks = deepspeed_ops.NO_LIBAIO if name == "AsyncIOBuilder" else f"{builder.name} cannot be built here."
            problems.append(asks)
    if problems:
        return seen, problems
    return (
        f"{seen}; the first run that needs them takes minutes more, or python -m finetune.distributed builds them",
        [],
    )
