"""What a reference model says of all answers, computed once, before training: no second copy of the weights is held."""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list

from finetune import distributed
from finetune.cache import cache_folder, checksums, key_of
from finetune.data.batches import Batches, Inputs
from finetune.data.sampler import EMPTY, dealt_batch, micro_batches
from finetune.models import continued_adapter, frequencies, loading
from finetune.run.screen import Preparing
from finetune.run.session import Session
from finetune.training.evaluation import of_each_share
from finetune.training.mismatched import both_answers
from finetune.training.preferences import reference_answers
from finetune.units import spoken

OWN_NAME = "references"
AT_ONCE = 200
"""Micro-batches of each process between two times that what is known is written: minutes of large models."""


def know_references(session: Session) -> None:
    """Have each pair of a session know what the model that it begins with says of its answers. Collective.

    To be called once the model is prepared, and before ``begin``, which may restore another. Remembered by rows, model
    and precision, while they are computed too: a run that is resumed, or started again, reads them.
    """
    batches, model = session.batches, session.cfg.model
    assert isinstance(batches, Batches)
    assert batches.paired
    every: list[Inputs] = [batches, session.examined] if session.examined else [batches]
    answers, is_main = 2 * sum(map(len, every)), session.accelerator.is_main_process
    with distributed.long_wait():  # all of their bytes: of two versions of a model one tensor may differ
        folder = loading.folder_of(model.path, revision=model.revision)
        sums = checksums(folder, "*.safetensors") if is_main else None
    key: list[Any] = [each.rows.fingerprint for each in every] + [
        loading.identity(model.path, revision=model.revision, weights=False),
        sums,
        [session.cfg.train.seed if model.random_weights else None, session.cfg.quantization.bits],
        [session.cfg.train.weights, session.launch.mixed_precision],
    ]
    if session.spec.new_tokens:  # all rows of the vocabulary share the probability
        key.append(session.spec.new_tokens.all_rows)
    if frequencies.depend_on_length(session.spec.config):
        key.append(["frequencies", session.cfg.data.max_length])
    adapter = session.cfg.adapter
    if adapter.from_ or adapter.init != "default":  # what it begins with is part of the reference
        key.append([continued_adapter.identity(adapter), adapter.model_dump() | {"from": None}])
    if any(map(_are_judged, every)):
        key.append("with the answers of others")
    file = cache_folder() / OWN_NAME / f"{key_of(key)}.npy"
    known = broadcast_object_list([_read(file, answers) if is_main else None])[0]
    open_answers = int(np.isnan(known).sum())
    began, problem = time.perf_counter(), None
    with Preparing(shown=is_main) as tell:
        for each, its_own in zip(every, np.split(known, np.cumsum([2 * len(each) for each in every])[:-1])):
            each.references = its_own
            for places, found in _computed(session, each, tell):
                its_own.reshape(-1, 2)[places] = found
                problem = _write(file, known) if is_main else None
    if open_answers:
        session.screen.say(f"reference: {open_answers:,} answers in {spoken(time.perf_counter() - began)}")
    if problem:
        session.screen.say(f"reference: {file} cannot be written ({problem}); a run that is resumed computes it again")


def _computed(
    session: Session, inputs: Inputs, tell: Callable[[str, int], None]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of which nothing is known, some at a time, and log-probabilities of their answers, of shape (pairs, 2)."""
    accelerator, size, collate = session.accelerator, session.batches.micro_batch_size, session.collate
    share, processes = session.share["rank"], session.share["world_size"]
    assert inputs.references is not None
    documents = partial(both_answers, inputs) if _are_judged(inputs) else inputs.documents
    order = np.flatnonzero(np.isnan(inputs.references[::2])).tolist()
    if not order:
        return
    order += [EMPTY] * (-len(order) % (size * processes))
    order = dealt_batch(order, inputs.lengths, size, flat=inputs.flat)
    shares = [micro_batches(order, rank=i, world_size=processes, micro_batch_size=size) for i in range(processes)]
    own = shares[share]
    for first in range(0, len(own), AT_ONCE):
        values = list[torch.Tensor]()
        for number, places in enumerate(own[first : first + AT_ONCE], start=first):
            tell("Computing what the reference model says of the answers", 2 * size * processes * number)
            batch: Any = collate(list(map(documents, places)), accelerator.device)
            values.append(reference_answers(session.model, batch))
        found = of_each_share(accelerator, session.model, torch.stack(values).float())
        pairs = np.array([each[first : first + AT_ONCE] for each in shares])
        yield pairs[pairs != EMPTY], found[pairs != EMPTY]


def _are_judged(inputs: Inputs) -> bool:
    """Whether rows have one answer with a label."""
    return bool((inputs.rows.trained_tokens == 0).any())


def _read(file: Path, answers: int) -> np.ndarray:
    """What was remembered, of shape (answers,); NaN where nothing was, or if it was damaged."""
    nothing = np.full(answers, np.nan, np.float32)
    try:
        known: np.ndarray = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return nothing
    return known if (known.shape, known.dtype) == (nothing.shape, nothing.dtype) else nothing


def _write(file: Path, known: np.ndarray) -> str | None:
    """Remember; returns why not, where the folder cannot be written."""
    work = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with work.open("wb") as opened:
            np.save(opened, known, allow_pickle=False)
        work.rename(file)
    except OSError as error:
        return error.strerror or str(error)
    return None
