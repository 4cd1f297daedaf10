"""The library of the recipes. Its packages are rooms: each imports only from those before it.

Small modules: ``errors``, ``seeds``, ``units``, ``start_up`` (signals before training), ``cache``, ``hub_access``,
``shipped`` (files of an installed package), ``forked_workers``. ``compat``: private names of other libraries.
``config``: keys, YAML and flags, compatibility. ``hardware``: GPUs, interconnects, cores.
``data``: files to rows, rows to batches. ``scoring``: how answers are judged. ``models``: weights, adapters, attention.
``optim``: optimizers, schedule. ``distributed``: DDP, FSDP2 and ZeRO. ``training``: the step, the loss, evaluation.
``output``: what a run writes. ``report``: runs on a page. ``checkpoint``: what a run resumes from.
``export``: merged models. ``generation``: answers. ``trace``: the step on fake tensors.
``planner``: what fits, and how fast. ``run``: what every recipe shares. ``cli``: the ``finetune`` command.

From Python, ``finetune.train`` runs a recipe, and returns a ``finetune.RunResult``.
"""

import os
from typing import Any

# PyTorch then asks for huge pages in host memory, which it reads when it first allocates. On two cores a step of full
# fine-tuning of SmolLM2-135M takes 1.4 s for 1.85, in which memory was mapped page by page.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``train`` and ``RunResult``, imported when they are asked for: PyTorch comes with them, which takes seconds."""
    if name == "train":
        from finetune.run.from_python import train

        return train
    if name == "RunResult":
        from finetune.run.run_result import RunResult

        return RunResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
