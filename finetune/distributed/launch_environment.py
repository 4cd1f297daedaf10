"""The environment variables that ``accelerate launch`` would set for a strategy file.

For code that starts processes itself: ``notebook_launcher`` and the tests. Accelerate's own launch code does the work,
so a strategy file means the same in a notebook and in a shell.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.commands import launch as accelerate_launch
from accelerate.utils import launch as accelerate_environment

from finetune.compat.accelerate_private import launch_defaults
from finetune.errors import InputError


def launch_environment(
    strategy_file: str | Path, num_processes: int, mixed_precision: str | None = None, others: Sequence[str] = ()
) -> dict[str, str]:
    """Variables that ``accelerate launch --config_file FILE --num_processes N`` sets or changes.

    Args:
        others: other flags of it.

    Raises:
        ValueError: if the file is not a launch file.
    """
    flags = ["--config_file", str(strategy_file), "--num_processes", str(num_processes), "--main_process_port", "0"]
    flags += others
    if mixed_precision is not None:
        flags += ["--mixed_precision", mixed_precision]
    args = accelerate_launch.launch_command_parser().parse_args([*flags, "recipe.py"])
    args, defaults, from_file = launch_defaults(args)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = accelerate_environment.prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu or args.use_megatron_lm:
        environment = accelerate_environment.prepare_multi_gpu_env(args)
    else:
        environment = accelerate_environment.prepare_simple_launcher_cmd_env(args)[1]
    environment["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive the fork of a notebook
    return {key: value for key, value in environment.items() if os.environ.get(key) != value}


@contextmanager
def launched_as(strategy_file: str | Path, num_processes: int, mixed_precision: str | None = None) -> Iterator[None]:
    """Set that environment for the processes started within, and restore the old one.

    ``with launched_as("accelerate_configs/ddp.yaml", 2): notebook_launcher(main, (config,), num_processes=2)``

    Raises:
        InputError: if this process can no longer be forked, as ``notebook_launcher`` does for several processes.
    """
    if num_processes > 1 and (torch.cuda.is_initialized() or "bitsandbytes" in sys.modules):
        raise InputError(
            "This kernel has used a GPU or imported bitsandbytes (as a run in 4 or 8 bits does), after which "
            "notebook_launcher cannot start processes. Start them with accelerate launch in a cell, as "
            "notebooks/01_first_run.ipynb does, or restart the kernel."
        )
    before = dict(os.environ)
    os.environ.update(launch_environment(strategy_file, num_processes, mixed_precision))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
