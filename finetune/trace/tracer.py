"""Steps of a model under many settings, each traced once, and remembered.

Traced by a child that imports PyTorch once, or by forks of this process where it has no GPU. Imports nothing that is
slow: a question whose answers are all known starts no child.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash
from filelock import FileLock
from pydantic import TypeAdapter

from finetune.cache import cache_folder, key_of
from finetune.errors import InputError, RunStopped
from finetune.shipped import shipped_files
from finetune.trace.asking import Child, can_fork, take_child
from finetune.trace.layers import Anatomy
from finetune.trace.partly import partly_recomputed
from finetune.trace.placement import placement_of, traced_as
from finetune.trace.powers import MicroBatch, prime_micro_batch
from finetune.trace.setting import APART, Setting
from finetune.trace.shallow import Depth, Step, depth_of, with_scores_put_together
from finetune.trace.tensor_parts import part_config

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")
"""Whose versions a trace depends on."""
OWN_NAME = "traces"
KEPT_DAYS = 60
"""For which a trace is remembered."""


def key_setting(setting: Setting) -> Setting:
    """The setting whose step is traced for another, without what a trace does not depend on.

    Steps are functions of the micro-batch; all micro-batches but the first are alike, and a step of one is the first of
    two. Not so under DDP, whose gradients lie beside its buckets until the last micro-batch, and go there within it: it
    is unlike those between. Under ZeRO-3 the first is like the others, as its gradients are always added up. fp16 takes
    the bytes of bf16, but under ZeRO-3: what it adds to the engine's step is done on the host where that offloads. What
    a reference takes is added to a step's trace (``planner.memory``, ``planner.speed``).
    """
    strategy, world_size = traced_as(setting.strategy, setting.world_size, setting.model_parts)
    place = placement_of(strategy, world_size)
    of_replicas = place.framework == "replicated"
    micro_batches = 1 if place.zero_stage == 3 else min(setting.accumulation, 3) if of_replicas else 2
    as_bf16 = setting.precision == "fp16" and (place.zero_stage != 3 or strategy != setting.strategy)
    return replace(
        setting,
        recomputed_layers=None,
        strategy=strategy,
        world_size=world_size,
        micro_batch_size=1,
        row_tokens=1,
        layout="flat" if setting.flat else "padded",
        accumulation=micro_batches,
        stages=1,
        parts=1,
        pipeline_schedule="1f1b",
        tensor=1,
        paired=False,
        embedding_noise=False,
        one_kernel=setting.one_kernel or setting.weights != "bf16" or setting.optimizer != "adamw",
        reference="none",
        mismatches=False,
        precision="bf16" if as_bf16 else setting.precision,
    )


def key_settings(setting: Setting, layers: int) -> list[Setting]:
    """The settings whose steps are traced for another: two, where some layers are recomputed and others are not.

    Args:
        layers: of the model.
    """
    key = key_setting(setting)
    is_partly = setting.activation_checkpointing and (setting.recomputed_layers or layers) < layers
    return [replace(key, activation_checkpointing=False), key] if is_partly else [key]


def with_part_alone(setting: Setting) -> Setting:
    """Of the GPUs that have the same part of each layer, where the model is this part."""
    return replace(setting, world_size=setting.world_size // setting.tensor, tensor=1)


def with_whole_layers(setting: Setting) -> Setting:
    """Where GPUs split layers, of the whole model on one GPU: its weights are those of a checkpoint."""
    return replace(setting, strategy="single", world_size=1, **APART) if setting.tensor > 1 else setting


class Tracer:
    """The steps of one model. A context: its child ends with it."""

    def __init__(
        self,
        model_config: Mapping[str, Any],
        *,
        row_tokens: int,
        on_progress: Callable[[int, int], None] = lambda done, of: None,
        folder: Path | None = None,
        parts_of_scores: int = 1,
    ) -> None:
        """
        Args:
            model_config: contents of a config.json.
            row_tokens: positions of the rows that are asked about; shorter ones may be asked about too.
            on_progress: told of traces that are done, and how many there are in all, before and after each.
            folder: where traces are remembered; by default in ``cache.cache_folder``.
            parts_of_scores: of which the model has one, where it is a part itself.
        """
        self.model_config = dict(model_config)
        self.row_tokens = row_tokens
        self.on_progress = on_progress
        self.parts_of_scores = parts_of_scores
        self.folder = folder or cache_folder() / OWN_NAME
        self._child: Child | None = None
        self._parts: dict[int, Tracer] = {}
        self._steps: dict[Setting, Step | InputError | RunStopped] = {}

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for part in self._parts.values():
            part.__exit__(kind, error, trace)
        if self._child is not None:
            self._child.end()

    def _of_part(self, parts: int) -> "Tracer":
        """Of the model that each of so many GPUs computes which split its layers.

        Raises:
            InputError: if it is not one of these models.
        """
        if not self.anatomy.sizes:
            raise InputError("The planner does not know how the layers of this model are split; use another strategy.")
        if parts not in self._parts:
            config = part_config(self.model_config, dict(self.anatomy.sizes), parts)
            self._parts[parts] = Tracer(
                config,
                row_tokens=self.row_tokens,
                on_progress=self.on_progress,
                folder=self.folder,
                parts_of_scores=dict(self.anatomy.sizes)["vocab_size"] // config["vocab_size"],
            )
        return self._parts[parts]

    @property
    def anatomy(self) -> Anatomy:
        """The model's sizes.

        Raises:
            InputError: if transformers cannot build it.
            RunStopped: if the child fails.
        """
        return self._recognised[0]

    @cached_property
    def _recognised(self) -> tuple[Anatomy, str]:
        """The model's sizes, and a name for its configuration, however much of it a file leaves to defaults."""
        file = self.folder / f"{key_of(['anatomy', self.model_config, versions()])}.json"
        answer = _read(file)
        if answer is None:
            (answer,) = self._ask({"what": "anatomy", "model": self.model_config}, 1)
            if "problems" in answer:
                raise InputError(answer["problems"])
            _write(file, answer)
        return TypeAdapter(Anatomy).validate_python(answer["anatomy"]), answer["model"]

    def anatomy_of(self, setting: Setting) -> Anatomy:
        """The model's sizes; of what its layers can defer, those of the part that one GPU has.

        Raises:
            InputError: if it is not one of the models of which a part can be traced.
        """
        if setting.tensor == 1:
            return self.anatomy
        part = self._of_part(setting.tensor).anatomy
        return replace(self.anatomy, deferrable_share=part.deferrable_share, deferrable_width=part.deferrable_width)

    def micro_batch(self, setting: Setting) -> MicroBatch:
        """That is traced: of primes that divide no dimension of the model, of its adapter, or of their shards."""
        positions = self.anatomy.positions
        longest = self.row_tokens if positions is None else min(self.row_tokens, positions)
        longest = max(2, longest // setting.context)
        shards = setting.placement.weight_shards * setting.experts
        whole = {*self.anatomy.dimensions, setting.rank, *dict(setting.ranks).values()}
        others = {setting.context, setting.context + 1}
        return prime_micro_batch(longest, whole | {-(-size // shards) for size in whole} | others)

    def step(self, setting: Setting) -> Step:
        """The step of a setting.

        Raises:
            InputError: if it cannot be trained, or not be traced.
            RunStopped: if the libraries here cannot be traced.
        """
        if setting.tensor > 1:
            return self._of_part(setting.tensor).step(with_part_alone(setting))
        self.prepare([setting])
        found = [self._steps[key] for key in key_settings(setting, self.anatomy.layers)]
        steps = [each for each in found if isinstance(each, Step)]
        if len(steps) < len(found):
            raise next(each for each in found if not isinstance(each, Step))
        return steps[0] if len(steps) == 1 else partly_recomputed(*steps, layers=setting.recomputed_layers or 0)

    def prepare(self, settings: Sequence[Setting]) -> None:
        """Trace settings together, as many at a time as there are cores. What cannot be traced is told by ``step``.

        Where GPUs split layers, the whole model as well (``with_whole_layers``).

        Raises:
            RunStopped: if the child fails.
        """
        if self.anatomy.sizes:
            for parts in sorted({setting.tensor for setting in settings} - {1}):
                own = [with_part_alone(setting) for setting in settings if setting.tensor == parts]
                self._of_part(parts).prepare(own)
        whole = map(with_whole_layers, settings)
        keys = (key for setting in whole for key in key_settings(setting, self.anatomy.layers))
        wanted = dict.fromkeys(key for key in keys if key not in self._steps)
        places = [(key, layers) for key in wanted for layers in dict.fromkeys(self._depths(key))]
        places.sort(key=lambda place: -place[1])  # those that take longest first
        files = {place: self.folder / f"{self._key(*place)}.json" for place in places}
        answers = {place: _read(file) for place, file in files.items()}
        if None in answers.values():
            with _alone(self.folder, list(map(str, files.values()))):  # of several processes of a run, one traces
                answers = {place: _read(file) for place, file in files.items()}
                missing = [place for place, answer in answers.items() if answer is None]
                _forget_old(self.folder)
                for answer in self._traced(missing) if missing else ():
                    place = missing[answer.pop("number")]
                    answers[place] = answer
                    if "failed" not in answer:
                        _write(files[place], answer)
        for key in wanted:
            self._steps[key] = self._step(key, answers)

    def _step(self, key: Setting, answers: Mapping[tuple[Setting, int], Any]) -> Step | InputError | RunStopped:
        depths: list[Depth] = []
        for layers in self._depths(key):
            answer = answers[key, layers]
            if "problems" in answer:
                return InputError(answer["problems"])
            if "failed" in answer:
                return RunStopped(
                    f"The step under {key.strategy} cannot be traced with the versions of the libraries that are "
                    f"installed ({answer['failed']}); name another with --strategy, or install other versions."
                )
            depths.append(with_scores_put_together(depth_of(answer["depth"]), self.parts_of_scores))
        low, high = depths
        return Step(self.anatomy.layers, low, low if low.layers == high.layers else high, key.placement.reach)

    def _depths(self, key: Setting) -> tuple[int, int]:
        place = key.placement
        return self.anatomy.depths(2 + place.reach if place.communicates_each_micro_batch else 2)

    def _traced(self, places: Sequence[tuple[Setting, int]]) -> list[Any]:
        jobs = []
        for key, layers in places:
            config, micro_batch = self.anatomy.shortened(self.model_config, layers), self.micro_batch(key)
            jobs.append([config, asdict(key), asdict(micro_batch)])
        return self._ask({"what": "steps", "jobs": jobs}, len(jobs))

    def _ask(self, question: Mapping[str, Any], answers: int) -> list[Any]:
        """So many answers to a question."""
        found = []
        self.on_progress(0, answers)
        for answer in self._answers(question, answers):
            found.append(answer)
            self.on_progress(len(found), answers)
        return found

    def _answers(self, question: Mapping[str, Any], answers: int) -> Iterator[Any]:
        if can_fork():
            from finetune.trace.serving import answers_to, workers

            with workers() as forks:
                yield from answers_to(question, forks)
            return
        self._child = self._child or take_child()
        yield from self._child.answers(question, answers)

    def _key(self, key: Setting, layers: int) -> str:
        return key_of([asdict(key), layers, self._recognised[1], versions(), asdict(self.micro_batch(key))])


@cache
def versions() -> dict[str, str]:
    """What decides how a step runs: versions of libraries, and the sources and strategy files of this package."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    own = xxhash.xxh3_128()
    package = Path(__file__).parents[1]
    strategies = shipped_files() / "accelerate_configs"
    for folder, files in ((package, package.rglob("*.py")), (strategies, strategies.glob("*.yaml"))):
        for file in sorted(files):
            own.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return found | {"finetune": own.hexdigest()}


@contextlib.contextmanager
def _alone(folder: Path, what: Sequence[str]) -> Iterator[None]:
    """While no other process looks for the same; where there can be no lock, everybody traces."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            # of sixteen: few files, and seldom another's
            stack.enter_context(FileLock(folder / f"lock-{key_of(list(what))[0]}"))
        yield


def _forget_old(folder: Path) -> None:
    """Remove what was traced long ago: other versions of a library, or of this package, do not ask for it again."""
    longest_ago = time.time() - KEPT_DAYS * 24 * 3600
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError):  # another process was faster, or another user's file may not be removed
            if file.stat().st_mtime < longest_ago:
                file.unlink()


def _read(file: Path) -> Any:
    """What was remembered; None if nothing was, or if it was damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write(file: Path, answer: Any) -> None:
    """Remember; where the folder cannot be written, the next question asks again."""
    work = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        work.write_text(json.dumps(answer), encoding="utf-8")
        work.rename(file)
    except OSError:
        return
