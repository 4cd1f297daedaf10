"""Whether a checkpoint can be resumed with a configuration: what must agree, and what may change."""

import importlib.metadata
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.checkpoint.folder import checkpoints_of, leave_later_behind, remove_all
from finetune.checkpoint.looking import is_own
from finetune.checkpoint.reader import Checkpoint
from finetune.config.sections import Checkpoint as Settings
from finetune.config.sections import Train
from finetune.optim.optimizer import state_bytes_of_weight
from finetune.optim.schedule import learning_rate
from finetune.output import output_folder, run_files

SAME_RUN = {
    "train.seed": "the row order would differ",
    "train.global_batch_size": "its steps have other rows",
    "train.weights": "its weights have another precision",
    "data.packing": "its steps have other rows",
    "data.streaming": "its steps have other rows",
    "adapter.type": "other weights were trained",
    "adapter.rank": "its matrices have another shape",
    "adapter.alpha": "its adapter would be scaled differently",
    "adapter.rank_stabilized": "its adapter would be scaled differently",
    "adapter.targets": "other weights were trained",
    "adapter.rank_pattern": "its matrices have another shape",
    "adapter.alpha_pattern": "its adapter would be scaled differently",
    "adapter.modules_to_save": "other weights were trained",
    "adapter.init": "its adapter was trained on other frozen weights, or from another start",
    "quantization.bits": "it was trained on other frozen weights",
    "dpo.loss": "another loss was learnt",
    "dpo.beta": "another loss was learnt",
    "dpo.desirable_weight": "another loss was learnt",
    "dpo.undesirable_weight": "another loss was learnt",
    "dpo.margin": "another loss was learnt",
    "dpo.label_smoothing": "another loss was learnt",
    "dpo.length_normalized": "another loss was learnt",
    "dpo.sft_weight": "another loss was learnt",
    "train.batch_warmup": "its steps have other rows",
}
"""Keys that must not change, and why. Sources (data.train, data.stages) may move: their rows are compared instead."""
LATER = (
    "dpo.desirable_weight",
    "dpo.undesirable_weight",
    "dpo.margin",
    "dpo.label_smoothing",
    "dpo.length_normalized",
    "dpo.sft_weight",
    "train.batch_warmup",
    "adapter.rank_pattern",
    "adapter.alpha_pattern",
)
"""Those that checkpoints of earlier versions lack, which then have nothing to compare."""
BEFORE_IT_WAS_A_KEY = {"adapter.init": "default"}
"""What checkpoints of earlier versions were trained with."""
SAME_OPTIMIZER = ("train.optimizer",)
CHOSEN = ("train.micro_batch_size", "train.activation_checkpointing")
"""Of which a record has what was chosen, where the configuration says auto."""
NEVER_TOLD = (
    "train.output_dir",
    "train.overwrite",
    "train.plan_check",
    "checkpoint.every",
    "checkpoint.at_end",
    "checkpoint.keep",
    "checkpoint.resume",
    "log.every",
    "log.profile",
    "log.to",
    "log.project",
    "log.report",
    "data.train",
    "data.eval",
    "model.path",
    "adapter.from",
)
"""Keys whose changes are not reported: inputs are compared by their fingerprints."""
ANEW = "start a new run from the model that `finetune checkpoint export` writes."
INPUTS = {
    "train": "data.train: the training rows",
    "eval": "data.eval: the held-out rows",
    "tokenizer": "the tokenizer or its chat template",
    "base": "model.path: the model",
    "adapter": "adapter.from: the adapter",
}


def config_problems(checkpoint: Checkpoint, now: Mapping[str, Any], *, precision: str, weights_only: bool) -> list[str]:
    """Why a run with this configuration cannot resume from a checkpoint, as sentences.

    Args:
        now: sections of the configuration.
        precision: of the launch.
        weights_only: the optimizer is reset.
    """
    before = BEFORE_IT_WAS_A_KEY | dict(by_key(checkpoint.contents["run"]["config"]))
    after = dict(by_key(now))
    changed = {
        key: f"{key} was {before.get(key)!r} in {checkpoint.path} and is {after.get(key)!r} now"
        for key in (*SAME_RUN, *SAME_OPTIMIZER)
        if before.get(key) != after.get(key) and (key in before or key not in LATER)
    }
    found = [f"{changed[key]}: {why}; set it back, or {ANEW}" for key, why in SAME_RUN.items() if key in changed]
    decays = before.get("train.ema_decay", 0.0), after["train.ema_decay"]  # older runs have none
    if not weights_only and switches_averages(checkpoint, decays[1]):
        what = "averages of its weights, which were evaluated" if decays[0] else "no averages of its weights"
        found.append(
            f"train.ema_decay was {decays[0]:g} in {checkpoint.path} and is {decays[1]:g} now, but the checkpoint has "
            f"{what}; set it back, or reset the optimizer with --checkpoint.resume_weights_only true."
        )
    rounded = checkpoint.contents["run"]["strategy"]["precision"]
    if rounded != precision and now["adapter"]["type"] != "none":
        found.append(
            f"{checkpoint.path} was trained with mixed precision {rounded}, to which the frozen weights under its "
            f"adapter were rounded, but this launch uses {precision}; launch with --mixed_precision {rounded}."
        )
    if not weights_only:
        found += [
            f"{changed[key]}, and its state cannot be converted; set it back, or reset the optimizer with "
            "--checkpoint.resume_weights_only true."
            for key in SAME_OPTIMIZER
            if key in changed
        ]
    return found


