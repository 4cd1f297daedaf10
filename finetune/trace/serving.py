"""Answers to a ``Tracer``'s questions, in a process that has imported PyTorch.

Each trace runs in a process forked from this one, as many at a time as there are cores: it changes the state of its
process, and DeepSpeed's engine keeps its process groups.
"""

import contextlib
import gc
import json
import logging
import os
import selectors
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from finetune.cache import key_of
from finetune.compat import fake_tensors, traced_engine
from finetune.compat.peft_private import import_peft
from finetune.distributed import deepspeed_ops
from finetune.errors import InputError, first_line
from finetune.models.loading import config_from, without_weights
from finetune.trace.anatomy import anatomy_of
from finetune.trace.asking import environment_of_child
from finetune.trace.depth import trace_depth
from finetune.trace.powers import MicroBatch
from finetune.trace.setting import setting_of
from finetune.trace.shallow import record_of

OF_A_FILE = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
"""What a configuration says of the files that it lies beside, on which a step does not depend."""
PATIENCE_SECONDS = 300
"""Without any answer, after which traces are ended: the longest that was seen took 20."""
MANY = 8
"""Jobs that are worth tracing two of them in this process first."""


def answers_to(question: Mapping[str, Any], *, may_trace_here: bool = False) -> Iterator[dict[str, Any]]:
    """One for each thing that is asked, as it is found.

    Args:
        may_trace_here: whether this process has nothing else to do: what it has traced itself, its forks know.
    """
    if question["what"] == "anatomy":
        yield _anatomy(question["model"])
        return
    import_peft()  # a second that each trace would take, where this process has not done it

    jobs, here = list(question["jobs"]), []
    if may_trace_here and len(jobs) >= MANY:
        for frameworks in (("plain", "replicated"), ("fully_shard",)):
            alike = [job for job in jobs if setting_of(job[2]).placement.framework in frameworks]
            if alike:
                here.append(max(alike, key=lambda job: (job[2]["bits"] == 4, job[2]["activation_checkpointing"])))
    yield from _traced([job for job in jobs if job not in here], here, question["at_a_time"])


def import_the_rest() -> None:
    """What traces import on their way, and what would take its time in each of them."""
    with contextlib.suppress(ImportError):  # where no ZeRO is asked for, nobody misses it
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


def _traced(jobs: Sequence[Any], here: Sequence[Any], at_a_time: int) -> Iterator[dict[str, Any]]:
    """Answers to jobs, those to trace in this process first; the first others run beside them."""
    waiting, running = list(jobs), selectors.DefaultSelector()

    def fill(places: int) -> None:
        while waiting and len(running.get_map()) < places:
            number, *job = waiting.pop(0)
            pipe, pid = _forked(job)
            running.register(pipe, selectors.EVENT_READ, (number, pid))

    fill(at_a_time - 1 if here else at_a_time)
    for number, *job in here:
        yield {"number": number} | _answer(job)
    fill(at_a_time)
    while running.get_map():
        if not (ready := running.select(PATIENCE_SECONDS)):
            ready = [(key, 0) for key in running.get_map().values()]
            for key, _ in ready:
                os.kill(key.data[1], signal.SIGKILL)
        for key, _ in ready:
            number, pid = key.data
            running.unregister(key.fileobj)
            with os.fdopen(key.fd) as pipe_end:
                said = pipe_end.read()
            os.waitpid(pid, 0)
            fill(at_a_time)
            yield {"number": number} | (json.loads(said) if said else {"failed": "its process was killed"})


def _forked(job: Sequence[Any]) -> tuple[int, int]:
    """The end of a pipe on which a process will answer, and the process."""
    here, there = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads hold nothing that a trace needs
        pid = os.fork()
    if pid:
        os.close(there)
        return here, pid
    try:
        _answer_and_tell(job, there)
    finally:
        os._exit(0)  # the libraries' destructors look for the processes of the group


def _answer_and_tell(job: Sequence[Any], pipe: int) -> None:
    import torch

    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # libraries print
        os.dup2(nowhere, descriptor)
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    gc.freeze()  # what was there before the trace
    fake_tensors.forget_process_groups()
    traced_engine.forget_process_groups()
    environment = environment_of_child({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    os.environ.clear()
    os.environ.update(environment)
    with os.fdopen(pipe, "w") as file:
        json.dump(_answer(job), file)


def _answer(job: Sequence[Any]) -> dict[str, Any]:
    try:
        return {"depth": _depth(*job)}
    except InputError as error:
        return {"problems": error.problems}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {first_line(error)}"}


def _depth(model: dict[str, Any], setting: dict[str, Any], layers: int, micro_batch: dict[str, Any]) -> dict[str, Any]:
    return record_of(trace_depth(config_from(model), setting_of(setting), MicroBatch(**micro_batch)))
