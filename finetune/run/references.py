"""What a reference model says of all answers, computed once, before training: no second copy of the weights is held."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list

from finetune.cache import cache_folder, checksums, key_of
from finetune.data.batches import Batches, Inputs
from finetune.data.sampler import EMPTY, dealt_batch, micro_batches
from finetune.models import loading
from finetune.run.screen import Preparing
from finetune.run.session import Session
from finetune.training.preferences import reference_answers
from finetune.units import spoken

OWN_NAME = "references"


def know_references(session: Session) -> None:
    """Have each pair of a session know what the model that it begins with says of its answers. Collective.

    To be called once the model is prepared, and before ``begin``, which may restore another. Remembered by rows, model
    and precision: a run that is resumed reads them.
    """
    batches, model = session.batches, session.cfg.model
    assert isinstance(batches, Batches)
    assert batches.paired
    every: list[Inputs] = [batches, session.examined] if session.examined else [batches]
    answers, is_main = 2 * sum(map(len, every)), session.accelerator.is_main_process
    key: list[Any] = [each.rows.fingerprint for each in every] + [
        loading.identity(model.path, revision=model.revision, weights=False),
        # all of their bytes: of two versions of a model one tensor may differ
        checksums(Path(model.path), "*.safetensors") if is_main and Path(model.path).is_dir() else None,
        [session.cfg.train.seed if model.random_weights else None, session.cfg.quantization.bits],
        [session.cfg.train.weights, session.launch.mixed_precision],
    ]
    file = cache_folder() / OWN_NAME / f"{key_of(key)}.npy"
    known = broadcast_object_list([_read(file, answers) if is_main else None])[0]
    if known is None:
        began = time.perf_counter()
        with Preparing(shown=is_main) as tell:
            known = np.concatenate([_computed(session, each, tell).reshape(-1) for each in every])
        if is_main:
            _write(file, known)
        session.screen.say(f"reference: {answers:,} answers in {spoken(time.perf_counter() - began)}")
    for each, its_own in zip(every, np.split(known, np.cumsum([2 * len(each) for each in every])[:-1])):
        each.references = its_own


def _computed(session: Session, inputs: Inputs, tell: Callable[[str, int], None]) -> np.ndarray:
    """Log-probabilities of the answers of each pair, of shape (pairs, 2)."""
    accelerator, size, collate = session.accelerator, session.batches.micro_batch_size, session.collate
    processes = accelerator.num_processes
    order = [*range(len(inputs)), *[EMPTY] * (-len(inputs) % (size * processes))]
    order = dealt_batch(order, inputs.lengths, size, flat=inputs.flat)
    shares = [micro_batches(order, rank=i, world_size=processes, micro_batch_size=size) for i in range(processes)]
    own = list[torch.Tensor]()
    for number, places in enumerate(shares[accelerator.process_index]):
        tell("Computing what the reference model says of the answers", 2 * size * processes * number)
        batch: Any = collate(list(map(inputs.documents, places)), accelerator.device)
        own.append(reference_answers(session.model, batch))
    values = accelerator.gather(torch.stack(own).float()[None]).cpu().numpy()
    pairs = np.array(shares)
    found = np.empty((len(inputs), 2), np.float32)
    found[pairs[pairs != EMPTY]] = values[pairs != EMPTY]
    return found


def _read(file: Path, answers: int) -> np.ndarray | None:
    """What was remembered; None if nothing was, or if it was damaged."""
    try:
        known: np.ndarray = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return known if known.shape == (answers,) and np.isfinite(known).all() else None


def _write(file: Path, known: np.ndarray) -> None:
    """Remember; where the folder cannot be written, a run that is resumed computes again."""
    work = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with work.open("wb") as opened:
            np.save(opened, known, allow_pickle=False)
        work.rename(file)
    except OSError:
        return