def switches_averages(checkpoint: Checkpoint, ema_decay: float) -> bool:
    """Whether a run that resumes begins or gives up averages of its weights: its evaluations were of other weights."""
    before = checkpoint.contents["run"]["config"]["train"].get("ema_decay", 0.0)  # older runs have none
    return bool(before) != bool(ema_decay)


def rate_problems(checkpoint: Checkpoint, rate: float) -> list[str]:
    """Why a run cannot resume with a learning rate that is only a default, which may be that of another version."""
    before = checkpoint.contents["run"]["config"]["train"]["learning_rate"]
    if before == rate:
        return []
    return [
        f"train.learning_rate was {before:g} in {checkpoint.path}, and its default with an adapter is {rate:g} now; "
        "set it to the one that you mean."
    ]


def input_problems(checkpoint: Checkpoint, now: Mapping[str, str | None], config: Mapping[str, Any]) -> list[str]:
    """The inputs (of ``INPUTS``) whose fingerprint differs from the checkpoint's, as sentences.

    Args:
        config: sections of the configuration.
    """
    run = checkpoint.contents["run"]
    saved, packages = run["data"], run["packages"]
    read_otherwise = [line.partition(": ")[2] for line in changes(run["config"], config) if ": data." in line]
    others = [
        f"{name} {packages[name]}"
        for name in ("transformers", "tokenizers")
        if packages.get(name) != importlib.metadata.version(name)
    ]
    hint = f" (it was written with {' and '.join(others)}, which may be the reason)" if others else ""
    if read_otherwise:
        hint = f" ({', '.join(read_otherwise)}: set it back)"
    return [
        f"{what} changed since {checkpoint.path} was written{hint}, so the run would not continue as it began; restore "
        f"the original, or {ANEW}"
        for key, what in INPUTS.items()
        if saved.get(key) != now.get(key)
    ]


def length_problems(checkpoint: Checkpoint, max_length: int, differ: Callable[[int, int], bool]) -> list[str]:
    """Why a model cannot go on whose rotary frequencies depend on ``data.max_length``, as a sentence.

    Args:
        differ: whether the model's frequencies do, for rows of up to two lengths (``frequencies.differ``).
    """
    before = checkpoint.contents["run"]["config"]["data"]["max_length"]
    if not differ(before, max_length):
        return []
    return [
        f"data.max_length was {before} in {checkpoint.path} and is {max_length} now: the model's rotary frequencies "
        f"depend on it; set it back, or {ANEW}"
    ]


