"""Which checkpoint a run resumes from, and whether there is disk space for its own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from finetune import distributed
from finetune.checkpoint.folder import checkpoints_of, in_place, linked, unfinished, unnamed, up_to
from finetune.checkpoint.reader import Checkpoint, newest, open_all, open_checkpoint
from finetune.errors import InputError
from finetune.units import GIB

NONE_LEFT = "No checkpoint in {run} can be used; copy them again, or start over with --train.overwrite true."


def look_for(resume: str, run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to resume from, None to start; and a sentence for each incomplete one that was skipped.

    Args:
        resume: ``none``, ``auto`` (the newest complete one of ``run``) or a folder.
        run: output folder of this run.

    Raises:
        InputError: if there are checkpoints, or a folder was named, and none is complete; or if some are links.
    """
    if resume == "none":
        return None, []
    if resume == "auto":
        if links := linked(checkpoints_of(run)):
            raise InputError(
                f"{links[-1]} is a link, and a run writes and removes its checkpoints in their place; move the folder "
                "back, or make a link of the whole folder of checkpoints."
            )
        found, passed_over = newest(run)
        if found is None and passed_over:
            raise InputError([NONE_LEFT.format(run=run), *passed_over])
        return found, passed_over
    return open_checkpoint(Path(resume)), []


def has_saved(run: Path) -> bool:
    """Whether a run has a complete checkpoint, with its final name or without.

    Raises:
        InputError: as ``look_for``.
    """
    return bool(unnamed(checkpoints_of(run))) or look_for("auto", run)[0] is not None


def chosen(resume: str, run: Path, strategy: distributed.Strategy, *, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint that all processes resume from, with verified checksums; None to start a new run.

    Collective: the first process chooses, each verifies a part of the files. With ``auto``, a damaged one is skipped
    for the next older one.

    Args:
        say: called with a sentence for each checkpoint that was skipped.

    Raises:
        InputError: if there are checkpoints but none can be used, or the named one cannot.
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
    """Whether a checkpoint is in this output folder."""
    return checkpoints_of(run).resolve() == checkpoint.path.resolve().parent  # which may lie on another disk


def describe_newest(run: Path) -> str:
    """A clause on how to resume a run that has stopped."""
    found, _ = newest(run)
    if found is None:
        return "it has no checkpoint, so it would start over"
    return (
        f"to resume after step {found.step}, run the same command with --checkpoint.resume auto (and without overwrite)"
    )


def room_problems(
    run: Path,
    checkpoint_bytes: int,
    *,
    at_once: int,
    keeps_best: bool = False,
    result_bytes: int = 0,
    resumed_step: int | None = None,
) -> list[str]:
    """Why the disk of an output folder has no space for this many checkpoints and the result, as sentences.

    The space of earlier checkpoints in the same folder, and of a result that is half written, counts as free, because
    new ones take their place; not that of checkpoints after ``resumed_step``, which are left behind for a person to
    remove, and not that of final.old, which is there until the new result is complete.
    """
    existing = next(folder for folder in (run, *run.absolute().parents) if folder.exists())
    folder = checkpoints_of(run)
    replaced = in_place(folder) if resumed_step is None else up_to(folder, resumed_step)
    replaced += [*unfinished(folder), run / "final.tmp"]
    held = sum(file.stat().st_size for path in replaced for file in path.glob("*") if file.is_file())
    free, needed = shutil.disk_usage(existing).free + held, checkpoint_bytes * at_once + result_bytes
    if needed <= free:
        return []
    size, result, room = (f"{amount / GIB:.2f} GiB" for amount in (checkpoint_bytes, result_bytes, free))
    if at_once == 0:
        return [
            f"train.output_dir: final/ of {result} must fit in {run}, but {room} are free; free some space, or choose "
            "another folder."
        ]
    beside = f", and final/ of {result}" if result_bytes else ""
    best = " the best one, of eval.keep_best," if keeps_best else ""
    fewer = "disable checkpoints with --checkpoint.every 0 --checkpoint.at_end false"
    return [
        f"train.output_dir: {at_once} checkpoint{'s' if at_once > 1 else ''} of {size} must fit in {run} at a time "
        f"(those of checkpoint.keep,{best} and the one being written){beside}, but {room} are free; free some space, "
        f"lower checkpoint.keep, or {'set eval.keep_best to false' if keeps_best else fewer}."
    ]
