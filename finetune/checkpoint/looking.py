"""Which checkpoint a run goes on from, and whether there is room for its own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from finetune import distributed
from finetune.checkpoint.folder import checkpoints_of
from finetune.checkpoint.reader import Checkpoint, newest, open_all, open_checkpoint
from finetune.errors import InputError
from finetune.units import GIB

NONE_LEFT = "No checkpoint in {run} can be used; copy them again, or begin anew with --train.overwrite true."


def look_for(resume: str, run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, None to begin; and a sentence for each that is not complete and was passed over.

    Args:
        resume: ``none``, ``auto`` (the newest complete one of ``run``) or a folder.
        run: output folder of this run.

    Raises:
        InputError: if there are checkpoints, or a folder that was named, and none is complete.
    """
    if resume == "none":
        return None, []
    if resume == "auto":
        found, passed_over = newest(run)
        if found is None and passed_over:
            raise InputError([NONE_LEFT.format(run=run), *passed_over])
        return found, passed_over
    return open_checkpoint(Path(resume)), []


def chosen(resume: str, run: Path, strategy: distributed.Strategy, *, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that all processes go on from, all of whose bytes are as they were written; None to begin.

    Collective: the first process looks, each reads a part of the files. With ``auto``, one that is damaged is passed
    over for the next older one.

    Args:
        say: told what was passed over, and why.

    Raises:
        InputError: if there are checkpoints and none can be used, or the one that was named cannot.
    """
    found: list[str] = []
    if strategy.rank == 0:
        newest_one, passed_over = look_for(resume, run)
        for sentence in passed_over:
            say(sentence)
        if newest_one is not None:
            every = open_all(newest_one.path.parent)[0] if resume == "auto" else [newest_one]
            found = [str(one.path) for one in every if one.step <= newest_one.step]
    damage: list[str] = []
    with distributed.long_timeout_gather() as gather:
        for path in json.loads(gather(json.dumps(found))[0]):
            checkpoint = open_checkpoint(Path(path))
            problems = gather(json.dumps(checkpoint.damaged(strategy.rank, strategy.world_size)))
            told = [problem for of_process in problems for problem in json.loads(of_process)]
            if not told:
                for problem in damage:
                    say(problem)
                return checkpoint
            damage += told
    if damage:
        raise InputError([NONE_LEFT.format(run=run), *damage] if resume == "auto" else damage)
    return None


def is_own(checkpoint: Checkpoint, run: Path) -> bool:
    """Whether a checkpoint lies in this output folder."""
    return run.resolve() in checkpoint.path.resolve().parents


def describe_newest(run: Path) -> str:
    """In a clause, where a run that has ended can be taken up again."""
    found, _ = newest(run)
    if found is None:
        return "it has no checkpoint, so it would begin anew"
    return f"the same command goes on after step {found.step} with --checkpoint.resume auto (and without overwrite)"


def room_problems(run: Path, checkpoint_bytes: int, *, at_once: int) -> list[str]:
    """Why the disk of an output folder cannot hold this many checkpoints, as sentences.

    What earlier checkpoints of the same folder take counts as free: they are replaced by those to come.
    """
    existing = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
    held = sum(file.stat().st_size for file in checkpoints_of(run).glob("step-*/*") if file.is_file())
    free, needed = shutil.disk_usage(existing).free + held, checkpoint_bytes * at_once
    if needed <= free:
        return []
    size, room = (f"{amount / GIB:.2f} GiB" for amount in (checkpoint_bytes, free))
    return [
        f"train.output_dir: {at_once} checkpoint{'s' if at_once > 1 else ''} of {size} must fit in {run} at a time "
        f"(those of checkpoint.keep, and the one being written), and {room} are free; make room, lower "
        "checkpoint.keep, or write none with --checkpoint.every 0 --checkpoint.at_end false."
    ]