def weight_problems(checkpoint: Checkpoint, trained: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Why a checkpoint's weights differ from the trained ones (given by name and shape), as a sentence."""
    saved = checkpoint.shapes("weights/")
    wrong = [f"{name} is missing" for name in trained if name not in saved]
    wrong += [f"{name} is unexpected" for name in saved if name not in trained]
    wrong += [
        f"{n} has shape {saved[n]} instead of {s}" for n, s in trained.items() if n in saved and saved[n] != tuple(s)
    ]
    if not wrong:
        return []
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return [
        f"The checkpoint {checkpoint.path} does not fit the configured model and adapter: "
        f"{'; '.join(wrong[:3])}{more}; use those that it was trained with."
    ]


def step_problems(folder: Path, checkpoint: Checkpoint | None, steps: int) -> list[str]:
    """Why a run of this many steps cannot resume: it is already further, or finished without a checkpoint."""
    if checkpoint and checkpoint.step > steps:
        return [
            f"{checkpoint.path} is at step {checkpoint.step}, but the run has only {steps} steps; raise train.steps."
        ]
    if checkpoint is None and (finished := run_files.finished_steps(folder)) not in (0, steps):
        return [
            f"{folder} has a finished run of {finished} steps and no checkpoint to resume from; choose another folder, "
            "or replace that run with --train.overwrite true and --checkpoint.resume none."
        ]
    return []


def restarts_optimizer(checkpoint: Checkpoint, settings: Settings, train: Train) -> bool:
    """Whether the optimizer is reset: if requested, unless the same run goes on, which was asked to before."""
    before = checkpoint.contents["run"]["config"]
    goes_on = is_own(checkpoint, Path(train.output_dir)) and before["checkpoint"]["resume_weights_only"]
    switches = before["train"]["optimizer"] != train.optimizer or switches_averages(checkpoint, train.ema_decay)
    return settings.resume_weights_only and (switches or not goes_on)


def describe(
    checkpoint: Checkpoint,
    now: Mapping[str, Any],
    *,
    precision: str,
    weights_only: bool,
    steps: int,
    tokens: int | None,
) -> list[str]:
    """Lines for the run's output: where it resumes, and which settings changed.

    Args:
        steps: of the whole run, as configured now.
        tokens: that are trained in the checkpoint's step, as configured now; None where that is as it was.
    """
    lines = [f"resuming after step {checkpoint.step} from {checkpoint.path}"]
    if weights_only:
        lines.append("the optimizer is reset, because checkpoint.resume_weights_only is set")
    if (rounded := checkpoint.contents["run"]["strategy"]["precision"]) != precision:
        lines.append(f"changed since then: mixed precision {rounded} -> {precision}")
    if checkpoint.contents["run"]["steps"] != steps:
        lines.append(_other_length(checkpoint, now, steps=steps, tokens=tokens))
    return lines + changes(checkpoint.contents["run"]["config"], now)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each setting that changed between two configurations, and is not compared by other means."""
    known = dict(by_key(before))
    return [
        f"changed since then: {key} {known[key]} -> {value}"
        for key, value in by_key(now)
        if key in known and known[key] != value and key not in NEVER_TOLD and not (key in CHOSEN and value == "auto")
    ]


def _other_length(checkpoint: Checkpoint, now: Mapping[str, Any], *, steps: int, tokens: int | None) -> str:
    """What a changed number of steps means for the learning rate and the rows."""
    run, last = checkpoint.contents["run"], checkpoint.step
    before = _rates(run["config"]["train"], run["steps"], last)
    after = _rates(now["train"], steps, min(last + 1, steps))
    then = "the learning rate continues as before"
    if before != after[:last]:
        rates = f"{before[-1]:.2e} in step {last}" + (f", {after[-1]:.2e} in step {last + 1}" if last < steps else "")
        then = (
            f"the learning rate follows the schedule of {steps} steps from here on ({rates}), so the losses "
            "differ from "
            "those of an uninterrupted run"
        )
    if tokens is not None and checkpoint.contents["progress"]["metrics"][-1]["tokens"] != tokens:
        then += f"; step {last} had fewer rows than it would have now, and the missing ones are skipped"
    return f"the run now has {steps} steps, not {run['steps']}: {then}"


def _rates(train: Mapping[str, Any], total_steps: int, steps: int) -> list[float]:
    """Learning rates of the first steps of a run, by its section ``train``."""
    section = Train.model_construct(**train)  # an older run's has fewer keys
    return [learning_rate(step, total_steps, section) for step in range(1, steps + 1)]


def bytes_of(shapes: Mapping[str, tuple[int, ...]], train: Train) -> int:
    """Approximate bytes of a checkpoint's tensors: each trained weight and its optimizer state."""
    weight_bytes = 2 if train.weights == "bf16" else 4
    state = state_bytes_of_weight(train.optimizer, weight_bytes, averages=train.averages)
    return sum(map(math.prod, shapes.values())) * (weight_bytes + state)


def by_key(sections: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys as a user writes them (``train.steps``), with their values."""
    for section, values in sections.items():
        for key, value in values.items():
            yield f"{section}.{key}", value


def is_in(resume: str, run: Path) -> bool:
    """Whether a run resumes in its own folder: with ``auto``, or from one of its checkpoints by name."""
    places = {run.resolve(), checkpoints_of(run).resolve()}  # which may lie on another disk
    return resume == "auto" or (resume != "none" and not places.isdisjoint((Path(resume) / "inside").resolve().parents))


def prepare_folder(run: Path, checkpoint: Checkpoint | None, *, overwrite: bool, reads_on: bool) -> list[str]:
    """Prepare an output folder to start a run, or to resume from one of its checkpoints.

    Args:
        reads_on: whether the run has steps left.

    Returns:
        Lines on what was already there.
    """
    if checkpoint is None:
        if overwrite:
            remove_all(run)
        return output_folder.prepare_folder(run) + output_folder.leave_links_aside(run)
    # first: their steps are struck from the records next, and a run that is killed in between would resume from them
    later = leave_later_behind(checkpoints_of(run), checkpoint.step)
    metrics = checkpoint.contents["progress"]["metrics"]
    told = run_files.go_back_to(run, checkpoint.step, metrics, reads_on=reads_on)
    told += output_folder.leave_links_aside(run)
    return told + [f"{path} is from a later step and no longer used; remove it if you do not need it" for path in later]


def checkpoints_at_once(settings: Settings, steps: int, *, best_of_every: int = 0) -> int:
    """Most checkpoints in an output folder at a time: those that are kept, the best one, and the one being written.

    Args:
        best_of_every: steps between the evaluations of which the best is kept; 0 where none is.
    """
    saved = {step for every in (settings.every, best_of_every) if every for step in range(every, steps + 1, every)}
    saved |= {steps} if settings.at_end or best_of_every else set()  # the last step is evaluated too
    return min(settings.keep + 1 + (best_of_every > 0), len(saved))
