"""Answers to a ``Tracer``'s questions, in a process that has imported PyTorch."""

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from finetune.cache import key_of
from finetune.compat import fake_tensors, traced_engine
from finetune.compat.peft_private import import_peft
from finetune.distributed import deepspeed_ops
from finetune.errors import InputError, first_line
from finetune.forked_workers import Workers
from finetune.hardware import cores
from finetune.models.loading import config_from, without_weights
from finetune.trace.anatomy import anatomy_of
from finetune.trace.asking import environment_of_child
from finetune.trace.depth import trace_depth
from finetune.trace.powers import MicroBatch
from finetune.trace.setting import setting_of
from finetune.trace.shallow import record_of

OF_A_FILE = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
"""What a configuration says of the files that it lies beside, on which a step does not depend."""


def workers() -> Workers:
    """Forks of this process, one for each core, which trace steps: jobs of a model, a setting and a micro-batch."""
    return Workers(_answer, cores.usable(), prepare=_forget)


def answers_to(question: Mapping[str, Any], workers: Workers) -> Iterator[dict[str, Any]]:
    """One for each thing that is asked, as it is found."""
    if question["what"] == "anatomy":
        yield _anatomy(question["model"])
        return
    import_peft()  # a second that each worker would take, where this process has not done it
    yield from workers.answers(question["jobs"])


def import_the_rest() -> None:
    """What traces import on their way, and what would take its time in each of them."""
    with contextlib.suppress(Exception):  # of any type; where no ZeRO is asked for, nobody misses it
        deepspeed_ops.prepare_import()
        import deepspeed  # noqa: F401
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401

    gc.collect()
    gc.freeze()  # the libraries' objects, which stay


def _anatomy(model: dict[str, Any]) -> dict[str, Any]:
    try:
        config = config_from(model)
        anatomy = asdict(anatomy_of(config, without_weights(config, trust_remote_code=False)))
        contents = config.to_dict()
        for name in OF_A_FILE & contents.keys():
            del contents[name]
        return {"anatomy": anatomy, "model": key_of(contents)}
    except InputError as error:
        return {"problems": error.problems}


def _answer(job: Sequence[Any]) -> dict[str, Any]:
    try:
        return {"depth": _depth(*job)}
    except InputError as error:
        return {"problems": error.problems}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {first_line(error)}"}


def _depth(model: dict[str, Any], setting: dict[str, Any], micro_batch: dict[str, Any]) -> dict[str, Any]:
    return record_of(trace_depth(config_from(model), setting_of(setting), MicroBatch(**micro_batch)))


def _forget() -> None:
    """What a trace should not find in its process: a launch, process groups, and what engines keep of others."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # libraries print
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    environment = environment_of_child({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    os.environ.clear()
    os.environ.update(environment)
    fake_tensors.forget_process_groups()
    traced_engine.forget_process_groups()
    gc.collect()
    gc.freeze()  # what was there before the trace
